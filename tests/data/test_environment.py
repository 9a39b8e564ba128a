"""Environments: what is given between turns is aligned, masked, and paid for from the one budget."""

from __future__ import annotations

import numpy as np

from staleflow.data.environment import Done, Given, ScriptedTurns, Waiting, after_turn, load_environment
from staleflow.data.trajectory import GIVEN_VERSION, FinishReason, Prompt, Segment, Trajectory

PROMPT = Prompt(prompt_id="0", tokens=(5, 6), text="x", answer="y")


def generated(tokens: list[int], version: int) -> Segment:
    return Segment(
        generated=True,
        tokens=np.array(tokens, dtype=np.int32),
        log_probs=np.full(len(tokens), -0.5, dtype=np.float32),
        versions=np.full(len(tokens), version, dtype=np.int32),
    )


def turn(tokens: list[int], *, version: int = 3, budget: int = 16) -> Trajectory:
    empty = Trajectory(
        trajectory_id="e0-p0-a0-m0", group_id="e0-p0-a0", member=0, prompt=PROMPT, max_new_tokens=budget
    )
    return empty.extended(generated(tokens, version)).finished(FinishReason.STOP)


def test_a_single_turn_needs_no_environment_and_done_changes_nothing() -> None:
    assert load_environment("single_turn", {}) is None
    trajectory = turn([7, 1])
    assert after_turn(trajectory, Done()) is trajectory


def test_two_scripted_turns_stay_aligned_with_given_tokens_masked() -> None:
    environment = ScriptedTurns([[20, 21, 22]])
    first = turn([7, 8, 1], version=3)
    second = after_turn(first, environment.respond(first))
    assert second.finish_reason is None
    assert second.remaining_tokens == 16 - 6

    second = second.extended(generated([9, 1], 4)).finished(FinishReason.STOP)
    assert environment.respond(second) == Done()
    assert second.tokens.tolist() == [7, 8, 1, 20, 21, 22, 9, 1]
    assert second.loss_mask.tolist() == [True] * 3 + [False] * 3 + [True] * 2
    assert second.versions.tolist() == [3] * 3 + [GIVEN_VERSION] * 3 + [4] * 2
    assert second.log_probs.tolist() == [-0.5] * 3 + [0.0] * 3 + [-0.5] * 2
    assert (second.min_version, second.max_version) == (3, 4)
    assert second.length == 2 + 8


def test_a_turn_interrupted_midway_still_counts_as_one() -> None:
    environment = ScriptedTurns([[20]])
    first = turn([7], version=3).extended(generated([8, 1], 4))
    second = after_turn(first, environment.respond(first)).extended(generated([9], 4))
    second = second.extended(generated([1], 5)).finished(FinishReason.STOP)
    assert environment.respond(second) == Done()
    assert second.versions.tolist() == [3, 4, 4, GIVEN_VERSION, 4, 5]


def test_given_tokens_that_fill_the_budget_end_the_trajectory_for_length() -> None:
    trajectory = turn([7, 1], budget=5)
    for given, kept in [((20, 21, 22), 3), ((20, 21, 22, 23), 3)]:
        ended = after_turn(trajectory, Given(tokens=given))
        assert ended.finish_reason is FinishReason.LENGTH
        assert ended.response_len == 2 + kept
    assert after_turn(trajectory, Given(tokens=(20, 21))).finish_reason is None


def test_a_trajectory_that_did_not_stop_by_itself_is_not_continued() -> None:
    for reason in (FinishReason.LENGTH, FinishReason.FAILED):
        trajectory = turn([7, 1]).finished(reason)
        assert after_turn(trajectory, Given(tokens=(20,))) is trajectory
    stopped = turn([7, 1])
    assert after_turn(stopped, Waiting(limit_s=1.0)) is stopped
