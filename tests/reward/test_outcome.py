"""How the outcome of a verifier's call becomes a reward."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from staleflow.data.trajectory import Reward
from staleflow.errors import ConfigError
from staleflow.reward.inline import InlineScorer
from staleflow.reward.outcome import OnFailure, OutcomePolicy, VerifierOutcome, judge
from staleflow.reward.verifiers import ScoreRequest


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def raising(error: BaseException) -> Any:
    def call() -> float:
        raise error

    return call


@pytest.mark.parametrize("value", [0.25, 1, True, np.float32(0.5), np.int64(3)])
def test_numbers_are_raw_rewards(value: Any) -> None:
    outcome = judge(lambda: value)
    assert (outcome.status, outcome.raw, outcome.message) == ("ok", float(value), "")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned a NoneType"),
        ("1.0", "returned a str"),
        (1j, "returned a complex"),
        (float("nan"), "returned nan"),
        (float("-inf"), "returned -inf"),
        (10**400, "OverflowError"),
    ],
)
def test_anything_but_a_finite_number_is_an_error(value: Any, message: str) -> None:
    outcome = judge(lambda: value)
    assert (outcome.status, outcome.raw) == ("error", 0.0)
    assert message in outcome.message


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("bad"), "error", "ValueError: bad"),
        (SystemExit(3), "error", "SystemExit: 3"),
        (RecursionError("deep"), "error", "RecursionError: deep"),
        (MemoryError(), "memory", "memory limit reached"),
        (Unprintable(), "error", "Unprintable"),
        (ValueError("x" * 10_000), "error", ("ValueError: " + "x" * 300)[:300]),
    ],
)
def test_an_exception_is_an_error_with_its_message(error: BaseException, status: str, message: str) -> None:
    outcome = judge(raising(error))
    assert (outcome.status, outcome.message) == (status, message)


def test_ctrl_c_is_not_the_verifiers_error() -> None:
    with pytest.raises(KeyboardInterrupt):
        judge(raising(KeyboardInterrupt()))


@pytest.mark.parametrize(("on_failure", "usable"), [("zero", True), ("mask", False)])
def test_a_failure_scores_zero_or_is_masked_and_keeps_its_status(on_failure: OnFailure, usable: bool) -> None:
    policy = OutcomePolicy(on_failure)
    reward = policy.reward("t", VerifierOutcome(status="timeout", raw=0.7, seconds=5.0))
    assert reward == Reward(raw=0.0, status="timeout", usable=usable, seconds=5.0)
    assert policy.counts().timeout_count == 1


def test_what_was_never_scored_is_masked_under_either_policy() -> None:
    assert not OutcomePolicy("zero").reward("t", VerifierOutcome(status="failed")).usable


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_failure is 'ignore'; it must be zero or mask"):
        OutcomePolicy(cast(OnFailure, "ignore"))


def test_the_inline_scorer_answers_in_order_and_counts_errors() -> None:
    def verifier(request: ScoreRequest) -> float:
        return 1.0 / float(request.answer)

    scorer = InlineScorer(verifier, "zero")
    scorer.submit(
        [ScoreRequest(trajectory_id=t, prompt="", response="", answer=a) for t, a in [("b", 2), ("a", 0)]]
    )
    assert scorer.outstanding == 2
    (first, half), (second, failed) = scorer.poll()
    assert (first, half.raw, half.status) == ("b", 0.5, "ok")
    assert (second, failed.raw, failed.status, failed.usable) == ("a", 0.0, "error", True)
    assert (scorer.counts().scored_count, scorer.counts().error_count) == (1, 1)
    assert scorer.poll() == []


def test_a_message_of_many_lines_becomes_one() -> None:
    def verifier() -> float:
        raise ValueError("no\n  such\tanswer")

    assert judge(verifier).message == "ValueError: no such answer"
