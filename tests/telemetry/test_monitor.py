"""Rows and status of a run whose events are made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_events import Time, batch, received, report, response, scored, teller

from staleflow.coordination.actions import Pull
from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.events import InstanceJoined, InstanceReport, Rejection
from staleflow.data.trajectory import FAILED, FinishReason, Reward
from staleflow.protocol.lifecycle import TrajectoryState
from staleflow.protocol.records import TrainedMember
from staleflow.telemetry.catalogue import find
from staleflow.telemetry.events import (
    CheckpointSaved,
    CommandSent,
    ControlRan,
    Evaluated,
    EvaluationFailed,
    EvaluationSkipped,
    GivenUp,
    InstanceDown,
    PhaseBegan,
    Released,
    RewardReceived,
    RunBegan,
    RunEnded,
    RunFinished,
    StepTrained,
    StragglerResampled,
    StragglerTruncated,
    TurnEnded,
    WeightsPushed,
)
from staleflow.telemetry.monitor import Intervals, RunMonitor
from staleflow.telemetry.rows import BufferStatus, InstanceStatus

COSTS = CostModel(k1=1.0, k2=2.0, k3=3.0, k4=4.0, prefill=5.0)


class View:
    """As much of `ControlView` as is looked at."""

    bound = 1
    batch_size = 2
    next_buffer = 3
    newest_version = 3
    finished: str | None = None
    trainer_idle = False
    cost_error: float | None = None
    cost_model = COSTS

    def __init__(self) -> None:
        self.up: dict[str, InstanceReport] = {}
        self.pulling: set[str] = set()
        self.states = dict.fromkeys(TrajectoryState, 0)

    def placement(self) -> tuple[tuple[int, int], ...]:
        return ((1, 1), (2, 0))

    def by_deadline(self) -> tuple[tuple[int, int], ...]:
        return self.placement()

    def lags(self, newest: int, *, occupied: bool) -> list[int]:
        return [newest - version for version in ((3, 2) if occupied else (4,))]

    def count(self, state: TrajectoryState) -> int:
        return self.states[state]

    def instances(self) -> tuple[str, ...]:
        return tuple(self.up)

    def instance(self, name: str) -> InstanceReport:
        return self.up[name]

    def outstanding(self, name: str) -> tuple[Pull, ...]:
        pull = Pull(instance=name, incarnation=1, seq=9, version=4)
        return (pull,) if name in self.pulling else ()

    def resident(self, name: str) -> tuple[str, ...]:
        return ("t",) * self.up[name].running


class Tokens:
    """A `data.responses.Balance`, set by hand."""

    def __init__(self) -> None:
        self.generated = self.trained = self.filtered = self.aborted = self.discarded = 0

    def as_dict(self) -> dict[str, int]:
        values = {name: int(value) for name, value in vars(self).items()}
        return {**values, "in_flight": 2 * self.generated - sum(values.values())}


class Watched:
    """A monitor, its clock, and what it looks at. The attempt begins at 100 s."""

    def __init__(self, **parts: Any) -> None:
        self.clock, self.view, self.tokens = Time(100.0), View(), Tokens()
        self.monitor = RunMonitor(
            run_name="r",
            policy="staleflow",
            bound=1,
            steps=9,
            longest_response=20,
            now=self.clock,
            wall=lambda: 1e9 + self.clock.now,
            **parts,
        )
        self.tell = teller(self.monitor)
        view: Any = self.view
        self.tell(RunBegan(view=view, balance=self.tokens))

    def at(self, seconds: float, *events: Any) -> None:
        """So long after the beginning."""
        self.clock.now = 100.0 + seconds
        for event in events:
            self.tell(event)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Those since the last call; the catalogue has all their names."""
        rows = [row for row in self.monitor.take_rows() if row.kind == kind]
        for row in rows:
            assert row.time == pytest.approx(1e9 + 100.0 + row.values["run/seconds"])
            assert all((metric := find(name)) and row.kind in metric.kinds for name in row.values)
        return [row.values for row in rows]


@pytest.fixture
def run() -> Watched:
    return Watched()


def member(id_: str, low: int, tokens: int) -> TrainedMember:
    return TrainedMember(id=id_, min=low, max=3, tokens=tokens, hash="")


def trained(step: int = 3, **changes: Any) -> StepTrained:
    values: dict[str, Any] = {"trained": (), "metrics": {}, "update_s": 1.0, **changes}
    return StepTrained(step=step, **values)


