"""Whole runs in one process with redundant members, spare groups and a rule for stragglers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from toy import ToyRun, toy_config

from staleflow.audit import audit_ledger
from staleflow.config.schema import Config
from staleflow.protocol.records import Consume, Record, Release, Swap
from staleflow.storage.ledger import read_ledger


def redundant(model: Path, folder: Path, *overrides: str) -> Config:
    """Long-tailed lengths on two small instances: stragglers there are."""
    return toy_config(
        model,
        folder,
        "rollout.max_new_tokens=60",
        "rollout.fake.lengths.max=60",
        "rollout.fake.lengths.sigma=1.5",
        "rollout.progress_interval_s=0.2",
        "rollout.max_running=16",
        *overrides,
    )


def records(run: ToyRun) -> list[Record]:
    return [record for _, _, record in read_ledger(run.ledger)]


def values(run: ToyRun) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train rows, and the summary."""
    rows = run.monitor.take_rows()
    (summary,) = [row.values for row in rows if row.kind == "summary"]
    return [row.values for row in rows if row.kind == "train"], summary


def bucketed(row: dict[str, Any], kind: str) -> int:
    """Trajectories in all buckets of a row."""
    prefix = f"lengths/{kind}/"
    return sum(n for key, n in row.items() if key.startswith(prefix) and key != f"{prefix}mean")


@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("action", ["wait", "retry", "truncate"])
def test_a_run_with_everything_redundant_is_clean_and_conserves_tokens(
    bound: int, action: str, model: Path, tmp_path: Path
) -> None:
    config = redundant(
        model,
        tmp_path,
        f"staleness.bound={bound}",
        "redundancy.groups=2",
        "redundancy.members=1",
        f"coordination.stragglers.action={action}",
    )
    run = ToyRun(config, tmp_path)
    assert run.run() == "completed"
    assert audit_ledger(run.ledger).violations == ()
    rows, summary = values(run)
    for row in [*rows, summary]:
        parts = ("trained", "filtered", "aborted", "discarded", "in_flight")
        assert row["tokens/generated"] == sum(row[f"tokens/{part}"] for part in parts)
    assert summary["tokens/in_flight"] == 0
    assert run.loop._store._trajectories == {}
    assert run.loop._store._rewards == {}
    assert list(run.loop._control._trajectories.members()) == []
    assert sum(row["rollout/surplus_members"] for row in rows) > 0


@pytest.mark.parametrize(("action", "counted"), [("retry", "retried"), ("truncate", "truncated")])
def test_stragglers_are_counted_and_change_what_is_trained_on(
    action: str, counted: str, model: Path, tmp_path: Path
) -> None:
    """Bound 0: every step waits for its last trajectory, so each action finds work."""
    config = redundant(model, tmp_path, "staleness.bound=0", f"coordination.stragglers.action={action}")
    run = ToyRun(config, tmp_path)
    assert run.run() == "completed"
    assert audit_ledger(run.ledger).violations == ()
    rows, summary = values(run)
    count = sum(row[f"rollout/straggler_{counted}"] for row in rows)
    assert count > 0
    assert summary["lengths/cut"] >= count
    assert summary["lengths/trained/mean"] < summary["lengths/sampled/mean"] or action == "truncate"
    trained = [i for r in records(run) if isinstance(r, Consume) for g in r.groups for i in g.ids]
    anew = sum(i.endswith("-r1") for i in trained)
    assert (anew > 0) == (action == "retry")
    assert not any(i.endswith("-r2") for i in trained)


def test_surplus_members_bias_towards_short_responses_and_the_rows_show_it(
    model: Path, tmp_path: Path
) -> None:
    plain = ToyRun(
        redundant(model, tmp_path / "plain", "run.steps=12", "training.dynamic_sampling=false"), tmp_path
    )
    plain.run()
    _, without = values(plain)
    assert without["lengths/cut"] == 0
    config = redundant(
        model, tmp_path / "more", "run.steps=12", "training.dynamic_sampling=false", "redundancy.members=3"
    )
    more = ToyRun(config, tmp_path / "more")
    more.run()
    rows, summary = values(more)
    assert summary["lengths/cut"] > 0
    assert summary["lengths/trained/mean"] < summary["lengths/sampled/mean"] < without["lengths/sampled/mean"]
    assert summary["lengths/trained/mean"] < without["lengths/trained/mean"]
    assert bucketed(summary, "trained") == sum(bucketed(row, "trained") for row in rows) == 12 * 9
    assert bucketed(summary, "sampled") >= sum(bucketed(row, "sampled") for row in rows)


def test_spare_groups_let_training_go_on_and_every_prompt_is_still_used_once(
    model: Path, tmp_path: Path
) -> None:
    config = redundant(
        model,
        tmp_path,
        "staleness.bound=0",
        "redundancy.groups=2",
        "data.size=16",
        "data.epochs=1",
        "run.steps=50",
        "training.dynamic_sampling=false",
    )
    run = ToyRun(config, tmp_path)
    assert run.run() == "exhausted"
    assert audit_ledger(run.ledger).violations == ()
    assert any(isinstance(r, Swap) for r in records(run))
    assert any(isinstance(r, Release) and r.reason == "expired" for r in records(run))
    uses = Counter(
        g.group.rpartition("-a")[0] for r in records(run) if isinstance(r, Consume) for g in r.groups
    )
    assert uses == {f"e0-p{n}": 1 for n in range(16)}
    rows, _ = values(run)
    assert sum(row["rollout/expired_groups"] for row in rows) > 0


def test_the_same_config_gives_the_same_ledger_with_redundancy(model: Path, tmp_path: Path) -> None:
    """F33."""
    overrides = ("redundancy.groups=2", "redundancy.members=1", "coordination.stragglers.action=retry")
    ledgers = []
    for name in ("a", "b"):
        run = ToyRun(redundant(model, tmp_path, *overrides), tmp_path / name)
        run.run()
        ledgers.append(run.ledger.read_bytes())
    assert ledgers[0] == ledgers[1]
