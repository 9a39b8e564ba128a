"""The vLLM engine against plain forward passes of the same model. One start serves the whole file.

Tolerance of log-probs: 1e-4 nats in float32 (seen: 2e-5).
"""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from staleflow.data.trajectory import FinishReason, Prompt, Segment, Trajectory
from staleflow.errors import EngineError
from staleflow.rollout.engine import OnPull, SamplingParams
from staleflow.servers.parameter_server import ParameterServer
from staleflow.training.log_probs import token_log_probs
from staleflow.training.models import load_model, model_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.xdist_group("vllm"),
    pytest.mark.timeout(400),
]

MODEL = "builtin:sums"
STOP, CONTEXT, CAPACITY = 1, 128, 640
TOLERANCE = 1e-4
LONG_PROMPT = [2 + i * 7 % 13 for i in range(70)]
"""More than two KV blocks of 32 tokens, which are what the prefix cache shares."""


@dataclass
class Rig:
    """The engine, the storage that it takes weights from, and models by the version that was loaded."""

    engine: Any
    server: ParameterServer
    publisher: Any
    models: dict[int, Any] = field(default_factory=dict)
    names: int = 0

    def load(self, on_pull: OnPull = "recompute", *, scale: float = 0.15) -> int:
        """Load weights that are far from all before; returns their version."""
        version = len(self.models)
        model: Any = load_model(MODEL)
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
        self.models[version] = model
        self.publisher.push(version, arrays(model))
        with self.server.handle.subscriber().lease() as lease:
            self.engine.load_weights(lease.tensors, version, on_pull)
        assert self.engine.version == version
        return version

    def trajectory(
        self, prompt: int | list[int] = 5, budget: int = 12, name: str | None = None
    ) -> Trajectory:
        """A new one; its prompt of so many tokens, or of those."""
        self.names += 1
        rng = np.random.default_rng(self.names)
        tokens = rng.integers(2, 15, prompt).tolist() if isinstance(prompt, int) else prompt
        name = name or f"e0-p{self.names}-a0-m0"
        what = Prompt(prompt_id="0", tokens=tuple(tokens), text="", answer=None)
        return Trajectory(trajectory_id=name, group_id="g", member=0, prompt=what, max_new_tokens=budget)

    def add(self, *trajectories: Trajectory, greedy: bool = False) -> None:
        for trajectory in trajectories:
            self.engine.add(trajectory, greedy=greedy)

    def drain(self) -> dict[str, Trajectory]:
        """Step until nothing is left, checking the books after each."""
        done: dict[str, Trajectory] = {}
        for _ in range(500):
            held = self.engine.trajectories()
            load = self.engine.load()
            assert len(held) == load.running + load.waiting
            assert load.kv_tokens <= load.kv_capacity
            if not held:
                return done
            done |= {t.trajectory_id: t for t in self.engine.step()}
        raise AssertionError(f"still holding {sorted(held)}")

    def difference(self, trajectory: Trajectory, version: int, temperature: float = 1.0) -> NDArray[Any]:
        """|log-prob - the trainer's| of each response token, under the model of that version."""
        start = trajectory.prompt_len
        ids = torch.tensor([[*trajectory.prompt.tokens, *trajectory.tokens.tolist()]])
        mask = torch.arange(ids.shape[1])[None] >= start
        with torch.no_grad():
            expected, _ = token_log_probs(self.models[version], ids, mask, temperature)
        return np.asarray(np.abs(expected[0, start:].numpy() - trajectory.log_probs))


