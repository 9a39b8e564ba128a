"""The DeepSpeed trainer against the torch trainer: every stage, one rank and two, checkpoints between them.

Processes are started as seldom as possible: all that one rank does, then all that two do, then one again.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from staleflow.data.trajectory import TrainBatch
from staleflow.errors import ProtocolError, RunFailed
from staleflow.training.deepspeed.peers import ProcessPeer
from staleflow.training.deepspeed.settings import RankSettings
from staleflow.training.deepspeed.trainer import DeepSpeedTrainer
from staleflow.training.deepspeed.world import World
from staleflow.training.models import load_model

pytest.importorskip("deepspeed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.timeout(240),
]
STAGES = (0, 1, 2, 3)
RANKS = (1, 2)


@pytest.fixture(scope="module")
def worlds():
    """A world of so many ranks; asking for another number ends the one before."""
    current: list[World] = []

    def world(ranks):
        if not current or current[0].ranks != ranks:
            while current:
                current.pop().close()
            forget_numbers()
            current.append(World(ranks=ranks, launch=ProcessPeer, start_timeout_s=150.0, timeout_s=60.0))
        return current[0]

    yield world
    while current:
        current.pop().close()


def forget_numbers():
    """Ranks of ZeRO-3 compare the numbers of parameters and modules, which DeepSpeed counts on and on in a
    process. A run has one world; here this process is rank 0 of several, and its peers are new each time.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Model folders by whether their embeddings are tied."""
    return {tied: tmp_path_factory.mktemp(f"model-{tied}") for tied in (True, False)}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where checkpoints outlive a test."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def deepspeed_of(worlds, folders, new_model, objective_of, trainer_options):
    """A trainer on a world of so many ranks, with the torch trainer's options."""

    def make(ranks, stage=2, *, tied=True, seed=0, **changes):
        folder = folders[tied] / str(seed)
        if not folder.exists():
            new_model(seed=seed, tied=tied).save_pretrained(folder)
        about_loss = {
            name: changes.pop(name) for name in list(changes) if name in ("minibatches", "correction")
        }
        options = trainer_options | {
            "make_model": functools.partial(load_model, str(folder)),
            "objective": objective_of(**about_loss),
            "zero_stage": stage,
            "offload_optimizer": False,
            "dtype": "float32",
            "packing": False,
            "gradient_checkpointing": False,
        }
        return DeepSpeedTrainer(worlds(ranks), RankSettings(**(options | changes)), start_timeout_s=150.0)

    return make


def arrays(trainer):
    return {name: np.array(array) for name, array in trainer.weights().items()}


def assert_same_weights(ours, theirs, atol=2e-6):
    assert list(ours) == list(theirs)
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], atol=atol, rtol=1e-5, err_msg=name)


def assert_same_results(ours, theirs):
    assert ours.trained == theirs.trained
    assert (ours.version_start, ours.version) == (theirs.version_start, theirs.version)
    assert ours.metrics == pytest.approx(theirs.metrics, rel=2e-4, abs=1e-6)


def train_both(ours, theirs, batch_of, steps=(0, 1, 2)):
    for step in steps:
        batch = batch_of(step=step, seed=step)
        assert_same_results(ours.train(batch), theirs.train(batch))
    assert_same_weights(arrays(ours), arrays(theirs))


def equality_cases():
    for ranks in RANKS:
        for stage in STAGES:
            yield ranks, stage, {"minibatches": 1 + stage % 2, "tied": stage != 2}
        yield ranks, 1, {"offload_optimizer": True}
        yield ranks, 3, {"offload_optimizer": True, "minibatches": 2}
        yield ranks, 2, {"packing": True}
        yield ranks, 3, {"gradient_checkpointing": True, "packing": True}


@pytest.mark.parametrize(("ranks", "stage", "changes"), [c for c in equality_cases() if c[0] == 1])
def test_one_rank_trains_like_the_torch_trainer(
    deepspeed_of, new_model, trainer_of, batch_of, ranks, stage, changes
):
    check_equality(deepspeed_of, new_model, trainer_of, batch_of, ranks, stage, changes)


