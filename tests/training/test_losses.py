import math

import numpy as np
import pytest
import torch

from staleflow.training.corrections import CORRECTIONS
from staleflow.training.losses import ClipRange, clip_higher, per_token_scale

CLIP = ClipRange(low=0.2, high=0.28)


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
def test_clip_higher_by_hand(ratio, advantage, loss, gradient):
    log_ratio = torch.tensor([[math.log(ratio)]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    result = clip_higher(log_ratio, torch.tensor([[advantage]]), mask, CLIP)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert log_ratio.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert bool(result.clipped) == (gradient == 0.0 and advantage != 0.0)


def test_a_ratio_beyond_float32_stays_finite():
    log_ratio = torch.tensor([[500.0, -500.0]], requires_grad=True)
    result = clip_higher(log_ratio, torch.tensor([[-1.0]]), torch.ones(1, 2, dtype=torch.bool), CLIP)
    result.loss.sum().backward()
    assert torch.isfinite(result.loss).all()
    assert torch.isfinite(log_ratio.grad).all()


def test_every_token_of_the_optimizer_batch_weighs_the_same():
    assert per_token_scale(np.array([3, 0, 5]), 16).tolist() == [1 / 8] * 3
    assert per_token_scale(np.array([0, 0]), 16).sum() == 2.0  # no token, nothing divided by zero


def log(*values: float) -> torch.Tensor:
    return torch.tensor([values]).log()


def test_tis_clips_against_prox_and_weighs_by_the_truncated_lag():
    theta = log(0.3, 0.3).requires_grad_()
    factors = CORRECTIONS["tis"](theta, log(0.2, 0.4), log(0.1, 0.1), 2.5)
    torch.testing.assert_close(factors.log_ratio.exp(), torch.tensor([[1.5, 0.75]]))
    torch.testing.assert_close(factors.weight, torch.tensor([[2.0, 2.5]]))
    assert not factors.weight.requires_grad


def test_behaviour_clips_against_what_sampled_the_token():
    """F6: the ratio differs from 1 where there is lag."""
    factors = CORRECTIONS["behaviour"](log(0.3), log(0.2), log(0.1), 2.0)
    torch.testing.assert_close(factors.log_ratio.exp(), torch.tensor([[3.0]]))
    assert factors.weight.tolist() == [[1.0]]


def test_none_ignores_behaviour():
    factors = CORRECTIONS["none"](log(0.3), log(0.2), log(0.1), 2.0)
    torch.testing.assert_close(factors.log_ratio.exp(), torch.tensor([[1.5]]))
    assert factors.weight.tolist() == [[1.0]]
