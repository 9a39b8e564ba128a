"""The critic: what its values are about, that it learns, and that it comes back as it was."""

import math

import numpy as np
import pytest
import torch

from staleflow.data.trajectory import TrainBatch
from staleflow.errors import RunFailed
from staleflow.training.algorithms import load_algorithm
from staleflow.training.batching import micro_batches
from staleflow.training.kl import KlPenalty
from staleflow.training.objective import RowMeasurements

PPO = load_algorithm("ppo")


def rows_with_returns(objective, batch, values=0.0):
    """Micro-batches of a batch whose critic expected `values` everywhere."""
    measured = {
        row.trajectory_id: RowMeasurements(values=np.full(len(row.tokens), values, dtype=np.float32))
        for row in objective.lay_out(batch)[0]
    }
    (update,) = objective.updates(batch, objective.lay_out(batch), measured)
    return micro_batches(update.rows, update.scales, 64)


def test_before_its_first_update_a_critic_expects_nothing(model, critic_of, objective_of, batch_of):
    for micro in rows_with_returns(objective_of(algorithm=PPO), batch_of()):
        assert critic_of(model).values(micro).abs().max() == 0.0


def test_a_value_is_about_the_state_before_its_token(new_model, critic_of, objective_of, batch_of):
    """Changing token t changes values after t, and those up to t not at all."""
    critic = critic_of(new_model())
    micros = rows_with_returns(objective_of(algorithm=PPO), batch_of())
    critic.update(micros)
    micro = max(micros, key=lambda m: m.input_ids.shape[1])
    with torch.no_grad():
        before = critic.values(micro)
        micro.input_ids[0, 3] = (micro.input_ids[0, 3] + 1) % 11
        after = critic.values(micro)
    assert torch.equal(before[0, :4], after[0, :4])
    assert not torch.equal(before[0, 4], after[0, 4])
    assert before[0, 0] == 0.0


def test_a_loss_by_hand_at_the_start(model, critic_of, objective_of, member):
    """Values 0, returns 1 and 0 (three tokens and one): (3 * 1/2 + 0) / 4."""
    groups = ((member("g", 0, [4, 5, 6], 1.0),), (member("h", 0, [7], 0.0),))
    micros = rows_with_returns(objective_of(algorithm=PPO), TrainBatch(step=0, groups=groups))
    assert critic_of(model).update(micros).loss == pytest.approx(0.375)


def test_the_critic_learns_which_prompt_is_worth_more(new_model, critic_of, member, trainer_of):
    """A toy: one prompt is always answered right, the other never, whatever the tokens."""
    rng = np.random.default_rng(0)

    def batch(step):
        groups = tuple(
            tuple(
                member(f"e{step}-p{p}-a0", m, rng.integers(4, 11, 5).tolist(), float(p), prompt=[1 + p])
                for m in range(8)
            )
            for p in range(2)
        )
        return TrainBatch(step=step, groups=groups)

    trainer = trainer_of(
        new_model(), algorithm=PPO, critic=critic_of(new_model(seed=1)), critic_warmup_steps=100
    )
    seen = [trainer.train(batch(step)).metrics for step in range(30)]
    assert seen[0]["train/critic/explained_variance"] == pytest.approx(0.0)
    assert seen[0]["train/critic/loss"] == pytest.approx(0.25)  # half of the returns are 1, half 0; values 0
    assert seen[-1]["train/critic/loss"] < 0.05 * seen[0]["train/critic/loss"]
    assert seen[-1]["train/critic/explained_variance"] > 0.9


def test_while_the_critic_warms_up_the_policy_keeps_its_weights_under_new_versions(
    new_model, critic_of, batch_of, trainer_of
):
    model = new_model()
    trainer = trainer_of(model, algorithm=PPO, critic=critic_of(new_model()), critic_warmup_steps=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for step in range(3):
        result = trainer.train(batch_of(step=step))
        assert result.version == step + 1
        same = all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert same == (step < 2)
        assert result.metrics["train/skipped_updates"] == float(step < 2)


def test_a_gradient_that_is_not_finite_leaves_the_critic_as_it_is(
    new_model, critic_of, objective_of, batch_of
):
    critic = critic_of(new_model())
    micros = rows_with_returns(objective_of(algorithm=PPO), batch_of())
    micros[0].returns[micros[0].loss_mask] = math.nan
    assert not math.isfinite(critic.update(micros).grad_norm)
    assert critic.values(micros[1]).abs().max() == 0.0


@pytest.mark.parametrize("minibatches", [1, 2])
def test_with_critic_and_reference_training_on_from_a_checkpoint_gives_the_same_bits(
    new_model, critic_of, batch_of, trainer_of, tmp_path, minibatches
):
    def trainer(seed):
        return trainer_of(
            new_model(seed=seed),
            algorithm=PPO,
            critic=critic_of(new_model(seed=seed + 10)),
            reference=new_model(seed=5),
            kl=KlPenalty(coefficient=0.1, estimator="k1", place="reward"),
            minibatches=minibatches,
            warmup_steps=3,
        )

    straight = trainer(0)
    for step in range(2):
        straight.train(batch_of(step=step, seed=step))
    straight.save(tmp_path)
    expected = [straight.train(batch_of(step=step, seed=step)) for step in (2, 3)]
    resumed = trainer(1)
    resumed.load(tmp_path)
    assert [resumed.train(batch_of(step=step, seed=step)) for step in (2, 3)] == expected
    ours, theirs = straight.weights(), resumed.weights()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


def test_a_checkpoint_without_a_critic_is_refused(new_model, critic_of, trainer_of, tmp_path):
    trainer_of(new_model()).save(tmp_path)
    with pytest.raises(RunFailed, match="has no critic"):
        trainer_of(new_model(), algorithm=PPO, critic=critic_of(new_model())).load(tmp_path)


def test_the_critic_reaches_the_policy_only_through_advantages(new_model, critic_of, batch_of, trainer_of):
    """One model for both: the policy's gradients are those of a policy whose critic has another body."""
    ends = []
    for body in (0, 3):
        model = new_model()
        trainer_of(model, algorithm=PPO, critic=critic_of(new_model(seed=body))).train(batch_of())
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)  # both critics expect 0 at first


def test_what_the_objective_needs_must_be_there_and_nothing_else(new_model, critic_of, trainer_of):
    with pytest.raises(ValueError, match="the objective needs"):
        trainer_of(new_model(), algorithm=PPO)
    with pytest.raises(ValueError, match="the objective needs"):
        trainer_of(new_model(), critic=critic_of(new_model()))
    with pytest.raises(ValueError, match="the objective needs"):
        trainer_of(new_model(), kl=KlPenalty(coefficient=0.1))
