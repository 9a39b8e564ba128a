"""The trainer against a naive oracle: one unpadded trajectory at a time, one token at a time."""

import math

import numpy as np
import pytest
import torch

from staleflow.data.trajectory import TrainBatch, token_hash
from staleflow.errors import ConfigError, ProtocolError


def naive_log_probs(model, scored, temperature):
    """Log-probs of the response tokens, one python loop per token."""
    prompt = list(scored.trajectory.prompt.tokens)
    tokens = scored.trajectory.tokens.tolist()
    logits = model(torch.tensor([prompt + tokens])).logits[0]
    return [
        (logits[len(prompt) + k - 1] / temperature).log_softmax(-1)[token] for k, token in enumerate(tokens)
    ]


def naive_loss(model, batch, correction, temperature=1.0, low=0.2, high=0.28, cap=2.0):
    """DAPO's loss with theta = prox, from the definition; the gradient comes from autograd."""
    total, count = torch.zeros(()), 0
    for group in batch.groups:
        rewards = [member.reward.raw for member in group]
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
        for member in group:
            advantage = (member.reward.raw - mean) / deviation
            behaviour = member.trajectory.log_probs.tolist()
            for theta, beta in zip(naive_log_probs(model, member, temperature), behaviour, strict=True):
                prox = theta.detach()
                if correction == "tis":
                    ratio, weight = torch.exp(theta - prox), min(math.exp(float(prox) - beta), cap)
                elif correction == "behaviour":
                    ratio, weight = torch.exp(theta - beta), 1.0
                else:
                    ratio, weight = torch.exp(theta - prox), 1.0
                clipped = min(max(float(ratio.detach()), 1 - low), 1 + high)
                inside = ratio if clipped == float(ratio.detach()) else torch.tensor(clipped)
                total = total - torch.min(ratio * advantage, inside * advantage) * weight
                count += 1
    return total / count


def unchanged(model, before):
    return all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def copy_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("correction", ["tis", "behaviour", "none"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_loss_and_gradient_equal_the_naive_oracle(
    model, batch_of, trainer_of, gradients, correction, temperature
):
    batch = batch_of()
    expected = naive_loss(model, batch, correction, temperature)
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()))
    trainer = trainer_of(model, correction=correction, temperature=temperature, bound=0)
    result = trainer.train(batch)
    assert result.metrics["train/loss"] == pytest.approx(float(expected.detach()), abs=1e-5)
    for got, want in zip(gradients[0], expected_gradients, strict=True):
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-4)


def test_the_correction_changes_the_gradient_where_behaviour_differs_from_the_current_weights(
    new_model, batch_of, trainer_of, gradients
):
    """F6."""
    metrics = {}
    for correction in ("none", "tis", "behaviour"):
        result = trainer_of(new_model(), correction=correction, bound=0).train(batch_of())
        metrics[correction] = result.metrics
    assert metrics["behaviour"]["train/clip_frac"] > 0.0
    assert metrics["none"]["train/clip_frac"] == 0.0
    assert metrics["tis"]["train/correction_weight_mean"] != pytest.approx(1.0, abs=0.01)
    none, tis, behaviour = (torch.cat([g.flatten() for g in step]) for step in gradients)
    for corrected in (tis, behaviour):
        assert torch.linalg.norm(corrected - none) > 0.1 * torch.linalg.norm(none)


def test_fresh_behaviour_log_probs_at_the_sampling_temperature_give_ratio_one(
    model, batch_of, member, trainer_of
):
    """F13: T = 0.6; and a trainer at another temperature would see a lag that is not there."""
    first = batch_of()
    with torch.no_grad():
        groups = tuple(
            tuple(
                member(
                    m.trajectory.group_id,
                    m.trajectory.member,
                    m.trajectory.tokens.tolist(),
                    m.reward.raw,
                    prompt=m.trajectory.prompt.tokens,
                    log_probs=[float(x) for x in naive_log_probs(model, m, 0.6)],
                )
                for m in group
            )
            for group in first.groups
        )
    fresh = TrainBatch(step=0, groups=groups)
    wrong = trainer_of(model, temperature=1.0, learning_rate=0.0).train(fresh).metrics
    right = trainer_of(model, temperature=0.6, learning_rate=0.0).train(fresh).metrics
    assert right["train/logprob_abs_diff"] < 1e-5
    assert right["train/kl"] < 1e-6
    assert right["train/correction_weight_mean"] == pytest.approx(1.0, abs=1e-5)
    assert wrong["train/logprob_abs_diff"] > 0.1


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_update_does_not_depend_on_how_micro_batches_are_cut(
    new_model, batch_of, trainer_of, gradients, minibatches
):
    for budget in (1, 24, 10_000):
        # A learning rate of 0, so that later minibatches start from equal weights too.
        trainer = trainer_of(
            new_model(), micro_batch_tokens=budget, minibatches=minibatches, learning_rate=0.0
        )
        trainer.train(batch_of())
    runs = [gradients[i * minibatches : (i + 1) * minibatches] for i in range(3)]
    for other in runs[1:]:
        for step, reference in zip(other, runs[0], strict=True):
            for got, want in zip(step, reference, strict=True):
                torch.testing.assert_close(got, want, atol=1e-6, rtol=0.0)


