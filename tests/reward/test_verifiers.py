"""The verifiers: what counts as right."""

from __future__ import annotations

from typing import Any

import pytest

from staleflow.errors import ConfigError
from staleflow.reward.verifiers import ScoreRequest, exact_match, load_verifier


def request(response: str, answer: Any, **metadata: Any) -> ScoreRequest:
    return ScoreRequest(trajectory_id="t", prompt="?", response=response, answer=answer, metadata=metadata)


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("42", "42", 1.0),
        (" 42\n", "42", 1.0),
        ("42", 42, 1.0),
        ("42", " 42 ", 1.0),
        ("420", "42", 0.0),
        ("the answer is 42", "42", 0.0),
        ("Yes", "yes", 0.0),
        ("", "42", 0.0),
    ],
)
def test_exact_match_compares_the_whole_stripped_text(response: str, answer: Any, score: float) -> None:
    assert exact_match(request(response, answer)) == score


@pytest.mark.parametrize(
    ("response", "score"),
    [("1+1=3, no: 1+1= 2 ", 1.0), ("2", 0.0), ("= 2 = 3", 0.0), ("=", 0.0)],
)
def test_exact_match_after_a_marker_takes_what_follows_its_last_occurrence(
    response: str, score: float
) -> None:
    assert exact_match(request(response, "2", answer_after="=")) == score


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("so it is $\\frac{1}{2}$", "0.5", 1.0),
        ("\\boxed{4}", "4", 1.0),
        ("$x^2+2x+1$", "(x+1)^2", 1.0),
        ("\\boxed{5}", "4", 0.0),
        ("no number at all", "4", 0.0),
        ("", "4", 0.0),
        ("$\\frac{1}{$", "\\frac{1}{2}", 0.0),
    ],
)
def test_math_verify_compares_by_value(response: str, answer: str, score: float) -> None:
    assert load_verifier("math_verify")(request(response, answer)) == score


def test_math_verify_blames_the_data_for_an_answer_without_an_expression() -> None:
    with pytest.raises(ValueError, match="no mathematical expression in the answer ''"):
        load_verifier("math_verify")(request("4", ""))


def test_reasoning_gym_scores_as_the_family_does() -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    score = load_verifier("reasoning_gym")
    right, metadata = entry["answer"], entry["metadata"]
    assert score(request(f" {right} ", right, **metadata)) == 1.0
    assert score(request(f"I think 7, no, <answer>{right}</answer>", right, **metadata)) == 1.0
    assert score(request("not a number", right, **metadata)) < 1.0


def test_reasoning_gym_gives_a_little_for_a_wrong_answer_which_a_threshold_removes() -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("countdown", size=1, seed=1)[0]
    score = load_verifier("reasoning_gym")
    wrong = request("1", entry["answer"], **entry["metadata"])
    assert 0 < score(wrong) < 1, "the trap is gone: this test should look at another family"
    assert score(request("1", entry["answer"], **entry["metadata"], threshold=0.5)) == 0.0
    assert score(request(entry["answer"], entry["answer"], **entry["metadata"], threshold=0.5)) == 1.0
    with pytest.raises(ValueError, match="threshold is 0; it must be above 0"):
        score(request("1", entry["answer"], **entry["metadata"], threshold=0))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_mach", "unknown verifier 'exact_mach'.*did you mean exact_match"),
        ("no_such_package.score", "importing no_such_package failed with ModuleNotFoundError"),
        ("staleflow.reward.verifiers.scoer", "module staleflow.reward.verifiers has no 'scoer'"),
        ("staleflow.reward.verifiers.VERIFIERS", "is a dict, not a function"),
    ],
)
def test_a_name_that_cannot_be_loaded_says_what_failed(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_verifier(name)


def test_a_dotted_path_is_the_users_function() -> None:
    assert load_verifier("staleflow.reward.verifiers.exact_match") is exact_match
