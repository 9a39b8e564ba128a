"""Each policy loss, scale and value loss against values worked out by hand."""

import math

import numpy as np
import pytest
import torch

from staleflow.training.losses import (
    ClipRange,
    PolicyTerms,
    clipped_surrogate,
    per_budget_scale,
    per_sequence_scale,
    per_token_scale,
    per_trajectory_scale,
    sequence_surrogate,
    value_loss,
    weighted_log_likelihood,
)

CLIP = ClipRange(low=0.2, high=0.28)
LOSSES = [clipped_surrogate, sequence_surrogate, weighted_log_likelihood]


def terms(ratios, advantages, mask=None, old=0.25):
    """Rows of ratios to an old probability of `old`; theta is the leaf."""
    ratio = torch.tensor(ratios, dtype=torch.float32)
    theta = (ratio * old).log().requires_grad_()
    return PolicyTerms(
        log_ratio=theta - math.log(old),
        theta=theta,
        advantages=torch.tensor(advantages, dtype=torch.float32).expand_as(ratio),
        mask=torch.ones_like(ratio, dtype=torch.bool) if mask is None else torch.tensor(mask),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # The gradient is with respect to log pi: -A * ratio where free, 0 where the clip decides.
        (1.0, 2.0, -2.0, -2.0),
        (1.25, 2.0, -2.5, -2.5),
        (1.5, 2.0, -2.56, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),
        (1.5, -2.0, 3.0, 3.0),
        (1.1, 0.0, 0.0, 0.0),
    ],
)
def test_the_clipped_surrogate_by_hand(ratio, advantage, loss, gradient):
    given = terms([[ratio]], [[advantage]])
    result = clipped_surrogate(given, CLIP)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert given.theta.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert bool(result.clipped) == (gradient == 0.0 and advantage != 0.0)


def test_the_sequence_surrogate_by_hand():
    # Geometric means: sqrt(2 * 0.5) = 1, free; sqrt(4 * 1) = 2, clipped for A > 0; the third tokens do not
    # count. A loss of -s A at each token, and its gradient.
    mask = [[True, True, False], [True, True, False]]
    given = terms([[2.0, 0.5, 9.0], [4.0, 1.0, 9.0]], [[3.0], [1.0]], mask)
    result = sequence_surrogate(given, CLIP)
    torch.testing.assert_close(result.loss[:, :2], torch.tensor([[-3.0, -3.0], [-1.28, -1.28]]))
    assert result.clipped.tolist() == [[False] * 3, [True, True, False]]
    result.loss[given.mask].sum().backward()
    torch.testing.assert_close(given.theta.grad, torch.tensor([[-3.0, -3.0, 0.0], [0.0, 0.0, 0.0]]))


def test_a_weight_beside_a_sequence_surrogate_is_on_its_tokens_gradient_alone():
    """icepop drops the second token, tis takes 1.5 of the third; s = (2 * 0.5 * 1) ^ (1/3) = 1."""
    given = terms([[2.0, 0.5, 1.0]], [[3.0]])
    (sequence_surrogate(given, CLIP).loss * torch.tensor([[1.0, 0.0, 1.5]])).sum().backward()
    torch.testing.assert_close(given.theta.grad, torch.tensor([[-3.0, 0.0, -4.5]]))


def test_cispo_truncates_the_weight_and_keeps_every_gradient():
    # -sg(clip(r)) A log theta, theta = r / 4: weights 1, 1.28 (of 3), 0.8 (of 0.5).
    given = terms([[1.0, 3.0, 0.5]], [[2.0, 2.0, -1.0]])
    result = weighted_log_likelihood(given, CLIP)
    expected = [-2 * math.log(1 / 4), -2 * 1.28 * math.log(3 / 4), 0.8 * math.log(1 / 8)]
    torch.testing.assert_close(result.loss.detach(), torch.tensor([expected]))
    result.loss.sum().backward()
    torch.testing.assert_close(given.theta.grad, torch.tensor([[-2.0, -2.56, 0.8]]))
    assert result.clipped.tolist() == [[False, True, True]]


@pytest.mark.parametrize("loss", LOSSES)
def test_at_ratio_1_each_loss_has_the_plain_policy_gradient(loss):
    # Summed over a row: two tokens, each -A in its own direction.
    given = terms([[1.0, 1.0]], [[0.5]])
    loss(given, CLIP).loss.sum().backward()
    torch.testing.assert_close(given.theta.grad, torch.tensor([[-0.5, -0.5]]))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_ratio_beyond_float32_stays_finite(loss):
    theta = torch.tensor([[500.0, -500.0]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    given = PolicyTerms(log_ratio=theta * 1.0, theta=theta, advantages=-torch.ones(1, 2), mask=mask)
    result = loss(given, CLIP)
    result.loss.sum().backward()
    assert torch.isfinite(result.loss).all()
    assert torch.isfinite(theta.grad).all()


@pytest.mark.parametrize(
    ("value", "loss", "gradient"),
    [
        # Old value 0.5, return 1, clip 0.2: (V - 1)^2 / 2, or (clip(V, 0.3, 0.7) - 1)^2 / 2 if larger.
        (0.6, 0.08, -0.4),
        (0.9, 0.045, 0.0),  # held to 0.7: 0.3^2 / 2, and 0.1^2 / 2 is less
        (0.2, 0.32, -0.8),  # held to 0.3: 0.245, and 0.8^2 / 2 is more
        (1.5, 0.125, 0.5),
    ],
)
def test_the_value_loss_by_hand(value, loss, gradient):
    values = torch.tensor([[value]], requires_grad=True)
    result = value_loss(values, torch.tensor([[0.5]]), torch.tensor([[1.0]]), 0.2)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert values.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert bool(result.clipped) == (gradient == 0.0)


def test_a_value_clip_of_0_is_none():
    result = value_loss(torch.tensor([[0.9]]), torch.tensor([[0.5]]), torch.tensor([[1.0]]), 0.0)
    assert result.loss.item() == pytest.approx(0.005)
    assert not result.clipped


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        # Trajectories of 3, 0 and 5 tokens, a budget of 16: the second has nothing to weigh.
        (per_token_scale, [1 / 8, 1 / 8]),
        (per_sequence_scale, [1 / 6, 1 / 10]),
        (per_trajectory_scale, [1 / 2, 1 / 2]),
        (per_budget_scale, [1 / 32, 1 / 32]),
    ],
)
def test_scales_by_hand(scale, expected):
    found = scale(np.array([3, 0, 5]), 16)
    np.testing.assert_allclose(found[[0, 2]], expected, rtol=1e-12)
    assert np.isfinite(scale(np.array([0, 0]), 16)).all()  # no token, nothing divided by zero
    assert len(scale(np.array([], dtype=np.int64), 16)) == 0
