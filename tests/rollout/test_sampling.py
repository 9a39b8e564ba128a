"""Drawing tokens from logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from staleflow.errors import EngineError
from staleflow.rollout.engine import SamplingParams
from staleflow.rollout.torch.sampling import sample

THIRDS = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))


def draw(logits: torch.Tensor, u: float, **params: float) -> tuple[int, float]:
    rows = logits.shape[0]
    tokens, log_probs = sample(logits, np.full(rows, u), SamplingParams(**params))  # type: ignore[arg-type]
    return tokens[0], log_probs[0]


@pytest.mark.parametrize(
    ("u", "token"), [(0.0, 0), (0.49, 0), (0.51, 1), (0.79, 1), (0.81, 2), (1 - 2.0**-53, 2)]
)
def test_token_is_the_one_whose_share_of_the_unit_interval_holds_the_number(u: float, token: int) -> None:
    drawn, log_prob = draw(THIRDS, u)
    assert drawn == token
    assert log_prob == pytest.approx(float(THIRDS[0, token]), abs=1e-6)


def test_log_prob_is_at_the_sampling_temperature() -> None:
    # At T = 0.5 the probabilities are the squares over 0.25 + 0.09 + 0.04 = 0.38 (F13).
    token, log_prob = draw(THIRDS, 0.7, temperature=0.5)
    assert token == 1
    assert log_prob == pytest.approx(np.log(0.09 / 0.38), abs=1e-6)


def test_temperature_zero_is_greedy_with_log_probs_at_temperature_one() -> None:
    token, log_prob = draw(THIRDS, 0.99, temperature=0)
    assert token == 0
    assert log_prob == pytest.approx(np.log(0.5), abs=1e-6)


def test_a_greedy_row_is_as_at_temperature_zero_and_the_others_are_as_without_it() -> None:
    # At T = 0.5, top-k 2: (0.25, 0.09) / 0.34; the greedy row has neither temperature nor top-k.
    params = SamplingParams(temperature=0.5, top_k=2)
    tokens, log_probs = sample(THIRDS.expand(3, 3), np.full(3, 0.99), params, [False, True, False])
    assert tokens == [1, 0, 1]
    assert log_probs == pytest.approx(np.log([0.09 / 0.34, 0.5, 0.09 / 0.34]), abs=1e-6)


def test_top_k_keeps_the_k_best_and_renormalises() -> None:
    token, log_prob = draw(THIRDS, 0.999, top_k=2)
    assert token == 1
    assert log_prob == pytest.approx(np.log(0.3 / 0.8), abs=1e-6)


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, 1), (0.6, 2), (0.79, 2), (0.81, 3), (0.0, 1)])
def test_top_p_keeps_the_smallest_nucleus(top_p: float, kept: int) -> None:
    token, log_prob = draw(THIRDS, 1 - 2.0**-53, top_p=top_p)
    assert token == kept - 1
    mass = [0.5, 0.8, 1.0][kept - 1]
    assert log_prob == pytest.approx(np.log([0.5, 0.3, 0.2][token] / mass), abs=1e-6)


def test_the_other_rows_do_not_matter() -> None:
    torch.manual_seed(0)
    logits, numbers = torch.randn(8, 50), np.random.default_rng(0).random(8)
    together = sample(logits, numbers, SamplingParams(top_p=0.9, top_k=20))
    for i in range(8):
        alone = sample(logits[i : i + 1], numbers[i : i + 1], SamplingParams(top_p=0.9, top_k=20))
        assert alone == ([together[0][i]], [together[1][i]])


def test_frequencies_follow_the_distribution() -> None:
    numbers = (np.arange(10_000) + 0.5) / 10_000
    tokens, _ = sample(THIRDS.expand(10_000, 3), numbers, SamplingParams())
    assert np.bincount(tokens).tolist() == pytest.approx([5000, 3000, 2000], abs=2)


def test_logits_that_are_not_finite_are_an_engine_error() -> None:
    with pytest.raises(EngineError, match="not finite"):
        draw(torch.tensor([[0.0, float("nan"), 1.0]]), 0.5)
