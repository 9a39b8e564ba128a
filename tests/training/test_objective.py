"""What the objective makes of a batch beside advantages and losses: KL, shaping, what it asks for."""

import math

import numpy as np
import pytest
import torch

from staleflow.data.trajectory import TrainBatch
from staleflow.training.algorithms import ALGORITHMS, load_algorithm
from staleflow.training.batching import micro_batches
from staleflow.training.kl import KlPenalty
from staleflow.training.objective import RowMeasurements


def measured_as(objective, batch, *, prox, reference, values=0.0):
    """The same log-probs and values for every token of every row."""

    def spread(row, value):
        return np.full(len(row.tokens), value, dtype=np.float32)

    return {
        row.trajectory_id: RowMeasurements(
            prox=spread(row, prox), reference=spread(row, reference), values=spread(row, values)
        )
        for chunk in objective.lay_out(batch)
        for row in chunk
    }


def updates_of(objective, batch, **measured):
    seen = measured_as(objective, batch, **measured) if measured else {}
    return objective.updates(batch, objective.lay_out(batch), seen)


def pair(member, first=1.0, second=0.0):
    return TrainBatch(
        step=0, groups=((member("g", 0, [4, 5], first, log_probs=[-2.0, -1.0]), member("g", 1, [6], second)),)
    )


def test_a_kl_term_is_added_to_each_tokens_loss_under_weight_and_scale(objective_of, member):
    objective = objective_of(kl=KlPenalty(coefficient=0.1, estimator="k2"))
    (update,) = updates_of(objective, pair(member), prox=-1.5, reference=-1.0)
    (micro,) = micro_batches(update.rows, update.scales, 64)
    theta = torch.full(micro.input_ids.shape, -1.5)
    loss = objective.loss(micro, theta, torch.zeros_like(theta)).loss.item()
    # Advantages 1, 1 and -1; k2 is 0.5^2 / 2 = 0.125; weights exp(-1.5 - behaviour), behaviour -2, -1, -2.
    weights = [math.exp(0.5), math.exp(-0.5), math.exp(0.5)]
    expected = sum(w * (-a + 0.0125) for w, a in zip(weights, [1, 1, -1], strict=True)) / 3
    assert loss == pytest.approx(expected, rel=1e-5)


def test_the_gradient_of_a_kl_term_pulls_theta_to_the_reference(objective_of, member):
    """Equal rewards: nothing but the KL is left, and it teaches (F26)."""
    objective = objective_of(kl=KlPenalty(coefficient=0.1, estimator="k3"))
    (update,) = updates_of(objective, pair(member, 1.0, 1.0), prox=-1.5, reference=-1.0)
    assert update.informative
    (micro,) = micro_batches(update.rows, update.scales, 64)
    theta = torch.full(micro.input_ids.shape, -1.5, requires_grad=True)
    objective.loss(micro, theta, torch.zeros_like(theta)).loss.backward()
    assert (theta.grad[micro.loss_mask] < 0).all()  # a step against it raises theta


def test_a_kl_penalty_in_the_reward_is_of_prox_and_the_gradient_does_not_pass_it(objective_of, member):
    kl = KlPenalty(coefficient=0.1, estimator="k1", place="reward")
    objective = objective_of(algorithm=load_algorithm("ppo"), kl=kl)
    (update,) = updates_of(objective, pair(member), prox=-1.5, reference=-1.0, values=0.5)
    # k1 is -0.5, so each token is paid 0.05. Returns: 1 + what is still to come, 0 + 0.05.
    first, second = update.rows
    np.testing.assert_allclose(first.returns[first.loss_mask], [1.1, 1.05], rtol=1e-6)
    np.testing.assert_allclose(second.returns[second.loss_mask], [0.05], rtol=1e-5)
    (micro,) = micro_batches(update.rows, update.scales, 64)
    theta = torch.full(micro.input_ids.shape, -1.5, requires_grad=True)
    part = objective.loss(micro, theta, torch.zeros_like(theta))
    part.loss.backward()
    weight = part.means["correction_weight_mean"]
    expected = -(micro.advantages[micro.loss_mask] * weight) / 3  # the policy's alone
    torch.testing.assert_close(theta.grad[micro.loss_mask], expected)


def test_what_is_asked_for_is_what_is_read(objective_of):
    def needs(**changes):
        asked = objective_of(**changes).needs
        return asked.prox, asked.reference, asked.values

    assert needs() == (False, False, False)
    assert needs(minibatches=2) == (True, False, False)
    assert needs(kl=KlPenalty(coefficient=0.1)) == (False, True, False)
    assert needs(kl=KlPenalty(coefficient=0.1, place="reward")) == (True, True, False)
    assert needs(algorithm=load_algorithm("ppo")) == (False, False, True)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_the_overlong_penalty_lowers_the_advantage_of_the_member_it_belongs_to(objective_of, member, name):
    batch = TrainBatch(
        step=0, groups=((member("g", 0, [4] * 10, 1.0), member("g", 1, [5], 0.0), member("g", 2, [6], 0.5)),)
    )

    def advantage(penalty):
        objective = objective_of(
            algorithm=load_algorithm(name), max_new_tokens=10, overlong_buffer=4, overlong_penalty=penalty
        )
        (update,) = updates_of(objective, batch, prox=-1.0, reference=-1.0)
        row = update.rows[0]
        return row.advantages[row.loss_mask][0]

    assert advantage(0.4) < advantage(0.0)


@pytest.mark.parametrize("name", list(ALGORITHMS))
@pytest.mark.parametrize("case", ["no group", "all equal", "all nan", "all empty"])
def test_a_batch_without_signal_is_not_informative_and_has_no_nan(objective_of, member, name, case):
    """F26, for every algorithm."""
    groups = {
        "no group": (),
        "all equal": tuple(tuple(member(f"g{g}", m, [4, 5], 1.0) for m in range(3)) for g in range(2)),
        "all nan": (tuple(member("g", m, [4, 5], math.nan) for m in range(3)),),
        "all empty": ((member("g", 0, [], 1.0), member("g", 1, [], 0.0)),),
    }[case]
    objective = objective_of(algorithm=load_algorithm(name))
    for update in updates_of(objective, TrainBatch(step=0, groups=groups), prox=-1.0, reference=-1.0):
        assert not update.informative
        assert np.isfinite(update.scales).all()
        assert all((row.advantages == 0).all() for row in update.rows)
