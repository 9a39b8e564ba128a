"""The examples of docs/extending.md, all in one module, named in a config and used in whole runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from toy import toy_config

from staleflow.audit import audit_ledger
from staleflow.config import load_config
from staleflow.errors import RunFailed
from staleflow.runtime.launch import launch
from staleflow.runtime.launch_simulation import simulate_run
from staleflow.storage.journal import read_journal

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
STRATEGIES = (
    "coordination.routing.strategy=documented_parts.Emptiest",
    "coordination.synchronization.strategy=documented_parts.Overdue",
    "coordination.synchronization.options={versions: 1}",
    "coordination.migration.strategy=documented_parts.Never",
)


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `documented_parts` with the code of the page, on the path."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (folder / "documented_parts.py").write_text("\n".join(blocks))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "documented_parts", raising=False)


def test_a_run_of_the_documented_parts(documented: None, model: Path, tmp_path: Path) -> None:
    weights, lines = tmp_path / "weights", tmp_path / "lines.txt"
    weights.mkdir()
    config = toy_config(
        model,
        tmp_path,
        "run.steps=3",
        "data.batch_size=4",
        "training.dynamic_sampling=false",
        *STRATEGIES,
        "environment.name=documented_parts.OneQuestion",
        "environment.options={question: [3, 4]}",
        "reward.verifier=documented_parts.even",
        "data.source=documented_parts.Doubles",
        "data.options={first: 1}",
        "training.algorithm=documented_parts.TOKEN_GRPO",
        "rollout.engine=documented_parts.five_tokens",
        "cluster.transport=documented_parts.InFolder",
        f"cluster.transport_options={{folder: {weights}}}",
        f"telemetry.sinks=[{{name: documented_parts.Lines, options: {{path: {lines}}}}}]",
    )
    assert launch(config, resume=False, clean=False) == 0
    assert audit_ledger(tmp_path / "toy").violations == ()
    assert list(weights.iterdir()) == [], "the transport removes its storage"
    kinds = [line.split()[0] for line in lines.read_text().splitlines()]
    assert kinds.count("train") == 3
    journal = list(read_journal(tmp_path / "toy" / "journal.jsonl"))
    assert [line for line in journal if line["k"] == "given"], "a second turn was played"


def test_the_documented_strategies_on_simulated_machines(documented: None, tmp_path: Path) -> None:
    assert (
        simulate_run(load_config([], simulated(tmp_path, *STRATEGIES), {}, simulated=True), clean=False) == 0
    )
    assert audit_ledger(tmp_path / "s").violations == ()


def simulated(folder: Path, *overrides: str) -> list[str]:
    return [
        f"run.output_dir={folder}",
        "run.name=s",
        "run.steps=3",
        "data.batch_size=4",
        "data.group_size=2",
        "telemetry.console=off",
        *overrides,
    ]


def test_a_strategy_that_never_pulls_ends_a_simulation_with_a_reason(
    documented: None, tmp_path: Path
) -> None:
    overrides = simulated(tmp_path, *STRATEGIES, "coordination.synchronization.options={versions: 1000}")
    with pytest.raises(RunFailed, match="the simulation is stuck"):
        simulate_run(load_config([], overrides, {}, simulated=True), clean=False)