def test_the_row_of_a_step_sums_up_what_happened_until_its_end(run: Watched) -> None:
    """The parts are up after 2 s, the batch comes after 5, the step ends after 12."""
    run.at(2, PhaseBegan(phase="running"))
    run.at(4, WeightsPushed(version=3, seconds=1.5))
    group = [
        scored(response(4, runs=((2, 3), (3, 1))), 1.0),
        scored(response(8, reason=FinishReason.LENGTH), 0.0),
    ]
    group += [scored(response(3, reason=FinishReason.FAILED), 9.0, usable=False)]
    run.at(5, batch(group, [scored(response(1), 0.5)], step=3, waited_s=4.0))
    run.at(6, RewardReceived("a", Reward(raw=1.0, seconds=0.5), False))
    run.at(6, RewardReceived("b", Reward(raw=0.0, status="timeout", seconds=0.25), True))
    run.at(6, RewardReceived("c", Reward(raw=0.0, status="error"), False))
    run.at(6, RewardReceived("d", FAILED, False))
    run.at(7, Released([response(), response()], "filtered"), Released([response()], "discarded"))
    run.at(7, Released([response(), response(), response()], "aborted"))
    run.at(8, StragglerResampled(dropped=response(2, reason=None), new_id="x", reason="slow"))
    run.at(8, StragglerTruncated(trajectory=response(2, id_="y"), reason="slow"))
    run.at(8, CommandSent(Pull(instance="i0", incarnation=1, seq=1, version=3)))
    run.at(8, ControlRan(0.5, True), ControlRan(0.25, False))
    run.tokens.generated, run.tokens.filtered, run.tokens.aborted = 50, 2, 3
    metrics = {"train/loss": 0.125}
    members = (member("a", 2, 4), member("b", 3, 8), member("c", 0, 0), member("d", 3, 1))
    run.at(12, trained(trained=members, metrics=metrics, update_s=6.0, waited_s=1.0))
    (row,) = run.rows("train")
    expected = {
        "run/seconds": 12.0,
        "train/step": 3,
        "train/loss": 0.125,
        "staleness/mean": 1 / 3,
        "staleness/max": 1,
        "staleness/min": 0,
        "staleness/violations": 0,
        "staleness/in_flight/mean": 0.0,
        "staleness/in_flight/max": 0,
        "staleness/in_queue/mean": 1.5,
        "staleness/in_queue/max": 2,
        "buffer/0/reserved": 1,
        "buffer/0/occupied": 1,
        "buffer/1/reserved": 2,
        "buffer/1/occupied": 0,
        "timing_s/wait_for_batch": 3.0,  # 4, of which the parts were up for 3
        "timing_s/update": 6.0,
        "timing_s/push": 1.0,
        "timing_s/push_behind": 0.5,
        "timing_s/reward": 0.75,
        "rollout/reward_mean": 0.5,
        "rollout/response_len_mean": 4.0,
        "rollout/response_len_max": 8,
        "rollout/truncated_ratio": 0.25,
        "rollout/partial_ratio": 0.25,
        "rollout/groups": 2,
        "rollout/tokens_per_s": 5.0,
        "rollout/wasted_tokens": 5,
        "rollout/filtered_groups": 1,
        "rollout/failed_groups": 0,
        "rollout/expired_groups": 0,
        "rollout/surplus_members": 3,
        "rollout/straggler_retried": 1,
        "rollout/straggler_truncated": 1,
        "reward/timeout_count": 1,
        "reward/error_count": 1,
        "lengths/cut": 1,
        "lengths/sampled/2": 1,
        "lengths/trained/1": 1,
        "lengths/trained/4": 1,
        "lengths/trained/8": 1,
        "coord/pull_count": 1,
        "coord/step_seconds": 0.5,
        "coord/handle_seconds": 0.25,
        "time/step_s": 10.0,
        "time/trainer_waiting_s": 3.0,
        "tokens/generated": 50,
        "tokens/in_flight": 45,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert "coord/cost_model_error" not in row


def test_the_next_row_has_what_came_since(run: Watched) -> None:
    run.at(0, PhaseBegan(phase="running"))
    run.at(
        1,
        batch([scored(response(4))], step=3, waited_s=1.0),
        RewardReceived("a", Reward(raw=0.0, status="error"), False),
    )
    run.tokens.generated, run.tokens.discarded = 40, 4
    run.at(2, trained(3))
    run.view.cost_error = 0.5
    run.at(3, batch([scored(response(4))], step=4, waited_s=0.5), WeightsPushed(version=4, seconds=2.0))
    run.tokens.generated, run.tokens.discarded = 100, 5
    run.at(8, trained(4, trained=(member("a", 2, 1),), waited_s=2.5))
    first, second = run.rows("train")
    assert first.keys() == second.keys() - {"coord/cost_model_error"}
    assert (first["reward/error_count"], second["reward/error_count"]) == (1, 0)
    assert (first["rollout/tokens_per_s"], second["rollout/tokens_per_s"]) == (20.0, 10.0)
    assert (first["rollout/wasted_tokens"], second["rollout/wasted_tokens"]) == (4, 1)
    assert (first["timing_s/push_behind"], second["timing_s/push_behind"]) == (0.0, 0.0)
    assert second["coord/cost_model_error"] == 0.5
    assert (second["staleness/max"], second["staleness/violations"]) == (2, 1)  # the bound is 1
    assert (second["time/step_s"], second["timing_s/wait_for_batch"]) == (6.0, 0.5)


def test_rewards_that_mean_nothing_are_left_out() -> None:
    run = Watched(has_rewards=False)
    run.at(0, batch([scored(response())], step=3), trained(3))
    (row,) = run.rows("train")
    assert "rollout/reward_mean" not in row
    assert row["rollout/groups"] == 1


def test_an_evaluation_is_a_row(run: Watched) -> None:
    run.at(5, Evaluated(version=2, values={"heldout/avg@4": 0.75, "heldout/prompts": 8}, seconds=3.0))
    assert run.rows("eval") == [
        {
            "run/seconds": 5.0,
            "eval/weight_version": 2,
            "eval/heldout/avg@4": 0.75,
            "eval/heldout/prompts": 8,
            "eval/seconds": 3.0,
        }
    ]
    assert run.monitor.status.evals == ((2, 0.75),)


def test_the_summary_has_the_totals_of_the_attempt() -> None:
    extra = {"simulation/wall_s": 0.5}
    run = Watched(extra_summary=lambda: extra)
    run.at(1, PhaseBegan(phase="running"))
    run.view.up = {"i0": report(running=0)}
    run.at(2, TurnEnded(True))
    run.at(3, batch([scored(response(4, prompt=5))], step=3, waited_s=2.0))
    run.at(4, trained(3))
    run.at(6, batch([scored(response(2))], step=4, waited_s=2.0))
    run.at(7, trained(4), received(report(pull_seconds=0.75, preemptions=2)))
    run.tokens.generated = run.tokens.trained = 6
    run.view.next_buffer, run.view.finished = 5, "completed"
    run.at(8, TurnEnded(False))
    extra["simulation/wall_s"] = 1.5
    run.at(10, RunFinished(reason="completed"), RunEnded())
    (summary,) = run.rows("summary")
    expected = {
        "run/seconds": 10.0,
        "run/steps": 5,
        "wait/trainer_s": 4.0,
        "wait/instances_s": 6.0,  # i0 idles from 2 to 8 s
        "coord/k1": 1.0,
        "coord/k4": 4.0,
        "coord/prefill": 5.0,
        "coord/pull_seconds": 0.75,
        "rollout/preemptions": 2,
        "lengths/trained/mean": 3.0,
        "prompt_lengths/trained/mean": 4.0,
        "tokens/generated": 6,
        "tokens/in_flight": 0,
        "simulation/wall_s": 1.5,
    }
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
    assert summary["run/reason"] == "completed"
    assert run.monitor.status.phase == "done"
    assert run.monitor.take_rows() == []


def test_what_happens_seldom_is_a_row_in_words(run: Watched) -> None:
    joined = InstanceJoined(instance="i0", incarnation=1, version=0, kv_capacity=100, max_running=4)
    rejections = (
        Rejection(seq=1, trajectory_id="t1", reason="full"),
        Rejection(seq=2, trajectory_id=None, reason="the server is gone"),
        Rejection(seq=3, trajectory_id="t2", reason="version 3 is not loaded", stale_version=True),
    )
    run.at(
        1,
        joined,
        received(report(rejections=rejections)),
        InstanceDown(instance="i0", incarnation=1, reason="it died"),
        StragglerResampled(dropped=response(2, id_="s1"), new_id="s2", reason="step 3 waits for it"),
        StragglerTruncated(trajectory=response(7, id_="s3"), reason="step 3 waits for it"),
        GivenUp(trajectory_id="t3", reason="no new token for 60 s"),
        CheckpointSaved(version=4, seconds=1.25),
        EvaluationFailed(version=2, reason="it ran out of memory"),
        EvaluationSkipped(version=3),
        RunFinished(reason="completed"),
    )
    rows = run.rows("event")
    assert {row["run/seconds"] for row in rows} == {1.0}
    assert [(row["event/name"], row["event/text"]) for row in rows] == [
        ("instance_up", "i0 is up"),
        ("rejected", "i0 refused t1: full"),
        ("rejected", "i0 refused a pull: the server is gone"),
        ("instance_down", "i0 was lost: it died"),
        ("straggler", "trajectory s1 is sampled anew: step 3 waits for it"),
        ("straggler", "trajectory s3 is cut at 7 tokens: step 3 waits for it"),
        ("gave_up", "trajectory t3 is masked: no new token for 60 s"),
        ("checkpoint", "saved step 4 in 1.2 s"),
        ("evaluation_failed", "version 2 is not evaluated: it ran out of memory"),
        ("evaluation_skipped", "version 3 is not evaluated: evaluation is behind (see evaluation.backlog)"),
        ("finish", "completed"),
    ]


def test_instances_are_sampled_once_a_second_with_their_rates(run: Watched) -> None:
    run.view.up = {"i0": report(generated_tokens=0)}
    run.at(1, TurnEnded(True))
    run.at(1.5, TurnEnded(True))
    loaded = {"running": 2, "waiting": 1, "kv_tokens": 30, "kv_capacity": 40}
    run.view.up = {"i0": report(version=4, generated_tokens=100, **loaded)}
    run.at(2.5, batch([], step=3), received(report(preemptions=3)))
    run.at(3, TurnEnded(True))
    first, second = run.rows("instances")
    assert first == {
        "run/seconds": 1.0,
        "trainer/busy": 0,
        "instance/i0/version": 0,
        "instance/i0/running": 0,
        "instance/i0/waiting": 0,
        "instance/i0/kv_usage": 0.0,
        "instance/i0/tokens_per_s": 0.0,
        "instance/i0/preemptions": 0,
    }
    assert second == {
        "run/seconds": 3.0,
        "trainer/busy": 1,
        "instance/i0/version": 4,
        "instance/i0/running": 2,
        "instance/i0/waiting": 1,
        "instance/i0/kv_usage": 0.75,
        "instance/i0/tokens_per_s": 50.0,
        "instance/i0/preemptions": 3,
    }


def test_samples_become_rarer_in_a_long_run() -> None:
    """After two rows the time between them is 2 s, after two more 4 s."""
    run = Watched(intervals=Intervals(sample_s=1.0, double_after=2))
    for second in range(1, 20):
        run.at(second, TurnEnded(True))
    assert [row["run/seconds"] for row in run.rows("instances")] == [1, 2, 4, 6, 10, 14]


def test_the_status_shows_the_moment(run: Watched) -> None:
    assert (run.monitor.status.phase, run.monitor.status.version) == ("starting", -1)
    run.at(0, PhaseBegan(phase="running"), InstanceDown(instance="i2", incarnation=1, reason="it died"))
    run.view.up = {"i1": report("i1"), "i0": report("i0", running=2, version=3)}
    run.view.pulling = {"i1"}
    run.view.states |= {
        TrajectoryState.PENDING: 5,
        TrajectoryState.RUNNING: 2,
        TrajectoryState.GENERATED: 1,
        TrajectoryState.WAITING_EXTERNAL: 1,
    }
    run.view.trainer_idle = True
    run.tokens.generated = 7
    run.at(0.25, TurnEnded(False))
    status = run.monitor.status
    assert (status.phase, status.step, status.steps, status.version) == ("running", 3, 9, 3)
    assert (status.seconds, status.trainer) == (0.25, "idle")
    assert status.buffers == (
        BufferStatus(step=3, capacity=2, reserved=1, occupied=1),
        BufferStatus(step=4, capacity=2, reserved=2, occupied=0),
    )
    unknown = {"waiting": 0, "kv_usage": 0.0, "tokens_per_s": 0.0}
    assert status.instances == (
        InstanceStatus(instance="i0", version=3, running=2, state="decoding", **unknown),
        InstanceStatus(instance="i1", version=0, running=0, state="pulling", **unknown),
        InstanceStatus(instance="i2", version=-1, running=0, state="lost", **unknown),
    )
    assert status.waiting_for == (
        "1 of 2 groups of step 3; 2 trajectories on i0; 1 being scored; "
        "1 waiting for their environment; 5 in the trajectory server"
    )
    assert (status.pending, status.scoring, status.in_flight) == (5, 1, 2)
    assert status.tokens["generated"] == 7
    run.view.trainer_idle = False
    joined = InstanceJoined(instance="i2", incarnation=2, version=3, kv_capacity=100, max_running=4)
    run.at(0.3, joined, batch([scored(response(), 0.5)], step=3), TurnEnded(True))
    assert run.monitor.status == status  # too soon for another picture
    run.at(0.5, TurnEnded(True))
    status = run.monitor.status
    assert (status.trainer, status.waiting_for) == ("training step 3", "")
    assert [instance.instance for instance in status.instances] == ["i0", "i1"]
    run.at(0.6, trained(3, trained=(member("a", 2, 4), member("b", 3, 4))))
    status = run.monitor.status
    assert (status.reward_mean, status.staleness_mean, status.staleness_max) == ((0.5,), 0.5, 1)


def test_pictures_follow_the_clock_of_whoever_looks() -> None:
    real = Time()
    run = Watched(redraw=real)
    run.at(50, TurnEnded(True))
    assert run.monitor.status.seconds == 0.0
    real.now = 0.25
    run.at(60, TurnEnded(True))
    assert run.monitor.status.seconds == 60.0