def test_prox_is_taken_once_at_the_start_of_the_step(new_model, batch_of, trainer_of):
    """With several updates theta leaves prox, so the ratio moves off 1; with one it never does."""
    one = trainer_of(new_model(), minibatches=1, learning_rate=0.3).train(batch_of()).metrics
    three = trainer_of(new_model(), minibatches=3, learning_rate=0.3).train(batch_of()).metrics
    assert one["train/clip_frac"] == 0.0
    assert three["train/clip_frac"] > 0.0
    # Metrics of prox against behaviour are about the step's start, however many updates follow.
    for name in ("train/logprob_abs_diff", "train/kl", "train/correction_weight_mean"):
        assert three[name] == pytest.approx(one[name], rel=1e-5)


def test_one_batch_is_one_version_whatever_number_of_minibatches(model, batch_of, trainer_of, gradients):
    trainer = trainer_of(model, minibatches=3)
    result = trainer.train(batch_of(step=0))
    assert len(gradients) == 3
    assert (result.version_start, result.version, trainer.version) == (0, 1, 1)


def test_the_records_name_every_member_in_the_order_consumed(model, batch_of, trainer_of):
    batch = batch_of()
    result = trainer_of(model, minibatches=2).train(batch)
    members = [m.trajectory for group in batch.groups for m in group]
    assert [record.trajectory_id for record in result.trained] == [t.trajectory_id for t in members]
    assert [record.token_hash for record in result.trained] == [token_hash(t.tokens) for t in members]
    assert sum(record.tokens for record in result.trained) == result.metrics["train/tokens"]


def test_a_batch_of_another_step_is_refused_and_changes_nothing(model, batch_of, trainer_of):
    trainer = trainer_of(model)
    before = copy_of(model)
    with pytest.raises(ProtocolError, match="step 1, but the weights are version 0"):
        trainer.train(batch_of(step=1))
    assert trainer.version == 0
    assert unchanged(model, before)


