"""Evaluation: its metrics by hand, its turns, and that training goes on meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from toy import ToyRun, toy_config

from staleflow.data.trajectory import FinishReason, Prompt, Reward, Segment, Trajectory
from staleflow.errors import ConfigError, RunFailed
from staleflow.reward.verifiers import ScoreRequest
from staleflow.rollout.fake import FakeEngine
from staleflow.runtime.assembly import build_evaluator, build_inline_scorer, read_data
from staleflow.runtime.backend import Evaluated, Message, StepTrained
from staleflow.runtime.evaluation import EvaluationPlan, Evaluator, pass_at_k
from staleflow.runtime.evaluation_turns import EvaluationTurns

# ---------------------------------------------------------------------- metrics


@pytest.mark.parametrize(
    ("samples", "right", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (5, 2, 3, 9 / 10),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (4, 3, 2, 1.0),  # two of four cannot both be the one wrong response
        (4, 0, 4, 0.0),
        (200, 1, 100, 1 / 2),
    ],
)
def test_pass_at_k_by_hand(samples: int, right: int, k: int, expected: float) -> None:
    assert pass_at_k(samples, right, k) == pytest.approx(expected)


@pytest.mark.parametrize(("samples", "right", "k"), [(6, 2, 3), (7, 1, 4), (5, 5, 2)])
def test_pass_at_k_is_the_share_of_all_choices_with_a_right_one(samples: int, right: int, k: int) -> None:
    choices = list(itertools.combinations([True] * right + [False] * (samples - right), k))
    assert pass_at_k(samples, right, k) == pytest.approx(sum(any(c) for c in choices) / len(choices))


class Answering:
    """An engine that answers in one step: one token, and the number of tokens asked for to the greedy."""

    def __init__(self) -> None:
        self.version = -1
        self.loads: list[int] = []
        self.added: list[tuple[str, bool]] = []
        self._held: list[Trajectory] = []
        self.closed = False

    def load_weights(self, tensors: Mapping[str, Any], version: int, on_pull: str) -> None:
        self.version = version
        self.loads.append(version)

    def add(self, trajectory: Trajectory, *, greedy: bool = False) -> None:
        self.added.append((trajectory.trajectory_id, greedy))
        length = trajectory.max_new_tokens if greedy else 1
        given = Segment.given([5] * length)
        reason = FinishReason.LENGTH if greedy else FinishReason.STOP
        self._held.append(trajectory.extended(given).finished(reason))

    def step(self) -> Sequence[Trajectory]:
        gone, self._held = self._held[:3], self._held[3:]
        return gone

    def close(self) -> None:
        self.closed = True


class Scripted:
    """Scores by trajectory id, 0 where none is written; answers one at a time, the last first."""

    def __init__(self, scores: Mapping[str, float], silent: bool = False) -> None:
        self._scores, self._silent = scores, silent
        self._asked: list[ScoreRequest] = []

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        self._asked.extend(requests)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, Reward]]:
        if self._silent or not self._asked:
            return []
        name = self._asked.pop().trajectory_id
        return [(name, Reward(raw=self._scores.get(name, 0.0)))]

    def close(self) -> None:
        """Nothing to stop."""


def evaluator(engine: Any, scorer: Any, plan: EvaluationPlan, prompts: int = 3) -> Evaluator:
    return Evaluator(
        engine=engine,
        prompts=[Prompt(prompt_id=str(i), tokens=(1,), text="", answer=None) for i in range(prompts)],
        scorer=scorer,
        request=lambda t: ScoreRequest(
            trajectory_id=t.trajectory_id, prompt="", response="", answer=None, metadata={}
        ),
        plan=plan,
    )


def test_all_metrics_of_both_sets_by_hand() -> None:
    # Right of 4 samples: 2, 1, 0; a partial score of 0.5 counts in the mean alone.
    scores = {
        "eval-heldout-p0-m0": 1.0,
        "eval-heldout-p0-m3": 1.0,
        "eval-heldout-p1-m2": 1.0,
        "eval-heldout-p2-m1": 0.5,
        "eval-heldout_greedy-p1-m0": 1.0,
    }
    engine = Answering()
    plan = EvaluationPlan(max_new_tokens=7, samples=4, pass_at=(1, 2, 4))
    values = evaluator(engine, Scripted(scores), plan).evaluate({}, 3)
    assert values == pytest.approx(
        {
            "heldout/prompts": 3,
            "heldout/avg@4": 3.5 / 12,
            "heldout/pass@1": (2 / 4 + 1 / 4 + 0) / 3,
            "heldout/pass@2": (5 / 6 + 1 / 2 + 0) / 3,
            "heldout/pass@4": 2 / 3,
            "heldout/response_len_mean": 1,
            "heldout/truncated_ratio": 0,
            "heldout_greedy/avg@1": 1 / 3,
            "heldout_greedy/response_len_mean": 7,
            "heldout_greedy/truncated_ratio": 1,
        }
    )
    assert engine.loads == [3]
    assert [greedy for _, greedy in engine.added] == ([False] * 4 + [True]) * 3
    assert len({name for name, _ in engine.added}) == 15


def test_a_score_from_which_a_response_is_right_can_be_set_and_greedy_can_be_left_out() -> None:
    plan = EvaluationPlan(max_new_tokens=7, pass_at=(1,), pass_score=0.4, greedy=False)
    scores = {"eval-heldout-p0-m0": 0.5, "eval-heldout-p1-m0": 0.3}
    values = evaluator(Answering(), Scripted(scores), plan, prompts=2).evaluate({}, 0)
    assert values["heldout/pass@1"] == 0.5
    assert values["heldout/avg@1"] == pytest.approx(0.4)
    assert not any("greedy" in name for name in values)


def test_weights_that_are_loaded_already_are_not_loaded_again() -> None:
    engine = Answering()
    evaluating = evaluator(engine, Scripted({}), EvaluationPlan(max_new_tokens=2))
    for version in (0, 0, 5):
        evaluating.evaluate({}, version)
    assert engine.loads == [0, 5]


def test_a_verifier_that_never_answers_ends_the_run() -> None:
    with pytest.raises(RunFailed, match="the verifier did not answer within 600 s"):
        evaluator(Answering(), Scripted({}, silent=True), EvaluationPlan(max_new_tokens=2)).evaluate({}, 0)


# ---------------------------------------------------------------------- turns


def test_one_is_under_way_and_the_oldest_waiting_one_is_skipped_for_a_newer() -> None:
    turns = EvaluationTurns(every=5, steps=23, backlog=1)
    assert [v for v in range(24) if turns.is_due(v)] == [0, 5, 10, 15, 20, 23]
    assert (turns.ask(0), turns.start()) == (None, 0)
    assert (turns.ask(5), turns.start()) == (None, None)
    assert (turns.ask(5), turns.ask(0)) == (None, None), "neither is taken twice"
    assert (turns.ask(10), turns.ask(15)) == (5, 10)
    turns.done(0)
    assert (turns.start(), turns.start()) == (15, None)
    assert turns.are_left
    turns.done(15)
    assert turns.start() is None
    assert not turns.are_left


def hold_back_until_the_end(run: ToyRun) -> list[str]:
    """Evaluations come in only when training is over. Returns the order of what came in."""
    backend, control = run.loop._backend, run.loop._control
    original, held, order = backend.poll, list[Message](), list[str]()

    def poll(timeout_s: float) -> list[Message]:
        passed: list[Message] = []
        for message in original(timeout_s):
            (held if isinstance(message, Evaluated) else passed).append(message)
        if control.view.finished is not None:
            passed, held[:] = passed + held, []
        for message in passed:
            if isinstance(message, StepTrained):
                order.append(f"step {message.step + 1}")
            if isinstance(message, Evaluated):
                order.append(f"eval {message.version}")
        return passed

    backend.poll = poll  # type: ignore[method-assign]
    return order


def test_a_long_evaluation_delays_no_step_and_what_it_cannot_keep_up_with_is_skipped(
    model: Path, tmp_path: Path
) -> None:
    config = toy_config(
        model, tmp_path, "evaluation.every=1", "evaluation.prompts=4", "evaluation.backlog=1", "run.steps=6"
    )
    run = ToyRun(config, tmp_path)
    order = hold_back_until_the_end(run)
    assert run.run() == "completed"
    assert order == [*(f"step {v}" for v in range(1, 7)), "eval 0", "eval 6"]
    rows = run.monitor.take_rows()
    skipped = [r.values["event/text"] for r in rows if r.values.get("event/name") == "evaluation_skipped"]
    assert [str(text).split()[1] for text in skipped] == ["1", "2", "3", "4", "5"]
    backend: Any = run.loop._backend
    assert backend._held == {}, "weights of skipped versions are still held"


# ---------------------------------------------------------------------- from the config


def test_evaluation_has_its_own_engine_and_its_metrics_their_axis(model: Path, tmp_path: Path) -> None:
    config = toy_config(
        model,
        tmp_path,
        "evaluation.every=3",
        "evaluation.prompts=4",
        "evaluation.engine=torch",
        "evaluation.samples=3",
        "evaluation.pass_at=[1, 3]",
    )
    data = read_data(config)
    engine = build_evaluator(config, data.tokenizer, data.held_out, build_inline_scorer(config))._engine
    assert not isinstance(engine, FakeEngine)
    engine.close()
    run = ToyRun(config, tmp_path)
    assert run.run() == "completed"
    rows = [row.values for row in run.monitor.take_rows() if row.kind == "eval"]
    assert [row["eval/weight_version"] for row in rows] == [0, 3, 6]
    for row in rows:
        assert {"eval/heldout/avg@3", "eval/heldout/pass@1", "eval/heldout/pass@3"} < row.keys()
        assert "eval/heldout_greedy/avg@1" in row
        assert row["eval/heldout/pass@1"] == pytest.approx(row["eval/heldout/avg@3"])
    status = run.monitor.status
    assert [value for _, value in status.evals] == [row["eval/heldout/avg@3"] for row in rows]


def test_pass_at_more_than_the_samples_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.pass_at.*pass@8 needs at least 8 samples"):
        toy_config(model, tmp_path, "evaluation.samples=4", "evaluation.pass_at=[1, 8]")
