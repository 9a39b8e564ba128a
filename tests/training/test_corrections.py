"""Each correction against values worked out by hand."""

import pytest
import torch

from staleflow.training.correction_rules import CORRECTION_NAMES
from staleflow.training.corrections import CORRECTIONS, Limits

LIMITS = Limits(cap=2.5, token_band=(0.5, 3.0), sequence_band=(0.5, 2.0))


def log(*rows):
    return torch.tensor(rows).log()


def correct(name, prox, behaviour, mask=None, theta=None):
    """Factors for rows of probabilities; theta = prox unless given."""
    mask = [[True] * len(row) for row in prox] if mask is None else mask
    theta = log(*prox) if theta is None else theta
    return CORRECTIONS[name](theta, log(*prox), log(*behaviour), torch.tensor(mask), LIMITS)


def test_tis_clips_against_prox_and_weighs_by_the_truncated_lag():
    theta = log([0.3, 0.3]).requires_grad_()
    factors = correct("tis", [[0.2, 0.4]], [[0.1, 0.1]], theta=theta)
    torch.testing.assert_close(factors.log_ratio.exp(), torch.tensor([[1.5, 0.75]]))
    torch.testing.assert_close(factors.weight, torch.tensor([[2.0, 2.5]]))  # 4 is held to the cap


def test_sequence_tis_weighs_a_response_by_the_product_over_its_tokens():
    # 2 * 0.5 * 2 = 2; 4 * 2 = 8, held to 2.5; the masked 100 does not count.
    prox = [[0.2, 0.1, 0.4], [0.4, 0.2, 0.5]]
    behaviour = [[0.1, 0.2, 0.2], [0.1, 0.1, 0.005]]
    mask = [[True, True, True], [True, True, False]]
    weight = correct("sequence_tis", prox, behaviour, mask).weight
    torch.testing.assert_close(weight, torch.tensor([[2.0] * 3, [2.5] * 3]))


def test_icepop_drops_tokens_outside_its_band_and_does_not_truncate_inside():
    # Ratios 2, 0.25, 4, 2.9: band 0.5 to 3.
    weight = correct("icepop", [[0.2, 0.1, 0.4, 0.29]], [[0.1, 0.4, 0.1, 0.1]]).weight
    torch.testing.assert_close(weight, torch.tensor([[2.0, 0.0, 0.0, 2.9]]))


def test_decoupled_is_tis_without_the_cap():
    weight = correct("decoupled", [[0.2, 0.4]], [[0.1, 0.1]]).weight
    torch.testing.assert_close(weight, torch.tensor([[2.0, 4.0]]))


def test_sequence_mask_drops_responses_whose_mean_ratio_leaves_the_band():
    # Geometric means: sqrt(4 * 0.25) = 1, kept; sqrt(4 * 4) = 4, dropped; sqrt(1 * 1/9) = 1/3, dropped.
    prox = [[0.4, 0.1], [0.4, 0.4], [0.1, 0.1]]
    behaviour = [[0.1, 0.4], [0.1, 0.1], [0.1, 0.9]]
    weight = correct("sequence_mask", prox, behaviour).weight
    torch.testing.assert_close(weight, torch.tensor([[2.5, 0.25], [0.0, 0.0], [0.0, 0.0]]))


def test_behaviour_clips_against_what_sampled_the_token():
    """F6: the ratio differs from 1 where there is lag."""
    factors = correct("behaviour", [[0.2]], [[0.1]], theta=log([0.3]))
    torch.testing.assert_close(factors.log_ratio.exp(), torch.tensor([[3.0]]))
    assert factors.weight.tolist() == [[1.0]]


def test_none_ignores_behaviour():
    factors = correct("none", [[0.2]], [[0.1]], theta=log([0.3]))
    torch.testing.assert_close(factors.log_ratio.exp(), torch.tensor([[1.5]]))
    assert factors.weight.tolist() == [[1.0]]


@pytest.mark.parametrize("name", CORRECTION_NAMES)
def test_gradients_flow_through_theta_alone(name):
    leaves = [log([0.3, 0.2]).requires_grad_() for _ in range(3)]
    factors = CORRECTIONS[name](*leaves, torch.ones(1, 2, dtype=torch.bool), LIMITS)
    (factors.log_ratio.exp() * factors.weight).sum().backward()
    theta, prox, behaviour = leaves
    assert theta.grad is not None
    assert prox.grad is None
    assert behaviour.grad is None


@pytest.mark.parametrize("name", [n for n in CORRECTION_NAMES if n != "none"])
def test_every_correction_but_none_sees_the_lag(name):
    """F6: with theta = prox, as at the first update, lag changes a factor."""
    fresh, stale = (correct(name, [[0.3, 0.3]], [[b, b]]) for b in (0.3, 0.2))
    assert fresh.weight.tolist() == [[1.0, 1.0]]
    torch.testing.assert_close(fresh.log_ratio, torch.zeros(1, 2))
    assert (stale.weight * stale.log_ratio.exp() != 1.0).all()


@pytest.mark.parametrize("name", CORRECTION_NAMES)
def test_weights_are_finite_however_far_apart_the_policies_are(name):
    far = torch.tensor([[-500.0, 0.0], [0.0, -500.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    weight = CORRECTIONS[name](far, far, far.flip(0), mask, LIMITS).weight
    assert torch.isfinite(weight).all()
    assert (weight >= 0).all()
