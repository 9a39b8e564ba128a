"""A part of every kind from a package outside, named by dotted path in the config, and used in whole runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy import toy_config

from staleflow.audit import audit_ledger
from staleflow.config import load_config
from staleflow.config.schema import Config
from staleflow.errors import ConfigError
from staleflow.runtime.launch import launch
from staleflow.runtime.launch_simulation import simulate_run
from staleflow.runtime.preflight import prepare_plan
from staleflow.storage.journal import read_journal

OUTSIDE = '''
from collections import Counter
from dataclasses import replace

from staleflow.coordination.migration import NaiveMigration
from staleflow.coordination.routing import NaiveRouting
from staleflow.coordination.synchronization import NaiveSynchronization
from staleflow.data.environment import Done, Given
from staleflow.data.trajectory import Prompt
from staleflow.rollout.fake import FakeEngine
from staleflow.rollout.scripted_lengths import fixed
from staleflow.servers.memory import MemoryTransport
from staleflow.training.algorithms.grpo import GRPO
from staleflow.training.torch_trainer import TorchTrainer

USED = Counter()


class Routing(NaiveRouting):
    def __init__(self, *, label):
        super().__init__()
        self._label = label

    def route(self, state):
        USED[f"routing {self._label}"] += 1
        super().route(state)


class Synchronization(NaiveSynchronization):
    def synchronize(self, state):
        USED["synchronization"] += 1
        super().synchronize(state)


class Migration(NaiveMigration):
    def migrate(self, state):
        USED["migration"] += 1
        return super().migrate(state)


class Transport(MemoryTransport):
    def __init__(self, *, run_name, color):
        super().__init__(run_name=run_name)
        USED[f"transport {color}"] += 1

    def close(self):
        USED["transport closed"] += 1


class Sink:
    def __init__(self, *, path):
        self._path = path

    def write(self, row):
        with open(self._path, "a") as file:
            file.write(row.kind + "\\n")

    def close(self):
        USED["sink closed"] += 1


class FailingSink:
    def write(self, row):
        USED["failing sink"] += 1
        raise OSError("the tracker is dead")

    def close(self):
        USED["failing sink closed"] += 1


class FailingAtTheEnd:
    def write(self, row):
        USED["row"] += 1

    def close(self):
        raise OSError("the last upload failed")


class Unreachable(Sink):
    def __init__(self):
        raise ConnectionError("no such host")


class Prompts:
    """Always the same prompt."""

    def __init__(self, tokenizer, *, split, size, text):
        self._prompt = Prompt(
            prompt_id="0", tokens=tuple(tokenizer.encode(text)), text=text, answer="1", metadata={}
        )
        self._size = size

    def __len__(self):
        return self._size

    def prompt(self, index):
        USED["source"] += 1
        return self._prompt


class OneQuestion:
    def __init__(self, *, question):
        self._question = tuple(question)

    def respond(self, trajectory):
        USED["environment"] += 1
        turns = sum(not segment.generated for segment in trajectory.segments)
        return Done() if turns else Given(tokens=self._question)


def engine(*, config, **common):
    USED["engine"] += 1
    return FakeEngine(**common, vocab_size=14, lengths=fixed(5))


class Trainer:
    """The torch trainer, counted."""

    def __init__(self, *, config):
        from staleflow.runtime.assembly.training import _build_torch_trainer

        self._inner = _build_torch_trainer(config)

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def train(self, batch, *rest):
        USED["trainer"] += 1
        return self._inner.train(batch, *rest)


ALGORITHM = replace(GRPO, name="outside")


def reward(request):
    return float(len(request.response) % 2)
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with a module `outside_parts`."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "outside_parts.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(folder)
    import outside_parts

    outside_parts.USED.clear()
    return folder


def used() -> dict[str, int]:
    import outside_parts

    return dict(outside_parts.USED)


STRATEGIES = (
    "coordination.routing.strategy=outside_parts.Routing",
    "coordination.routing.options={label: mine}",
    "coordination.synchronization.strategy=outside_parts.Synchronization",
    "coordination.migration.strategy=outside_parts.Migration",
)


def test_a_run_of_parts_from_elsewhere(outside: Path, model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.txt"
    config = toy_config(
        model,
        tmp_path,
        "run.steps=2",
        *STRATEGIES,
        "cluster.transport=outside_parts.Transport",
        "cluster.transport_options={color: red}",
        f"telemetry.sinks=[{{name: outside_parts.Sink, options: {{path: {rows}}}}}]",
        "environment.name=outside_parts.OneQuestion",
        "environment.options={question: [3, 4]}",
        "rollout.engine=outside_parts.engine",
        "training.trainer=outside_parts.Trainer",
        "training.algorithm=outside_parts.ALGORITHM",
        "training.dynamic_sampling=false",
        "reward.verifier=outside_parts.reward",
        "data.source=outside_parts.Prompts",
        "data.options={text: '1+0='}",
    )
    assert launch(config, resume=False, clean=False) == 0
    parts = used()
    assert parts.pop("trainer") == 2
    assert parts.pop("transport red") == 1
    assert parts.pop("transport closed") >= 1
    assert parts.pop("sink closed") == 1
    assert parts.pop("source") >= 64
    assert parts.keys() == {"routing mine", "synchronization", "migration", "environment", "engine"}
    assert rows.read_text().split().count("train") == 2
    folder = tmp_path / "toy"
    assert audit_ledger(folder).violations == ()
    given = [line for line in read_journal(folder / "journal.jsonl") if line["k"] == "given"]
    assert given, "a second turn was played"


def test_strategies_from_elsewhere_work_on_simulated_machines(outside: Path, tmp_path: Path) -> None:
    config = simulated(tmp_path, *STRATEGIES)
    assert simulate_run(config, clean=False) == 0
    assert used().keys() == {"routing mine", "synchronization", "migration"}
    assert audit_ledger(tmp_path / "s").violations == ()


def simulated(folder: Path, *overrides: str) -> Config:
    return load_config(
        [],
        [
            f"run.output_dir={folder}",
            "run.name=s",
            "run.steps=3",
            "data.batch_size=4",
            "data.group_size=2",
            "telemetry.console=off",
            *overrides,
        ],
        {},
        simulated=True,
    )


def test_a_run_whose_sink_fails_goes_on_and_says_so_once(outside: Path, model: Path, tmp_path: Path) -> None:
    sinks = "telemetry.sinks=[{name: outside_parts.FailingSink}]"
    config = toy_config(model, tmp_path, "run.steps=3", sinks)
    assert launch(config, resume=False, clean=False) == 0
    assert used() == {"failing sink": 1}
    lines = [json.loads(line) for line in (tmp_path / "toy" / "metrics.jsonl").read_text().splitlines()]
    warnings = [line["event/text"] for line in lines if line.get("event/name") == "warning"]
    (warning,) = warnings
    assert warning == (
        "the metric sink outside_parts.FailingSink failed and gets no further rows: "
        "OSError: the tracker is dead"
    )
    assert sum(line["kind"] == "train" for line in lines) == 3


def test_a_second_jsonl_file_is_a_sink_by_name(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    config = toy_config(
        model, tmp_path, "run.steps=1", f"telemetry.sinks=[{{name: jsonl, options: {{path: {copy}}}}}]"
    )
    assert launch(config, resume=False, clean=False) == 0
    assert copy.read_text() == (tmp_path / "toy" / "metrics.jsonl").read_text()


def test_a_sink_that_fails_at_the_end_or_cannot_be_made_does_not_fail_the_run(
    outside: Path, model: Path, tmp_path: Path
) -> None:
    """A sink without options is named alone. What fails last is still warned of in metrics.jsonl."""
    sinks = "telemetry.sinks=[outside_parts.Unreachable, outside_parts.FailingAtTheEnd]"
    assert launch(toy_config(model, tmp_path, "run.steps=1", sinks), resume=False, clean=False) == 0
    assert used()["row"] > 0
    lines = [json.loads(line) for line in (tmp_path / "toy" / "metrics.jsonl").read_text().splitlines()]
    unreachable, upload = [line["event/text"] for line in lines if line.get("event/name") == "warning"]
    assert "telemetry.sinks.0.name" in unreachable
    assert "no such host; the run goes on without it" in unreachable
    assert upload == (
        "the metric sink outside_parts.FailingAtTheEnd failed and gets no further rows: "
        "OSError: the last upload failed"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("coordination.routing.strategy=outside_parts.Nothing", "module outside_parts has no 'Nothing'"),
        ("coordination.routing.strategy=outside_parts.Routing", "cannot be made with options {}"),
        ("coordination.migration.strategy=outside_parts.OneQuestion", "cannot be made with options {}"),
        ("coordination.synchronization.strategy=outside_parts.Routing", "cannot be made with options {}"),
        ("coordination.migration.strategy=outside_parts.FailingSink", "which has no method 'migrate'"),
        ("cluster.transport=outside_parts.USED", "is neither a class nor a function"),
        ("environment.name=outside_parts.Sink", "cannot be made with options {}"),
        ("environment.name=outside_parts.FailingSink", "which has no method 'respond'"),
        ("cluster.transport=outside_parts.Transport", "missing a required argument: 'color'"),
        ("cluster.transport=outside_parts.engine", "missing a required argument: 'config'"),
        ("telemetry.sinks=[{name: nowhere.Sink}]", "importing nowhere failed"),
        ("telemetry.sinks=[outside_parts.Sink]", "missing a required argument: 'path'"),
        ("telemetry.sinks=[jsonl]", "missing a required argument: 'path'"),
        ("telemetry.sinks=[outside_parts.Migration]", "which has no method 'write'"),
        ("telemetry.sinks=[outside_parts.USED]", "is neither a class nor a function"),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_folder_is_made(
    override: str, message: str, outside: Path, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        launch(toy_config(model, tmp_path, override), resume=False, clean=False)
    assert message in str(refused.value)
    assert override.partition("=")[0] in str(refused.value)
    assert not (tmp_path / "toy").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("coordination.routing.strategy=nowhere.Routing", r"coordination\.routing\.strategy"),
        ("telemetry.sinks=[nowhere.Sink]", r"telemetry\.sinks\.0\.name"),
    ],
)
def test_a_part_that_cannot_be_made_is_refused_in_a_simulation_as_well(
    override: str, message: str, outside: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate_run(simulated(tmp_path, override), clean=False)
    assert not (tmp_path / "s").exists()


def test_a_strategy_that_cannot_be_made_is_refused_in_a_plan_as_well(outside: Path, tmp_path: Path) -> None:
    config = simulated(tmp_path, "coordination.migration.strategy=outside_parts.Nothing")
    with pytest.raises(ConfigError, match="module outside_parts has no 'Nothing'"):
        prepare_plan(config)


def test_a_sink_takes_the_rows_of_a_simulated_run(outside: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.txt"
    sinks = f"telemetry.sinks=[{{name: outside_parts.Sink, options: {{path: {rows}}}}}]"
    assert simulate_run(simulated(tmp_path, sinks), clean=False) == 0
    assert rows.read_text().split().count("train") == 3