def check_equality(deepspeed_of, new_model, trainer_of, batch_of, ranks, stage, changes):
    options = {"max_grad_norm": 0.5, "warmup_steps": 2, "micro_batch_tokens": 24, "weight_decay": 0.01}
    both = {name: value for name, value in changes.items() if name == "minibatches"}
    theirs = trainer_of(new_model(tied=changes.get("tied", True)), **options, **both)
    train_both(deepspeed_of(ranks, stage, **options, **changes), theirs, batch_of)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_and_a_batch_without_signal_change_nothing(
    deepspeed_of, member, batch_of, stage
):
    """F26."""
    ours = deepspeed_of(1, stage)
    ours.train(batch_of(step=0))
    before = arrays(ours)
    broken = member("g", 0, [4, 5], 1.0, log_probs=[math.nan, -1.0])
    result = ours.train(TrainBatch(step=1, groups=((broken, member("g", 1, [6], 0.0)),)))
    assert result.metrics["train/skipped_updates"] == 1.0
    assert result.metrics["train/nonfinite_updates"] == 1.0
    assert not math.isfinite(result.metrics["train/grad_norm"])
    equal = tuple(member("g", m, [4, 5], 1.0) for m in range(3))
    result = ours.train(TrainBatch(step=2, groups=(equal,)))
    assert result.metrics["train/skipped_updates"] == 1.0
    assert result.metrics["train/nonfinite_updates"] == 0.0
    assert ours.train(TrainBatch(step=3, groups=())).version == 4
    after = arrays(ours)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    # Nothing of the broken gradient is left either.
    good = ours.train(batch_of(step=4))
    assert good.metrics["train/skipped_updates"] == 0.0
    assert math.isfinite(good.metrics["train/grad_norm"])


def test_bfloat16_weights_follow_float32_ones_that_the_optimizer_keeps(
    deepspeed_of, new_model, trainer_of, batch_of
):
    theirs = trainer_of(new_model(), learning_rate=1e-3)
    for stage in (1, 2, 3):
        ours = deepspeed_of(1, stage, dtype="bfloat16", learning_rate=1e-3)
        start = arrays(ours)
        for step in (0, 1):
            result = ours.train(batch_of(step=step, seed=step))
            if stage == 1:
                theirs.train(batch_of(step=step, seed=step))
        assert result.metrics["train/skipped_updates"] == 0.0
        for name, wanted in arrays(theirs).items():
            np.testing.assert_allclose(arrays(ours)[name], wanted, atol=0.02, rtol=0.02)
        assert any(not np.array_equal(start[name], array) for name, array in arrays(ours).items())


def test_before_update_is_called_after_the_passes_and_before_any_weight_changes(deepspeed_of, batch_of):
    for stage in (1, 3):
        ours = deepspeed_of(1, stage)
        before, seen = arrays(ours), []
        ours.train(batch_of(step=0), lambda ours=ours, seen=seen: seen.append(arrays(ours)))
        assert len(seen) == 1
        assert all(np.array_equal(seen[0][name], before[name]) for name in before)
        assert any(not np.array_equal(array, before[name]) for name, array in arrays(ours).items())


def test_a_batch_of_another_step_is_refused(deepspeed_of, batch_of):
    with pytest.raises(ProtocolError, match="step 1, but the weights are version 0"):
        deepspeed_of(1, 0).train(batch_of(step=1))


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (3, "float32"), (1, "bfloat16")])
def test_one_rank_writes_checkpoints_for_two(deepspeed_of, batch_of, kept, stage, dtype):
    ours = deepspeed_of(1, stage, dtype=dtype)
    for step in (0, 1):
        ours.train(batch_of(step=step, seed=step))
    save_and_go_on(ours, kept / f"1-{stage}-{dtype}", batch_of)


def save_and_go_on(trainer, folder, batch_of):
    """A checkpoint, and beside it the weights that two more steps lead to."""
    folder.mkdir()
    trainer.save(folder)
    for step in (2, 3):
        trainer.train(batch_of(step=step, seed=step))
    np.savez(folder.with_suffix(".npz"), **arrays(trainer))


def load_and_compare(trainer, folder, batch_of, atol=2e-6):
    trainer.load(folder)
    assert trainer.version == 2
    for step in (2, 3):
        trainer.train(batch_of(step=step, seed=step))
    with np.load(folder.with_suffix(".npz")) as wanted:
        assert_same_weights(arrays(trainer), dict(wanted), atol=atol)


