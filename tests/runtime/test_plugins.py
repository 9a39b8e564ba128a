"""A part of every kind from a package outside, named by dotted path in the config, and used in whole runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from toy import toy_config

from staleflow.audit import audit_ledger
from staleflow.config import load_config
from staleflow.config.schema import Config
from staleflow.errors import ConfigError
from staleflow.runtime.launch import launch
from staleflow.runtime.launch_simulation import simulate_run
from staleflow.storage.journal import read_journal

OUTSIDE = '''
from collections import Counter
from dataclasses import replace

from staleflow.coordination.migration import NaiveMigration
from staleflow.coordination.routing import NaiveRouting
from staleflow.coordination.synchronization import NaiveSynchronization
from staleflow.data.environment import Done, Given
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
    def __init__(self, *, run_name, expected_bytes=None, color):
        super().__init__(run_name=run_name, expected_bytes=expected_bytes)
        USED[f"transport {color}"] += 1


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
    )
    assert launch(config, resume=False, clean=False) == 0
    parts = used()
    assert parts.pop("trainer") == 2
    assert parts.pop("transport red") == 1
    assert parts.pop("sink closed") == 1
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


def test_the_strategy_of_the_documentation_works(outside: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Emptiest" in block]
    (outside / "documented.py").write_text(code)
    config = simulated(tmp_path, "coordination.routing.strategy=documented.Emptiest")
    assert simulate_run(config, clean=False) == 0
    assert audit_ledger(tmp_path / "s").violations == ()


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
        ("telemetry.sinks=[{name: nowhere.Sink}]", "importing nowhere failed"),
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


def test_a_strategy_that_cannot_be_made_is_refused_in_a_simulation_as_well(
    outside: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"coordination\.routing\.strategy"):
        simulate_run(simulated(tmp_path, "coordination.routing.strategy=nowhere.Routing"), clean=False)
    assert not (tmp_path / "s").exists()
