"""The estimators of KL against values worked out by hand, and against the KL itself."""

import math

import pytest
import torch

from staleflow.training.kl import ESTIMATORS, KlPenalty


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # theta 0.5, reference 0.25: r = 1/2.
        ("k1", math.log(2)),
        ("k2", math.log(2) ** 2 / 2),
        ("k3", 0.5 - 1 + math.log(2)),
    ],
)
def test_estimators_by_hand(name, value):
    theta, reference = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    assert ESTIMATORS[name](theta, reference).item() == pytest.approx(value, rel=1e-6)
    assert KlPenalty(coefficient=0.1, estimator=name)(theta, reference).item() == pytest.approx(0.1 * value)


def test_k1_and_k3_are_unbiased_and_k2_is_near():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    exact = float((p * (p / q).log()).sum())
    expected = {name: float((p * k(p.log(), q.log())).sum()) for name, k in ESTIMATORS.items()}
    assert expected["k1"] == pytest.approx(exact, rel=1e-5)
    assert expected["k3"] == pytest.approx(exact, rel=1e-5)
    assert expected["k2"] == pytest.approx(exact, rel=0.1)


def test_as_a_loss_k2_has_the_gradient_of_the_kl_and_k1_none():
    """Why k1 is refused as a term of the loss."""
    q = torch.tensor([0.4, 0.4, 0.2]).log()

    def gradient(of):
        logits = torch.tensor([0.5, 0.3, 0.2]).log().requires_grad_()
        log_p = logits.log_softmax(-1)
        of(log_p).backward()
        return logits.grad

    exact = gradient(lambda log_p: (log_p.exp() * (log_p - q)).sum())
    mean = {
        name: gradient(lambda log_p, k=k: (log_p.exp().detach() * k(log_p, q)).sum())
        for name, k in ESTIMATORS.items()
    }
    torch.testing.assert_close(mean["k2"], exact)
    torch.testing.assert_close(mean["k1"], torch.zeros(3), atol=1e-7, rtol=0)
    assert torch.dot(mean["k3"], exact) > 0


def test_a_reference_that_excludes_a_token_gives_a_finite_k3():
    assert torch.isfinite(ESTIMATORS["k3"](torch.tensor([-500.0]), torch.tensor([0.0]))).all()
    assert torch.isfinite(ESTIMATORS["k3"](torch.tensor([0.0]), torch.tensor([-500.0]))).all()


def test_where_the_penalty_goes():
    assert KlPenalty(coefficient=0.1, place="loss").in_loss
    assert KlPenalty(coefficient=0.1, place="reward").in_reward
    off = KlPenalty(coefficient=0.0, place="reward")
    assert not off.in_loss
    assert not off.in_reward
