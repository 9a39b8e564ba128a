"""Ratios, masks and filters in whole runs: the lag is seen (F6), nothing else looks like one (F13), and
rewards without signal neither crash nor train (F26, F27)."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from toy import ToyRun, opening, toy_config
from whole_runs import batches_of, records_of, rows, trajectories_of

from staleflow.audit import audit_ledger
from staleflow.config import load_config
from staleflow.errors import ConfigError
from staleflow.protocol.records import Occupy, Release, Trained
from staleflow.runtime.assembly import build_trainer
from staleflow.runtime.start import first_start
from staleflow.training.checkpoints import newest_whole

TORCH = ("rollout.engine=torch", "rollout.max_new_tokens=12", "run.steps=5", "training.learning_rate=0.02")


@pytest.mark.parametrize("correction", ["tis", "behaviour"])
def test_where_data_lag_the_ratio_to_what_sampled_them_is_not_one(
    correction: str, model: Path, tmp_path: Path
) -> None:
    """F6: rollout and training with the same tiny model. A step trained on its own version sees a ratio of 1;
    one trained on the version before does not, and the correction acts on it."""
    config = toy_config(
        model, tmp_path, *TORCH, f"training.correction={correction}", "training.clip_low=0.01"
    )
    run = ToyRun(config, tmp_path)
    assert run.run() == "completed"
    seen = rows(run, "train")
    fresh = [row for row in seen if row["staleness/max"] == 0]
    stale = [row for row in seen if row["staleness/min"] == 1]
    assert fresh
    assert stale
    for row in fresh:
        assert row["train/logprob_abs_diff"] < 1e-5
        assert row["train/clip_frac"] == 0
        assert row["train/correction_weight_mean"] == pytest.approx(1.0, abs=1e-5)
    for row in stale:
        assert row["train/logprob_abs_diff"] > 1e-3
        if correction == "tis":
            assert abs(row["train/correction_weight_mean"] - 1.0) > 1e-4
        else:
            assert row["train/clip_frac"] > 0


def test_a_lag_without_correction_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """F6."""
    with pytest.raises(ConfigError, match=r"training\.correction.*needs a correction: set tis or another"):
        load_config([], ["staleness.bound=1", "training.correction=none"], {})
    load_config([], ["staleness.bound=0", "training.correction=none"], {})


def test_at_temperature_06_fresh_data_have_a_ratio_of_one(model: Path, tmp_path: Path) -> None:
    """F13: the engine's log-probs are the trainer's, over engine, trajectory server and trainer; η = 0."""
    config = toy_config(model, tmp_path, *TORCH, "staleness.bound=0", "rollout.temperature=0.6")
    run = ToyRun(config, tmp_path)
    assert run.run() == "completed"
    for row in rows(run, "train"):
        assert row["train/logprob_abs_diff"] < 1e-5
        assert row["train/kl"] < 1e-8
        assert row["train/correction_weight_mean"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("policy", ["mask", "zero"])
def test_nan_rewards_are_counted_and_reach_no_number(policy: str, model: Path, tmp_path: Path) -> None:
    """F26: a fifth of all rewards is NaN: errors of the verifier, masked or scored 0 as configured."""
    config = toy_config(
        model, tmp_path, "reward.verifier=faulty_parts.nan_for_a_fifth", f"reward.on_failure={policy}"
    )
    run = ToyRun(config, tmp_path)
    batches = batches_of(run)
    assert run.run() == "completed"
    seen = rows(run, "train")
    for row in seen:
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float)), row
    assert sum(row["reward/error_count"] for row in seen) > 0
    failed = {
        s.trajectory.trajectory_id: s.reward
        for batch in batches
        for group in batch.groups
        for s in group
        if s.reward.status == "error"
    }
    assert failed
    assert {(r.raw, r.usable) for r in failed.values()} == {(0.0, policy == "zero")}
    tokens = {t.id: t.tokens for r in records_of(run.ledger, Trained) for t in r.trajectories}
    assert all((tokens[t] > 0) == (policy == "zero") for t in failed)
    found = newest_whole(run.checkpoints)
    assert found is not None
    trainer = build_trainer(config, first_start(opening(config)))
    trainer.load(found[1])
    assert all(np.isfinite(value).all() for value in trainer.weights().values())


def test_equal_rewards_without_a_filter_train_nothing_and_say_so(model: Path, tmp_path: Path) -> None:
    """F26: every reward is 1. Steps are made, their updates skipped and counted, weights stay to the bit."""
    config = toy_config(
        model, tmp_path, "reward.verifier=toy.always_one", "training.dynamic_sampling=false", "run.steps=3"
    )
    run = ToyRun(config, tmp_path)
    before = {
        k: np.array(v) for k, v in build_trainer(config, first_start(opening(config))).weights().items()
    }
    assert run.run() == "completed"
    for row in rows(run, "train"):
        assert (row["train/loss"], row["train/grad_norm"], row["train/informative_ratio"]) == (0.0, 0.0, 0.0)
        assert row["train/skipped_updates"] == 1
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float)), row
    found = newest_whole(run.checkpoints)
    assert found is not None
    trainer = build_trainer(config, first_start(opening(config)))
    trainer.load(found[1])
    for name, value in trainer.weights().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_a_group_of_one_is_refused(tmp_path: Path) -> None:
    """F26."""
    with pytest.raises(ConfigError, match=r"data\.group_size.*at least 2"):
        load_config([], ["data.group_size=1"], {})


def test_all_wrong_answers_are_filtered_whatever_their_lengths_cost(model: Path, tmp_path: Path) -> None:
    """F27: four wrong answers a group, of different lengths, with an overlong penalty that tells them apart;
    the filter sees the raw reward, so every group goes and nothing is trained."""
    config = toy_config(
        model,
        tmp_path,
        "reward.verifier=faulty_parts.always_wrong",
        "data.group_size=4",
        "data.max_filtered_batches=3",
        "rollout.fake.lengths.kind=uniform",
        "training.overlong_buffer=16",
        "training.overlong_penalty=1.0",
    )
    run = ToyRun(config, tmp_path)
    lengths: set[int] = set()
    discard = run.loop._store.discard

    def discarded(ids, reason):  # type: ignore[no-untyped-def]
        dropped = discard(ids, reason)
        lengths.update(t.response_len for t in dropped if reason == "filtered")
        return dropped

    run.loop._store.discard = discarded  # type: ignore[method-assign]
    batches = batches_of(run)
    assert run.run() == "filtered_out"
    assert trajectories_of(batches) == []
    assert len({length for length in lengths if length > 8}) > 3, "the penalty would have told them apart"
    assert records_of(run.ledger, Occupy) == []
    released = records_of(run.ledger, Release)
    assert len(released) >= 3 * config.data.batch_size
    assert {r.reason for r in released} == {"filtered"}
    (summary,) = rows(run, "summary")
    assert (summary["run/reason"], summary["tokens/trained"]) == ("filtered_out", 0)
    assert int(summary["tokens/filtered"]) > 0
    assert audit_ledger(run.ledger).violations == ()
