"""One failed member of a group neither drops the group nor poisons it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy import ToyRun, any_third, toy_config
from whole_runs import batches_of, records_of, rows, watched_engines

from staleflow.audit import audit_ledger
from staleflow.config.load import load_config
from staleflow.config.schema import Config
from staleflow.data.trajectory import ScoredTrajectory, TrainBatch
from staleflow.protocol.records import Release, Trained
from staleflow.reward.verifiers import ScoreRequest
from staleflow.rollout.engine import Engine
from staleflow.rollout.fake import FakeScript
from staleflow.runtime.assembly import build_objective
from staleflow.training.filtering import is_usable

VICTIM = "-m3"


def fails_for_member_3(request: ScoreRequest) -> float:
    """Raises for the fourth member of every group."""
    if request.trajectory_id.endswith(VICTIM):
        raise RuntimeError("this one cannot be scored")
    return any_third(request)


def fails_for_all_but_member_0(request: ScoreRequest) -> float:
    """One survivor in every group."""
    if not request.trajectory_id.endswith("-m0"):
        raise RuntimeError("this one cannot be scored")
    return 1.0


def eight(model: Path, folder: Path, *overrides: str) -> Config:
    return toy_config(
        model,
        folder,
        "run.steps=4",
        "data.group_size=8",
        "reward.on_failure=mask",
        "rollout.max_running=32",
        "rollout.max_retries=0",
        "rollout.progress_interval_s=0.2",
        "rollout.lost_after_s=1",
        *overrides,
    )


def never_generated(config: Config) -> Callable[[str, int], Engine]:
    """Engines in which the fourth member of every group never gains a token."""
    frozen = frozenset(f"e0-p{prompt}-a0{VICTIM}" for prompt in range(64))
    return watched_engines(config, script=FakeScript(freeze=frozen))[0]


def advantages_of(group: tuple[ScoredTrajectory, ...]) -> list[float]:
    """The advantage that each member's tokens are trained with; 0 for a member without any."""
    objective = build_objective(load_config())
    batch = TrainBatch(step=0, groups=(group,))
    (update,) = objective.updates(batch, objective.lay_out(batch), {})
    return [float(row.advantages[row.loss_mask].sum()) / max(row.loss_tokens, 1) for row in update.rows]


CAUSES = ["scoring", "generation"]


def run_with(cause: str, model: Path, folder: Path, *overrides: str) -> tuple[ToyRun, dict[str, Any]]:
    scoring = cause == "scoring"
    verifier = "test_fault_members.fails_for_member_3" if scoring else "toy.any_third"
    config = eight(model, folder, f"reward.verifier={verifier}", *overrides)
    run = ToyRun(config, folder, **({} if scoring else {"make_engine": never_generated(config)}))
    batches = batches_of(run)
    assert run.run() == "completed"
    assert audit_ledger(run.ledger).violations == ()
    groups = [group for batch in batches for group in batch.groups]
    return run, {"groups": groups, "rows": rows(run, "train")}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_failed_member_is_masked_and_the_others_are_compared_without_it(
    cause: str, model: Path, tmp_path: Path
) -> None:
    """F25: fail 1 of 8: it has no token in the loss, and mean and deviation are those of the other seven."""
    run, seen = run_with(cause, model, tmp_path)
    for group in seen["groups"]:
        assert [s.trajectory.trajectory_id.endswith(VICTIM) for s in group] == [
            not is_usable(s) for s in group
        ]
        advantages = advantages_of(group)
        raw = np.array([s.reward.raw for s in group if is_usable(s)])
        expected = iter((raw - raw.mean()) / raw.std())
        for scored, advantage in zip(group, advantages, strict=True):
            assert advantage == pytest.approx(next(expected) if is_usable(scored) else 0.0, abs=1e-6)
    tokens = {t.id: t.tokens for r in records_of(run.ledger, Trained) for t in r.trajectories}
    assert {t.endswith(VICTIM) for t, count in tokens.items() if count == 0} == {True}
    assert not any(r.reason == "failed" for r in records_of(run.ledger, Release))


@pytest.mark.parametrize("cause", CAUSES)
def test_a_surplus_member_takes_the_place_of_the_failed_one(cause: str, model: Path, tmp_path: Path) -> None:
    """F25: refill: with one member more than the group needs, eight usable ones are trained on."""
    run, seen = run_with(cause, model, tmp_path, "redundancy.members=1")
    for group in seen["groups"]:
        assert len(group) == 8
        assert all(is_usable(s) for s in group)
    counted = sum(row["rollout/surplus_members"] for row in seen["rows"])
    assert counted >= len(seen["groups"])
    assert all(t.tokens for r in records_of(run.ledger, Trained) for t in r.trajectories)


def test_one_survivor_changes_nothing(model: Path, tmp_path: Path) -> None:
    """F25: there is nobody to compare it with; the version advances and the weights stay."""
    verifier = "test_fault_members.fails_for_all_but_member_0"
    config = eight(model, tmp_path, f"reward.verifier={verifier}", "training.dynamic_sampling=false")
    run = ToyRun(config, tmp_path)
    trainer = run.loop._backend._trainer  # type: ignore[attr-defined]
    before = {name: np.array(value) for name, value in trainer.weights().items()}
    batches = batches_of(run)
    after: dict[str, Any] = {}
    close = trainer.close

    def look() -> None:
        after.update({name: np.array(value) for name, value in trainer.weights().items()})
        close()

    trainer.close = look
    assert run.run() == "completed"
    assert trainer.version == 4
    assert sum(is_usable(s) for batch in batches for group in batch.groups for s in group) == 4 * 3
    assert {row["train/grad_norm"] for row in rows(run, "train")} == {0.0}
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


def test_one_survivor_is_filtered_like_equal_rewards(model: Path, tmp_path: Path) -> None:
    """F25: with dynamic sampling such a group is not trained on, nor counted as scored zero."""
    verifier = "test_fault_members.fails_for_all_but_member_0"
    config = eight(model, tmp_path, f"reward.verifier={verifier}", "data.max_filtered_batches=2")
    run = ToyRun(config, tmp_path)
    assert run.run() == "filtered_out"
    assert {r.reason for r in records_of(run.ledger, Release)} == {"filtered"}