def test_a_checkpoint_of_another_model_is_refused(deepspeed_of, kept, new_model, tmp_path):
    with pytest.raises(RunFailed, match="of another model"):
        deepspeed_of(1, 2, tied=False).load(kept / "1-0-float32")
    with pytest.raises(RunFailed, match="was not written by the deepspeed trainer"):
        deepspeed_of(1, 2).load(tmp_path)


def test_a_checkpoint_is_a_hugging_face_folder(kept, deepspeed_of, batch_of):
    loaded = load_model(str(kept / "1-3-float32"))
    ours = deepspeed_of(1, 2)
    ours.load(kept / "1-3-float32")
    for name, array in arrays(ours).items():
        assert np.array_equal(array, loaded.state_dict()[name].numpy()), name


# ---------------------------------------------------------------------- two ranks


@pytest.mark.parametrize(("ranks", "stage", "changes"), [c for c in equality_cases() if c[0] == 2])
def test_two_ranks_train_like_the_torch_trainer(
    deepspeed_of, new_model, trainer_of, batch_of, ranks, stage, changes
):
    check_equality(deepspeed_of, new_model, trainer_of, batch_of, ranks, stage, changes)


def test_a_rank_without_rows_goes_along(deepspeed_of, new_model, trainer_of, member):
    """Two rows of one update each: with a minibatch per group one rank has nothing to do."""
    groups = (
        (member("g", 0, [4, 5], 1.0), member("g", 1, [], 0.0)),
        (member("h", 0, [4], 1.0), member("h", 1, [5], 0.0)),
    )
    ours, theirs = deepspeed_of(2, 3, minibatches=2), trainer_of(new_model(), minibatches=2)
    batch = TrainBatch(step=0, groups=groups)
    assert_same_results(ours.train(batch), theirs.train(batch))
    assert_same_weights(arrays(ours), arrays(theirs))


def test_weights_of_zero_3_are_sent_while_the_next_step_runs(deepspeed_of, batch_of):
    ours = deepspeed_of(2, 3)
    ours.train(batch_of(step=0))
    before = arrays(ours)
    mapping, seen = ours.weights(), {}
    ours.train(batch_of(step=1), lambda: seen.update({n: np.array(a) for n, a in mapping.items()}))
    assert all(np.array_equal(seen[name], before[name]) for name in before)
    assert np.array_equal(mapping["lm_head.weight"], arrays(ours)["lm_head.weight"])


@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_go_on_from_the_checkpoint_of_one(deepspeed_of, batch_of, kept, stage):
    load_and_compare(deepspeed_of(2, stage, seed=1), kept / "1-0-float32", batch_of)
    load_and_compare(deepspeed_of(2, stage, seed=1), kept / "1-3-float32", batch_of)
    if stage == 3:
        ours = deepspeed_of(2, stage, seed=1, dtype="bfloat16")
        load_and_compare(ours, kept / "1-1-bfloat16", batch_of, atol=0.02)


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_write_checkpoints_for_one(deepspeed_of, batch_of, kept, stage):
    ours = deepspeed_of(2, stage)
    for step in (0, 1):
        ours.train(batch_of(step=step, seed=step))
    save_and_go_on(ours, kept / f"2-{stage}", batch_of)


def test_a_rank_that_is_killed_fails_the_step_and_leaves_no_process(worlds, deepspeed_of, batch_of):
    ours = deepspeed_of(2, 2)
    ours.train(batch_of(step=0))
    (peer,) = worlds(2)._peers

    def kill():
        peer._process.kill()

    with pytest.raises(RunFailed, match="rank 1 died at `train`"):
        ours.train(batch_of(step=1), kill)
    assert not peer._process.is_alive()
    with pytest.raises(RunFailed, match="earlier failure"):
        ours.train(batch_of(step=1))


# ---------------------------------------------------------------------- one rank again


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_goes_on_from_the_checkpoint_of_two(deepspeed_of, batch_of, kept, stage):
    load_and_compare(deepspeed_of(1, stage, seed=1), kept / "2-2", batch_of)
    load_and_compare(deepspeed_of(1, stage, seed=1), kept / "2-3", batch_of)
