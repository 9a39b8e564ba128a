"""Tokens on their way from engine to trainer: aligned (F8), within budget (F9), undisturbed by a push (F11),
the ids that were sampled (F14), and a function of the seed and the trajectory alone (F33)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from toy import ToyRun, opening, toy_config
from whole_runs import (
    ALLOWED,
    STOP,
    batches_of,
    hashes,
    make_restless,
    records_of,
    rows,
    trajectories_of,
    watched_engines,
)

from staleflow.audit import audit_ledger
from staleflow.data.environment import ScriptedTurns
from staleflow.data.trajectory import FinishReason, Trajectory, token_hash
from staleflow.protocol.records import Consume
from staleflow.rollout.fake import fake_token
from staleflow.rollout.scripted_lengths import fixed
from staleflow.runtime.assembly import build_engine, build_tokenizer, build_trainer, read_data
from staleflow.runtime.backends.inline import InlinePace
from staleflow.runtime.start import first_start

BUDGET = 16
UP_TO_40_TOKENS = (
    "rollout.fake.lengths.kind=uniform",
    "rollout.fake.lengths.max=40",
    f"rollout.max_new_tokens={BUDGET}",
    "training.dynamic_sampling=false",
)
"""Responses of 1 to 40 tokens where 16 are allowed."""


def test_interrupted_in_every_cycle_what_is_trained_is_aligned_and_within_its_budget(
    model: Path, tmp_path: Path
) -> None:
    """F8, F9: through trajectory server and trainer. Whoever goes on asks for the rest of the budget only,
    and nobody asks for more at its end."""
    config = toy_config(model, tmp_path, *UP_TO_40_TOKENS, "staleness.bound=2")
    make_engine, asked = watched_engines(config)
    run = ToyRun(config, tmp_path, make_engine=make_engine)
    run.loop._backend._pace = InlinePace(decode_steps=1, train_polls=8)  # type: ignore[attr-defined]
    restless, batches = make_restless(run), batches_of(run)
    assert run.run() == "completed"
    assert restless.interrupts > 100
    resumed = [t for _, t in asked if t.response_len > 0]
    assert len(resumed) > 50
    for t in resumed:
        assert 0 < t.remaining_tokens == BUDGET - t.response_len
    trained = trajectories_of(batches)
    reserved = {g.group: g.version for record in records_of(run.ledger, Consume) for g in record.groups}
    truncated = [t for t in trained if t.finish_reason is FinishReason.LENGTH]
    assert 0 < len(truncated) < len(trained)
    assert {t.response_len for t in truncated} == {BUDGET}
    assert max(t.response_len for t in trained) == BUDGET
    assert any(len(set(t.versions.tolist())) > 1 for t in trained)
    for t in trained:
        assert len(t.tokens) == len(t.log_probs) == len(t.versions) == len(t.loss_mask) == t.response_len
        assert t.loss_mask.all()
        # An instance with older weights may go on with it, as long as its group's reservation admits them.
        assert t.min_version is not None
        assert t.min_version >= reserved[t.group_id]
        assert (t.log_probs < 0).all()
    assert audit_ledger(run.ledger).violations == ()


def test_moving_trajectories_about_does_not_change_their_samples(model: Path, tmp_path: Path) -> None:
    """F33: interrupted in every cycle and continued wherever there is room, or left alone: the same ids."""
    found = []
    for name in ("quiet", "restless"):
        config = toy_config(model, tmp_path / name, *UP_TO_40_TOKENS)
        make_engine, asked = watched_engines(config)
        run = ToyRun(config, tmp_path / name, make_engine=make_engine)
        if name == "restless":
            make_restless(run)
        run.run()
        found.append(hashes(run.ledger))
    places = defaultdict(set)
    for instance, t in asked:
        places[t.trajectory_id].add(instance)
    common = found[0].keys() & found[1].keys()
    assert len([t for t in common if len(places[t]) == 2]) > 10
    assert {t: found[0][t] for t in common} == {t: found[1][t] for t in common}


def test_two_replicas_give_different_samples_for_one_prompt(model: Path, tmp_path: Path) -> None:
    """F33: the members of a group, on whichever instance, are all different."""
    config = toy_config(model, tmp_path, "rollout.fake.lengths.kind=fixed", "rollout.fake.lengths.mean=12")
    make_engine, asked = watched_engines(config)
    run = ToyRun(config, tmp_path, make_engine=make_engine)
    batches = batches_of(run)
    run.run()
    instance_of = {t.trajectory_id: instance for instance, t in asked}
    apart = 0
    for group in (group for batch in batches for group in batch.groups):
        members = [scored.trajectory for scored in group]
        apart += len({instance_of[t.trajectory_id] for t in members}) == 2
        assert len({tuple(t.tokens.tolist()) for t in members}) == len(members)
    assert apart > 10


def test_the_seed_reaches_rollout(model: Path, tmp_path: Path) -> None:
    """F33: not only the order of the data: the samples of one trajectory id change with the seed."""
    found = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        config = toy_config(
            model,
            tmp_path / name,
            f"run.seed={seed}",
            "data.shuffle=false",
            "training.dynamic_sampling=false",
            "rollout.fake.lengths.kind=fixed",  # other lengths have a seed of their own
        )
        run = ToyRun(config, tmp_path / name)
        run.run()
        found.append(hashes(run.ledger))
    assert found[0] == found[1]
    assert found[0].keys() == found[2].keys()
    assert sum(found[0][t] == found[2][t] for t in found[0]) < len(found[0]) / 10


def test_the_seed_reaches_the_torch_engine(model: Path, tmp_path: Path) -> None:
    """F33: the same trajectory, weights and prompt; only `run.seed` differs."""
    samples = []
    for seed in (0, 0, 1):
        config = toy_config(model, tmp_path, "rollout.engine=torch", f"run.seed={seed}")
        engine = build_engine(config, build_tokenizer(config), spend=lambda seconds: None)
        engine.load_weights(build_trainer(config, first_start(opening(config))).weights(), 0, "recompute")
        engine.add(trajectory_of_the_first_prompt(model, tmp_path))
        finished: list[list[int]] = []
        while not finished:
            finished = [done.tokens.tolist() for done in engine.step()]
        samples += finished
    assert samples[0] == samples[1] != samples[2]


def trajectory_of_the_first_prompt(model: Path, folder: Path) -> Trajectory:
    """Under seed 0, whose prompts differ from those of other seeds."""
    prompt = read_data(toy_config(model, folder)).train.prompt(0)
    return Trajectory(
        trajectory_id="e0-p0-a0-m0", group_id="e0-p0-a0", member=0, prompt=prompt, max_new_tokens=24
    )


def test_a_push_aborts_nothing_and_costs_no_token(model: Path, tmp_path: Path) -> None:
    """F11: 18 trajectories in flight over several pushes and pulls. No command but routes and pulls leaves,
    each trajectory is added to one engine once, and all have tokens of several versions."""
    config = toy_config(
        model,
        tmp_path,
        "staleness.bound=2",
        "run.steps=7",
        "rollout.max_new_tokens=60",
        "rollout.max_running=32",
        "training.dynamic_sampling=false",
        "coordination.synchronization.strategy=naive",
    )
    make_engine, asked = watched_engines(config, lengths=fixed(60))
    run = ToyRun(config, tmp_path, make_engine=make_engine)
    batches = batches_of(run)
    assert run.run() == "completed"
    seen = rows(run, "train")
    assert sum(row["coord/pull_count"] for row in seen) >= 2 * 6
    assert sum(row["coord/abort_count"] + row["coord/interrupt_count"] for row in seen) == 0
    assert sum(row["tokens/aborted"] + row["tokens/discarded"] for row in seen) == 0
    trained = trajectories_of(batches)
    ids = [t.trajectory_id for _, t in asked]
    assert len(ids) == len(set(ids))
    assert {t.response_len for t in trained} == {60}
    crossed = [t for t in trained if len(set(t.versions.tolist())) > 1]
    assert len(crossed) > len(trained) / 2


@pytest.mark.parametrize("restless", [False, True])
def test_the_ids_trained_on_are_the_ids_sampled(restless: bool, model: Path, tmp_path: Path) -> None:
    """F14: two turns, ids that do not survive decoding and encoding. An oracle says what the engine samples
    at each position; trajectory server, tensors of the trainer and ledger agree with it."""
    given = [5, 6, 7]
    config = toy_config(model, tmp_path, "rollout.fake.lengths.max=8", "training.dynamic_sampling=false")
    run = ToyRun(config, tmp_path, environment=ScriptedTurns([given]))
    if restless:
        make_restless(run)
    batches = batches_of(run)
    assert run.run() == "completed"
    tokenizer = build_tokenizer(config)
    expected: dict[str, str] = {}
    for t in trajectories_of(batches):
        sampled: list[int] = []
        for segment in t.segments:
            if not segment.generated:
                sampled += given
                continue
            begin, end = len(sampled), len(sampled) + len(segment.tokens)
            sampled += [fake_token(config.run.seed, t.trajectory_id, p, ALLOWED) for p in range(begin, end)]
            if end < config.rollout.max_new_tokens:
                sampled[-1] = STOP
        assert t.tokens.tolist() == sampled
        assert tokenizer.encode(tokenizer.decode(sampled)) != sampled
        expected[t.trajectory_id] = token_hash(np.array(sampled, dtype=np.int32))
    assert sum(len(t.segments) == 3 for t in trajectories_of(batches)) > len(expected) / 2
    assert hashes(run.ledger) == expected
    consumed = {
        i: h
        for c in records_of(run.ledger, Consume)
        for g in c.groups
        for i, h in zip(g.ids, g.hashes, strict=True)
    }
    assert consumed == expected