def arrays(model: Any) -> dict[str, NDArray[Any]]:
    return {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    from staleflow.rollout.vllm import VllmEngine

    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("vllm")
    with ParameterServer(directory=str(folder)) as server:
        engine = VllmEngine(
            model_folder(MODEL),
            sampling=SamplingParams(stop_token_ids=(STOP,), max_model_len=CONTEXT),
            seed=7,
            kv_capacity_tokens=CAPACITY,
            max_running=8,
            weights=server.handle,
            start_timeout_s=360.0,
            log=folder / "engine.log",
        )
        yield Rig(engine, server, server.handle.publisher())
        engine.close()
        engine.close()


@pytest.fixture
def rig(started: Rig) -> Rig:
    """The rig with nothing in the engine and weights of its own."""
    started.engine.abort(list(started.engine.trajectories()))
    started.engine.step()
    started.load()
    return started


@pytest.fixture
def without_stop(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """No token ends a trajectory."""
    monkeypatch.setattr(rig.engine, "_sampling", replace(rig.engine._sampling, stop_token_ids=()))
    return rig


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_trainer_at_the_sampling_temperature(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """F13, with tied embeddings, heads that are widened for the kernels, and weights after an update."""
    monkeypatch.setattr(rig.engine, "_sampling", replace(rig.engine._sampling, temperature=temperature))
    version = rig.engine.version
    rig.add(*(rig.trajectory(1 + 3 * i, 4 + 5 * i) for i in range(9)))
    done = rig.drain()
    assert len(done) == 9
    for trajectory in done.values():
        assert rig.difference(trajectory, version, temperature).max() < TOLERANCE
        assert trajectory.version_runs == ((version, trajectory.response_len),)


def test_a_greedy_trajectory_takes_the_likeliest_token_beside_sampled_ones(
    without_stop: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = without_stop
    monkeypatch.setattr(rig.engine, "_sampling", replace(rig.engine._sampling, temperature=1.7))
    cold, warm = rig.trajectory(6, 10), rig.trajectory(6, 10)
    rig.add(cold, greedy=True)
    rig.add(warm)
    done = rig.drain()
    version = rig.engine.version
    assert rig.difference(done[cold.trajectory_id], version, 1.0).max() < TOLERANCE
    assert rig.difference(done[warm.trajectory_id], version, 1.7).max() < TOLERANCE
    sequence = list(cold.prompt.tokens)
    for token in done[cold.trajectory_id].tokens.tolist():
        if token == STOP:
            break
        with torch.no_grad():
            assert token == int(rig.models[version](torch.tensor([sequence])).logits[0, -1].argmax())
        sequence.append(token)


def test_a_stop_token_is_the_last_one_and_budgets_end_the_others(rig: Rig) -> None:
    long, short = rig.trajectory(120, 50), rig.trajectory(4, 3)
    rig.add(*(rig.trajectory(5, 40) for _ in range(12)), long, short)
    done = rig.drain()
    for trajectory in done.values():
        tokens = trajectory.tokens.tolist()
        assert STOP not in tokens[:-1]
        assert trajectory.finish_reason == (FinishReason.STOP if tokens[-1] == STOP else FinishReason.LENGTH)
    assert {t.finish_reason for t in done.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    assert done[short.trajectory_id].response_len <= 3
    assert done[long.trajectory_id].length <= CONTEXT


@pytest.mark.parametrize("on_pull", ["recompute", "keep_kv"])
def test_tokens_before_an_update_have_the_old_version_and_those_after_it_the_new_one(
    without_stop: Rig, on_pull: OnPull
) -> None:
    rig = without_stop
    old = rig.engine.version
    flying = [rig.trajectory(3 + i, 30) for i in range(4)]
    rig.add(*flying)
    for _ in range(6):
        rig.engine.step()
    seen = {name: t.response_len for name, t in rig.engine.trajectories().items()}
    new = rig.load(on_pull)
    done = rig.drain()
    for name, trajectory in done.items():
        assert [version for version, _ in trajectory.version_runs] == [old, new]
        before = trajectory.versions == old
        assert seen[name] <= before.sum() <= seen[name] + 1  # a step may have been under way
        assert rig.difference(trajectory, old)[before].max() < TOLERANCE
        after = rig.difference(trajectory, new)[~before]
        if on_pull == "recompute":
            assert after.max() < TOLERANCE
        else:
            assert after.max() > 0.01  # the prompt's KV is still that of the old weights


@pytest.mark.parametrize("on_pull", ["recompute", "keep_kv"])
def test_the_prefix_cache_never_serves_the_kv_of_other_weights(without_stop: Rig, on_pull: OnPull) -> None:
    """F12: the same prompt before, during and after an update that something runs through."""
    rig = without_stop
    first, second = rig.trajectory(LONG_PROMPT, 2), rig.trajectory(LONG_PROMPT, 40)
    rig.add(first)
    rig.drain()
    cold = rig.engine.load().prefilled_tokens
    rig.add(second)
    rig.engine.step()
    assert rig.engine.load().prefilled_tokens - cold == len(LONG_PROMPT) - 64  # two blocks were shared
    new = rig.load(on_pull)
    third = rig.trajectory(LONG_PROMPT, 5)
    rig.add(third)
    done = rig.drain()
    assert rig.difference(done[third.trajectory_id], new).max() < TOLERANCE
    assert rig.models[new - 1] is not rig.models[new]
    assert rig.difference(done[third.trajectory_id], new - 1).max() > 0.01


@pytest.mark.parametrize("on_pull", ["recompute", "keep_kv"])
def test_what_waits_during_an_update_starts_under_the_new_weights(without_stop: Rig, on_pull: OnPull) -> None:
    """F12: whoever waits has no KV to keep, and may not find old KV in the prefix cache either."""
    rig = without_stop
    rig.add(*(rig.trajectory(LONG_PROMPT, 40) for _ in range(12)))
    for _ in range(3):
        rig.engine.step()
    waiting = {n for n, t in rig.engine.trajectories().items() if t.response_len == 0}
    assert waiting
    new = rig.load(on_pull)
    done = rig.drain()
    for name in waiting:
        assert done[name].version_runs == ((new, 40),)
        assert rig.difference(done[name], new).max() < TOLERANCE


def test_interrupted_trajectories_keep_their_tokens_and_go_on_within_the_same_budget(
    without_stop: Rig,
) -> None:
    """F8, F9: at any point, twice, from a waiting place as well."""
    rig = without_stop
    version = rig.engine.version
    begun = [rig.trajectory(4, 16) for _ in range(10)]
    names = [t.trajectory_id for t in begun]
    rig.add(*begun)
    told: dict[str, list[int]] = {name: [] for name in names}
    for steps in (3, 8):
        for _ in range(steps):
            rig.engine.step()
        for name, trajectory in rig.engine.trajectories().items():
            told[name] = trajectory.tokens.tolist()
        gone = rig.engine.interrupt([*names, "unknown"])
        assert sorted(t.trajectory_id for t in gone) == sorted(names)
        for trajectory in gone:
            kept = told[trajectory.trajectory_id]
            assert trajectory.tokens.tolist()[: len(kept)] == kept
            assert len(trajectory.log_probs) == len(trajectory.versions) == trajectory.response_len
            assert trajectory.finish_reason is None
        assert rig.engine.load().running == rig.engine.load().waiting == 0
        rig.add(*gone)
    for trajectory in rig.drain().values():
        assert trajectory.response_len == 16
        assert trajectory.finish_reason == FinishReason.LENGTH
        assert rig.difference(trajectory, version).max() < TOLERANCE


def test_one_with_no_budget_left_finishes_without_a_token(rig: Rig) -> None:
    """F9: nothing is asked of vLLM."""
    full = rig.trajectory(4, 3)
    three = np.array([2, 3, 4], dtype=np.int32)
    full = full.extended(
        Segment(generated=True, tokens=three, log_probs=np.zeros(3, np.float32), versions=three * 0)
    )
    rig.add(full)
    assert rig.engine.load().waiting == 1
    (done,) = rig.engine.step()
    assert done.finish_reason == FinishReason.LENGTH
    assert done.tokens.tolist() == [2, 3, 4]
    with pytest.raises(EngineError, match="empty prompt"):
        rig.engine.add(rig.trajectory([], 3))


def test_an_aborted_trajectory_is_gone_and_the_others_go_on(without_stop: Rig) -> None:
    """F11."""
    rig = without_stop
    kept, dropped = rig.trajectory(4, 10), rig.trajectory(4, 10)
    rig.add(kept, dropped)
    rig.engine.step()
    (gone,) = rig.engine.abort([dropped.trajectory_id])
    assert gone.trajectory_id == dropped.trajectory_id
    done = rig.drain()
    assert list(done) == [kept.trajectory_id]
    assert done[kept.trajectory_id].response_len == 10


def test_tokens_depend_on_seed_id_and_position_and_members_differ(without_stop: Rig) -> None:
    """F33."""
    rig = without_stop

    def tokens(name: str) -> list[int]:
        rig.add(rig.trajectory([5, 6, 7], 12, name))
        return rig.drain()[name].tokens.tolist()

    assert tokens("a-m0") == tokens("a-m0")
    assert tokens("a-m0") != tokens("a-m1")


def test_the_sums_that_the_cost_model_learns_from(without_stop: Rig) -> None:
    """By hand: prompts of 4 and 6 tokens gain 3 and 5; the first leaves when it has them."""
    rig = without_stop
    before = rig.engine.load()
    assert before.kv_capacity == CAPACITY
    rig.add(rig.trajectory(4, 3), rig.trajectory(6, 5))
    assert rig.engine.load().waiting == 2
    rig.engine.step()
    load = rig.engine.load()
    assert (load.running, load.waiting, load.kv_tokens) == (2, 0, 5 + 7)
    rig.drain()
    after = rig.engine.load()
    assert after.decode_steps - before.decode_steps == 5
    assert after.running_steps - before.running_steps == after.generated_tokens - before.generated_tokens == 8
    assert after.kv_token_steps - before.kv_token_steps == (4 + 5 + 6) + (6 + 7 + 8 + 9 + 10)
    assert after.prefilled_tokens - before.prefilled_tokens == 10
    assert after.kv_tokens == 0
    assert before.decode_seconds < after.decode_seconds < before.decode_seconds + 30


def test_weights_that_are_not_the_models_are_refused_and_the_old_ones_stay(without_stop: Rig) -> None:
    rig = without_stop
    version = rig.engine.version
    right = arrays(rig.models[version])
    narrow = {**right, "model.norm.weight": np.zeros(3, np.float32)}
    for wrong, message in (
        (narrow, "has shape"),
        ({**right, "a": np.zeros(1), "b": np.zeros(1)}, "no weights named"),
        (dict(list(right.items())[:5]), "lack"),
    ):
        with pytest.raises(EngineError, match=message):
            rig.engine.load_weights(wrong, version + 1, "recompute")
    with pytest.raises(EngineError, match="not pushed"):  # the workers cannot lease what is not there
        rig.engine.load_weights(right, version + 1, "recompute")
    assert rig.engine.version == version
    again = rig.trajectory(5, 8)
    rig.add(again)
    assert rig.difference(rig.drain()[again.trajectory_id], version).max() < TOLERANCE


def test_weights_come_in_a_file_where_there_is_no_storage_to_lease_from(
    without_stop: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = without_stop
    monkeypatch.setattr(rig.engine, "_handle", None)
    new = rig.load()
    one = rig.trajectory(5, 8)
    rig.add(one)
    assert rig.difference(rig.drain()[one.trajectory_id], new).max() < TOLERANCE


def test_a_full_cache_preempts_and_every_trajectory_still_ends_with_all_its_tokens(without_stop: Rig) -> None:
    """F41: eight of up to 124 tokens in a cache of 640 and what rounding leaves to spare."""
    rig = without_stop
    version, before = rig.engine.version, rig.engine.load().preemptions
    rig.add(*(rig.trajectory(64, 60) for _ in range(12)))
    done: dict[str, Trajectory] = {}
    while rig.engine.trajectories():
        done |= {t.trajectory_id: t for t in rig.engine.step()}
    assert len(done) == 12
    assert rig.engine.load().preemptions > before
    for trajectory in done.values():
        assert trajectory.response_len == 60
        assert rig.difference(trajectory, version).max() < TOLERANCE


def test_a_dead_engine_raises_and_leaves_no_process(rig: Rig) -> None:
    """F16, F37; the last test, since nobody can use the engine after it."""
    group = rig.engine.host_pid
    rig.add(rig.trajectory(5, 40))
    os.kill(group, signal.SIGKILL)
    with pytest.raises(EngineError, match="died"):
        rig.drain()
    for use in (
        lambda: rig.engine.add(rig.trajectory()),
        rig.engine.step,
        lambda: rig.load(),
        rig.engine.load,
    ):
        with pytest.raises(EngineError, match="died"):
            use()
    assert ends(group)


def ends(group: int) -> bool:
    """What removes the shared memory of the dead ends a moment after them."""
    for _ in range(300):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
