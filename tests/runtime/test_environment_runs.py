"""Whole runs in one process whose config names an environment with two turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toy import ToyRun, toy_config

from staleflow.audit import audit_ledger
from staleflow.data.environment import Done, Given
from staleflow.data.responses import Scored
from staleflow.data.trajectory import GIVEN_VERSION, FinishReason, TrainBatch, Trajectory

ALL_GROUPS = "training.dynamic_sampling=false"
SHORT = "rollout.fake.lengths.max=8"


def trained(run: ToyRun) -> list[Scored]:
    """Run to the end; returns what was trained on."""
    seen: list[TrainBatch] = []
    train = run.loop._backend.train

    def watched(batch: TrainBatch, *, hold: bool) -> None:
        seen.append(batch)
        train(batch, hold=hold)

    run.loop._backend.train = watched  # type: ignore[method-assign]
    assert run.run() == "completed"
    assert audit_ledger(run.ledger).violations == ()
    return [scored for batch in seen for group in batch.groups for scored in group]


def test_given_tokens_are_masked_and_the_model_answers_them(model: Path, tmp_path: Path) -> None:
    config = toy_config(
        model,
        tmp_path,
        SHORT,
        "environment.name=scripted_turns",
        "environment.options={turns: [[5, 6, 7]]}",
    )
    members = [scored.trajectory for scored in trained(ToyRun(config, tmp_path))]
    answered = [t for t in members if t.finish_reason is FinishReason.STOP]
    assert len(answered) > len(members) / 2
    for t in answered:
        first, given, *rest = t.segments
        assert first.generated
        assert rest
        assert all(segment.generated for segment in rest)
        assert given.tokens.tolist() == [5, 6, 7]
        assert set(given.versions.tolist()) == {GIVEN_VERSION}
        before = len(first.tokens)
        mask = t.loss_mask.tolist()
        assert mask == [True] * before + [False] * 3 + [True] * (t.response_len - before - 3)


class FirstMemberBreaks:
    """Member 0 of each group gets no usable answer; the others get one more turn."""

    def __init__(self, *, how: str) -> None:
        self._how = how

    def respond(self, trajectory: Trajectory) -> Any:
        if trajectory.member == 0:
            if self._how == "raises":
                raise ConnectionError("the tool is down")
            return "not an answer" if self._how == "text" else Given(tokens=(10**6,))
        turns = sum(not segment.generated for segment in trajectory.segments)
        return Done() if turns else Given(tokens=(5,))


@pytest.mark.parametrize("how", ["raises", "text", "unknown token"])
def test_a_failing_environment_masks_its_trajectory_and_the_run_goes_on(
    how: str, model: Path, tmp_path: Path
) -> None:
    config = toy_config(
        model,
        tmp_path,
        SHORT,
        ALL_GROUPS,
        f"environment.name={__name__}.FirstMemberBreaks",
        f"environment.options={{how: {how}}}",
    )
    members = trained(ToyRun(config, tmp_path))
    failed = [m for m in members if m.trajectory.finish_reason is FinishReason.FAILED]
    assert failed
    assert all(m.trajectory.member == 0 and not m.reward.usable for m in failed)
    stopped = [m for m in members if m.trajectory.finish_reason is FinishReason.STOP]
    assert stopped
    assert all(m.trajectory.member != 0 and m.reward.usable for m in stopped)


def test_the_same_config_gives_the_same_ledger(model: Path, tmp_path: Path) -> None:
    ledgers = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        config = toy_config(
            model,
            folder,
            SHORT,
            "environment.name=scripted_turns",
            "environment.options={turns: [[5], [6, 7]]}",
        )
        run = ToyRun(config, folder)
        assert run.run() == "completed"
        ledgers.append(run.ledger.read_bytes())
    assert ledgers[0] == ledgers[1]
