"""Every algorithm through the whole objective and the real trainer."""

import itertools
import math
import pickle

import numpy as np
import pytest
import torch

from staleflow.config.algorithms import ALGORITHMS as TRAITS
from staleflow.config.load import load_config
from staleflow.data.trajectory import Reward, ScoredTrajectory, TrainBatch, Trajectory
from staleflow.protocol.records import Start
from staleflow.runtime.assembly import (
    build_engine,
    build_source,
    build_tokenizer,
    build_trainer,
    initial_weights,
)
from staleflow.runtime.start import first_start
from staleflow.training.algorithms import ALGORITHMS, load_algorithm
from staleflow.training.batching import micro_batches
from staleflow.training.correction_rules import CORRECTION_NAMES
from staleflow.training.kl import KlPenalty
from staleflow.training.log_probs import token_log_probs
from staleflow.training.objective import RowMeasurements
from staleflow.training.outcomes import Discount, MemberOutcome

NAMES = list(ALGORITHMS)
OPENING = Start(bound=1, batch_size=4, group_size=4, last_batch="train", spare_limit=0)


def test_the_config_knows_the_algorithms_that_there_are():
    assert list(TRAITS) == NAMES
    assert all(load_algorithm(name).name == name for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_what_compares_gives_nothing_to_a_group_of_one_and_the_others_do(name):
    """What the config refuses, and why."""
    groups = [
        [MemberOutcome(raw=r, shaping=0.0, usable=True, token_rewards=np.zeros(1), values=np.zeros(1))]
        for r in (0.0, 1.0)
    ]
    estimates = load_algorithm(name).advantages(groups, Discount())
    assert any(e.advantages.any() for group in estimates for e in group) == (not TRAITS[name].compares)
    assert TRAITS[name].critic == load_algorithm(name).critic


# ---------------------------------------------------------------------- the loss of a batch, from its formula


def naive_advantages(name, groups):
    """Sequence advantages by their definition; rewards are those of `batch_of`, lengths those of its rows."""
    if name == "reinforce_pp":
        raw = [[m.reward.raw for m in group] for group in groups]
    else:
        raw = []
        for group in groups:
            r = [m.reward.raw for m in group]
            mean = sum(r) / len(r)
            if name in ("grpo", "dapo", "gspo", "cispo"):
                deviation = math.sqrt(sum((x - mean) ** 2 for x in r) / len(r))
                raw.append([(x - mean) / deviation for x in r])
            elif name == "rloo":
                raw.append([x - (sum(r) - x) / (len(r) - 1) for x in r])
            else:
                raw.append([x - mean for x in r])
    if name.startswith("reinforce_pp"):
        tokens = [
            a
            for group, scores in zip(groups, raw, strict=True)
            for member, a in zip(group, scores, strict=True)
            for _ in member.trajectory.tokens
        ]
        mean = sum(tokens) / len(tokens)
        deviation = math.sqrt(sum((a - mean) ** 2 for a in tokens) / len(tokens))
        raw = [[(a - mean) / deviation for a in scores] for scores in raw]
    return raw


def naive_loss(name, model, batch, correction_weight):
    """The formula in the algorithm's own file, at theta = prox, trajectory by trajectory."""
    members = [m for group in batch.groups for m in group]
    count, tokens = len(members), sum(m.trajectory.response_len for m in members)
    total = torch.zeros(())
    scores = naive_advantages(name, batch.groups)
    for member, a in zip(members, [a for group in scores for a in group], strict=True):
        prompt, response = list(member.trajectory.prompt.tokens), member.trajectory.tokens.tolist()
        logits = model(torch.tensor([prompt + response])).logits[0]
        thetas = [logits[len(prompt) + k - 1].log_softmax(-1)[token] for k, token in enumerate(response)]
        ratios = [torch.exp(theta - theta.detach()) for theta in thetas]
        if name == "gspo":
            whole = torch.exp(sum(t - t.detach() for t in thetas) / len(thetas))
            ratios = [whole.detach() * ratio for ratio in ratios]  # its section 4.3
        scale = {"dr_grpo": 1 / (count * 16), "rloo": 1 / count}.get(name, 1 / tokens)
        if name in ("grpo", "gspo", "reinforce_pp", "reinforce_pp_baseline"):
            scale = 1 / (count * len(response))
        for theta, ratio, beta in zip(thetas, ratios, member.trajectory.log_probs.tolist(), strict=True):
            term = theta if name == "cispo" else ratio
            total = total - a * term * scale * correction_weight(float(theta.detach()) - beta)
    return total


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ppo"])
def test_loss_and_gradient_equal_the_naive_oracle(model, batch_of, trainer_of, gradients, name):
    batch = batch_of()
    expected = naive_loss(name, model, batch, lambda lag: min(math.exp(lag), 2.0))
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    result = trainer_of(model, algorithm=load_algorithm(name)).train(batch)
    assert result.metrics["train/loss"] == pytest.approx(float(expected.detach()), abs=1e-5)
    for got, want in zip(gradients[0], wanted, strict=True):
        torch.testing.assert_close(got, want, atol=3e-6, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("correction", ["sequence_mask", "behaviour"])
def test_the_update_does_not_depend_on_how_micro_batches_are_cut(
    new_model, batch_of, trainer_of, gradients, critic_of, name, correction
):
    kl = KlPenalty(coefficient=0.1, estimator="k2", place="loss" if correction == "behaviour" else "reward")
    for budget in (1, 24, 10_000):
        algorithm = load_algorithm(name)
        trainer = trainer_of(
            new_model(),
            algorithm=algorithm,
            correction=correction,
            sequence_band=(0.3, 3.0),
            kl=kl,
            reference=new_model(seed=1),
            critic=critic_of(new_model(seed=2)) if algorithm.critic else None,
            micro_batch_tokens=budget,
            minibatches=2,
            learning_rate=0.0,
        )
        trainer.train(batch_of())
    runs = [gradients[i * len(gradients) // 3 : (i + 1) * len(gradients) // 3] for i in range(3)]
    assert len(runs[0]) == (4 if name == "ppo" else 2)
    for other in runs[1:]:
        for step, reference in zip(other, runs[0], strict=True):
            for got, want in zip(step, reference, strict=True):
                torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_the_sum_of_what_ranks_make_of_their_shares(model, batch_of, objective_of, name):
    """Each rank works out advantages and scales from the whole batch, by a copy of the objective."""
    batch, whole = batch_of(), objective_of(algorithm=load_algorithm(name))
    measured = {
        row.trajectory_id: RowMeasurements(values=np.linspace(0, 1, len(row.tokens), dtype=np.float32))
        for row in whole.lay_out(batch)[0]
    }

    def loss(objective, share):
        (update,) = objective.updates(batch, objective.lay_out(batch), measured)
        rows = update.rows[share]
        return sum(
            float(objective.loss(m, *token_log_probs(model, m.input_ids, m.loss_mask, 1.0)).loss.detach())
            for m in micro_batches(rows, update.scales[share], 32)
        )

    ranks = [pickle.loads(pickle.dumps(whole)) for _ in range(2)]
    parts = [loss(objective, slice(rank, None, 2)) for rank, objective in enumerate(ranks)]
    assert sum(parts) == pytest.approx(loss(whole, slice(None)), abs=1e-5)


@pytest.mark.parametrize("correction", CORRECTION_NAMES)
def test_every_correction_trains_on_lagging_data_without_nan(new_model, batch_of, trainer_of, correction):
    trainer = trainer_of(new_model(), correction=correction, bound=0, minibatches=2)
    metrics = trainer.train(batch_of()).metrics
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["train/skipped_updates"] == 0.0
    masks = correction in ("icepop", "sequence_mask")
    assert (metrics["train/correction_masked_frac"] > 0) == masks


# ---------------------------------------------------------------------- on what a model really generated

GROUPS, MEMBERS = 3, 4


@pytest.fixture(scope="module")
def generated():
    """Groups that the default task's model sampled in the torch engine; a third of them scored right."""
    config = load_config([], ["data.size=16", "data.batch_size=4", "rollout.max_new_tokens=24"])
    tokenizer = build_tokenizer(config)
    source = build_source(config, tokenizer)
    engine = build_engine(config, tokenizer, spend=lambda seconds: None)
    engine.load_weights(initial_weights(config), 0, "recompute")
    for g, m in itertools.product(range(GROUPS), range(MEMBERS)):
        engine.add(
            Trajectory(
                trajectory_id=f"e0-p{g}-a0-m{m}",
                group_id=f"e0-p{g}-a0",
                member=m,
                prompt=source.prompt(g),
                max_new_tokens=24,
            )
        )
    done = {}
    while engine.trajectories():
        done |= {t.trajectory_id: t for t in engine.step()}
    engine.close()

    def scored(g, m):
        reward = Reward(raw=float((g + m) % 3 == 0))
        return ScoredTrajectory(trajectory=done[f"e0-p{g}-a0-m{m}"], reward=reward)

    return tuple(tuple(scored(g, m) for m in range(MEMBERS)) for g in range(GROUPS))


@pytest.mark.parametrize("name", NAMES)
def test_each_algorithm_takes_three_steps_on_real_trajectories(generated, name):
    config = load_config(
        [],
        [
            f"training.algorithm={name}",
            "training.critic.warmup_steps=1",
            "training.warmup_steps=0",
            "training.learning_rate=1e-3",
            "training.micro_batch_tokens=256",
            "rollout.max_new_tokens=24",
            "rollout.kv_capacity_tokens=4096",
        ],
    )
    trainer = build_trainer(config, first_start(OPENING))
    weights = {name: array.copy() for name, array in trainer.weights().items()}
    for step in range(3):
        metrics = trainer.train(TrainBatch(step=step, groups=generated)).metrics
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert ("train/reference_kl" in metrics) == (config.training.kl.coefficient > 0)
        waits = name == "ppo" and step == 0
        assert metrics["train/skipped_updates"] == float(waits)
        moved = any((weights[n] != array).any() for n, array in trainer.weights().items())
        assert moved == (not waits)
        if name == "ppo":
            assert metrics["train/critic/loss"] > 0


@pytest.mark.parametrize("name", [name for name in NAMES if not TRAITS[name].compares])
def test_groups_of_one_train_where_nothing_is_compared(generated, name):
    own = [f"training.algorithm={name}", "data.group_size=1", "training.critic.warmup_steps=0"]
    config = load_config([], own)
    trainer = build_trainer(config, first_start(OPENING))
    singles = tuple((member,) for group in generated for member in group)
    metrics = trainer.train(TrainBatch(step=0, groups=singles)).metrics
    assert metrics["train/skipped_updates"] == 0.0
    assert metrics["train/informative_ratio"] > 0.9