def test_masked_members_do_not_touch_the_update(new_model, member, trainer_of, gradients):
    """F25: the group with a failed member trains like the group without it."""
    kept = (member("g", 0, [4, 5], 1.0), member("g", 1, [6], 0.0))
    failed = member("g", 2, [7, 8, 9], 0.0, usable=False)
    nan = member("g", 3, [7], math.nan)
    for group in (kept, (*kept, failed, nan)):
        result = trainer_of(new_model()).train(TrainBatch(step=0, groups=(group,)))
    assert result.metrics["train/masked_trajectories"] == 2.0
    assert result.metrics["train/trajectories"] == 2.0
    for with_failed, without in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(with_failed, without, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize(
    "case", ["no group", "all equal", "all nan", "group of one", "one survivor", "all empty"]
)
def test_a_batch_without_signal_advances_the_version_and_leaves_the_weights(model, member, trainer_of, case):
    """F26."""
    groups = {
        "no group": (),
        "all equal": (tuple(member("g", m, [4, 5], 1.0) for m in range(3)),),
        "all nan": (tuple(member("g", m, [4, 5], math.nan) for m in range(3)),),
        "group of one": ((member("g", 0, [4, 5], 1.0),),),
        "one survivor": ((member("g", 0, [4, 5], 1.0), member("g", 1, [4], 0.0, usable=False)),),
        "all empty": ((member("g", 0, [], 1.0), member("g", 1, [], 0.0)),),
    }[case]
    trainer = trainer_of(model, weight_decay=0.1)
    trainer.train(TrainBatch(step=0, groups=((member("h", 0, [4], 1.0), member("h", 1, [5], 0.0)),)))
    before = copy_of(model)
    result = trainer.train(TrainBatch(step=1, groups=groups))
    assert result.version == trainer.version == 2
    assert all(math.isfinite(value) for value in result.metrics.values()), result.metrics
    assert result.metrics["train/informative_ratio"] == 0.0
    assert result.metrics["train/skipped_updates"] == float(bool(groups))
    assert result.metrics["train/nonfinite_updates"] == 0.0
    assert unchanged(model, before)


def test_an_update_with_a_gradient_that_is_not_finite_is_skipped_and_counted(model, member, trainer_of):
    broken = member("g", 0, [4, 5], 1.0, log_probs=[math.nan, -1.0])
    trainer = trainer_of(model)
    before = copy_of(model)
    result = trainer.train(TrainBatch(step=0, groups=((broken, member("g", 1, [6], 0.0)),)))
    assert result.metrics["train/skipped_updates"] == 1.0
    assert result.metrics["train/nonfinite_updates"] == 1.0
    assert not math.isfinite(result.metrics["train/grad_norm"])
    assert trainer.version == 1
    assert unchanged(model, before)


def test_the_update_raises_the_probability_of_the_better_answer(model, member, trainer_of):
    better, worse = member("g", 0, [4, 5], 1.0), member("g", 1, [6, 7], 0.0)

    def gap():
        with torch.no_grad():
            return float(sum(naive_log_probs(model, better, 1.0)) - sum(naive_log_probs(model, worse, 1.0)))

    before = gap()
    trainer_of(model).train(TrainBatch(step=0, groups=((better, worse),)))
    assert gap() > before


def test_the_learning_rate_warms_up_linearly_over_versions(model, batch_of, trainer_of):
    trainer = trainer_of(model, learning_rate=0.4, warmup_steps=4)
    rates = [trainer.train(batch_of(step=s)).metrics["train/learning_rate"] for s in range(6)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_gradients_are_scaled_down_to_the_given_norm(model, batch_of, trainer_of, gradients):
    result = trainer_of(model, max_grad_norm=1e-3).train(batch_of())
    norm = torch.linalg.norm(torch.cat([g.flatten() for g in gradients[0]]))
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)
    assert result.metrics["train/grad_norm"] > 1e-3  # the norm before clipping


def test_entropy_and_behaviour_kl_by_hand(model, member, trainer_of):
    one = member("g", 0, [4], 1.0, log_probs=[-1.5])
    other = member("g", 1, [4], 0.0, log_probs=[-1.5])
    with torch.no_grad():
        p = model(torch.tensor([[1, 2, 3]])).logits[0, -1].double().softmax(-1)
    x = float(p[4]) / math.exp(-1.5)
    metrics = trainer_of(model).train(TrainBatch(step=0, groups=((one, other),))).metrics
    assert metrics["train/entropy"] == pytest.approx(float(-(p * p.log()).sum()), rel=1e-5)
    assert metrics["train/kl"] == pytest.approx(x - 1 - math.log(x), rel=1e-4)
    assert metrics["train/logprob_abs_diff"] == pytest.approx(abs(math.log(x)), rel=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_views_under_hugging_face_names_with_tied_ones_under_both(new_model, trainer_of, tied):
    model = new_model(tied=tied)
    weights = trainer_of(model).weights()
    assert weights.keys() == model.state_dict().keys()
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= weights.keys()
    assert all(array.dtype == np.float32 for array in weights.values())
    assert np.shares_memory(weights["lm_head.weight"], weights["model.embed_tokens.weight"]) is tied
    with torch.no_grad():
        model.model.embed_tokens.weight[0, 0] = 123.0
    assert weights["model.embed_tokens.weight"][0, 0] == 123.0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_training_on_from_a_checkpoint_gives_the_same_bits(
    new_model, batch_of, trainer_of, tmp_path, tied, minibatches
):
    options = {"minibatches": minibatches, "warmup_steps": 3, "weight_decay": 0.01}
    straight = trainer_of(new_model(tied=tied), **options)
    for step in range(2):
        straight.train(batch_of(step=step, seed=step))
    straight.save(tmp_path)
    random_after_save = torch.rand(3)
    expected = [straight.train(batch_of(step=step, seed=step)) for step in (2, 3)]

    resumed = trainer_of(new_model(seed=1, tied=tied), **options)
    resumed.load(tmp_path)
    assert resumed.version == 2
    assert torch.equal(torch.rand(3), random_after_save)
    assert [resumed.train(batch_of(step=step, seed=step)) for step in (2, 3)] == expected
    ours, theirs = straight.weights(), resumed.weights()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


def test_no_correction_with_a_bound_is_refused(model, trainer_of):
    """F6."""
    with pytest.raises(ConfigError, match=r"staleness\.bound = 2"):
        trainer_of(model, correction="none", bound=2)
