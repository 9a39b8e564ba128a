"""The config schema: every key, its type, its default, its unit, and what null means.

Invariants: types are strict (no "1" for 1), unknown keys are refused, numbers are finite and in range, and
a built Config never changes. Checks across fields are in `checks`.

The text under each field is its documentation: `staleflow config` prints it, and `configs/default.yaml`
is that output. The larger sections are in `schema_rollout`, `schema_coordination`, `schema_training`,
`schema_scoring`, `schema_cluster` and `schema_simulation`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict, model_validator

from staleflow.config.base import Section, SinkName, SourceName
from staleflow.config.schema_cluster import Cluster
from staleflow.config.schema_coordination import Coordination
from staleflow.config.schema_rollout import Rollout
from staleflow.config.schema_scoring import EnvironmentConfig, Evaluation, RewardConfig
from staleflow.config.schema_simulation import Simulation
from staleflow.config.schema_training import Training


class Run(Section):
    """Name, output folder, seed and length of the run."""

    name: str | None = None
    """Name of the run's folder in output_dir; may contain "/". Null: built from the time and the seed."""
    output_dir: str = Field(default="runs", min_length=1)
    """Folder that holds run folders; relative to the working directory."""
    seed: int = Field(default=0, ge=0)
    """Seed of all randomness: data order, token sampling, initial state."""
    steps: int = Field(default=40, ge=1)
    """Training steps (= new weight versions) after which the run is complete."""


class Staleness(Section):
    """The staleness guarantee."""

    bound: int = Field(default=1, ge=0)
    """η: the most weight versions by which trained data may lag. 0: exactly synchronous training."""


class Data(Section):
    """Where prompts come from and how they are batched."""

    source: SourceName = "sums"
    """sums (the built-in task), jsonl, parquet, reasoning_gym:<task>, or a dotted path to your own."""
    path: str | None = None
    """File of a jsonl or parquet source. Null: the source needs none."""
    prompt_column: str | None = None
    """Column with the prompt, text or chat messages; a.b is b inside a. Null: prompt, question or problem."""
    answer_column: str | None = None
    """Column with the reference answer for the verifier. Null: answer, reward_model.ground_truth or
    solution."""
    answer_marker: str | None = "####"
    """If the answer contains this marker, only the text after it counts (as in GSM8K). Null: always the whole
    answer."""
    system_prompt: str | None = None
    """System message for prompts that have none of their own."""
    prompt_template: str = "{prompt}"
    """Text around each prompt; {prompt} stands for the prompt's own text."""
    chat_template: str = "auto"
    """Format of conversations. auto: the tokenizer's own template, if it has one; none: plain text; else the
    path of a Jinja file."""
    chat_options: dict[str, Any] = Field(default_factory=dict)
    """Variables passed to the chat template, such as enable_thinking."""
    size: int | None = Field(default=None, ge=1)
    """Prompts in the data set. Null: all of a file, or the default number of a generated source."""
    batch_size: int = Field(default=24, ge=1)
    """Groups (= prompts) trained on in one step."""
    group_size: int = Field(default=8, ge=1)
    """Trajectories generated for each prompt."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the data set. Null: unlimited, until run.steps is reached."""
    last_batch: Literal["train", "drop", "pad"] = "train"
    """Handling of the last, smaller batch at the end of the last epoch."""
    shuffle: bool = True
    """Draw the prompts of an epoch in a seeded random order; false: in file order."""
    max_filtered_batches: int = Field(default=20, ge=1)
    """The run ends with a message when filtering has dropped this many batches of groups in a row."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options passed to the source; see its documentation."""


class Model(Section):
    """The model that generates and is trained."""

    source: str = Field(default="builtin:sums", min_length=1)
    """Folder of a Hugging Face causal language model, or builtin:sums (a tiny model in the package)."""
    tokenizer: str | None = None
    """Folder of the tokenizer. Null: the model's own."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number type of the weights. On a CPU only float32 is fast."""


class Redundancy(Section):
    """Generate more than training needs and keep what finishes first."""

    groups: int = Field(default=0, ge=0)
    """Spare groups, generated without a guaranteed place in a batch. Prompts of expired ones are drawn
    again."""
    members: int = Field(default=0, ge=0)
    """Trajectories started per group beyond data.group_size. The first to finish are kept, which biases
    training towards short responses."""


class Checkpoint(Section):
    """Checkpoints, which --resume continues from."""

    every: int = Field(default=10, ge=0)
    """Training steps between checkpoints; one is also written at the end. 0: only at the end."""
    keep: int = Field(default=2, ge=1)
    """Number of checkpoints kept; older ones are removed."""


class Wandb(Section):
    """Weights & Biases."""

    mode: Literal["offline", "online", "disabled"] = "offline"
    """offline: written into the run folder, for `wandb sync` later."""
    project: str = Field(default="staleflow", min_length=1)
    """Project of the run."""
    entity: str | None = None
    """User or team. Null: the account's default."""


class SinkConfig(Section):
    """An additional destination for rows of metrics."""

    name: SinkName
    """jsonl (option path), or the dotted path of your own class (docs/extending.md)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the sink."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        """A sink without options may be given by its name."""
        return {"name": value} if isinstance(value, str) else value


class Telemetry(Section):
    """Console, journal and further sinks; metrics.jsonl is always written."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """live: a full-screen view; plain: one line per step; auto: live in a terminal, else plain."""
    journal: bool = True
    """Write journal.jsonl: the events of each trajectory, for `staleflow explain` and trace.json."""
    wandb: Wandb = Wandb()
    sinks: Annotated[tuple[SinkConfig, ...], Strict(False)] = ()
    """Further sinks: jsonl, or the dotted path of your own class (docs/extending.md). Each is a name, or a
    map such as {name: jsonl, options: {path: copy.jsonl}}. A run whose sink fails goes on."""


class Config(Section):
    """The whole resolved config."""

    run: Run = Run()
    staleness: Staleness = Staleness()
    data: Data = Data()
    model: Model = Model()
    redundancy: Redundancy = Redundancy()
    rollout: Rollout = Rollout()
    coordination: Coordination = Coordination()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    cluster: Cluster = Cluster()
    telemetry: Telemetry = Telemetry()
    simulation: Simulation = Simulation()

    def to_yaml(self) -> str:
        """The config as YAML text that `load_config` reads back to an equal Config."""
        from staleflow.config.yaml_text import dump

        text: str = dump(self.model_dump(mode="json"))
        return text
