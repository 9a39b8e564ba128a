"""The arithmetic of the study of fidelity, and that a run which obeys the model is told by it exactly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from staleflow.config import Config, load_config
from staleflow.coordination.actions import Pull, Route
from staleflow.coordination.control import Patience
from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.events import (
    DrawnGroup,
    GroupsDrawn,
    InstanceJoined,
    InstanceReport,
    TrajectoryReport,
)
from staleflow.data.trajectory import Reward
from staleflow.errors import UserError
from staleflow.experiments.fidelity import Learned, cluster_of, refined_costs
from staleflow.experiments.recorded import Recorded, RecordedStep, Replay, fit_line, read_recorded
from staleflow.experiments.simulated_beside_real import (
    Comparison,
    decode_speed,
    deviation,
    staleness,
    step_parts,
    throughput,
    total_variation,
)
from staleflow.protocol.records import Start, Trained, TrainedMember
from staleflow.reporting.load import load_run
from staleflow.runtime.assembly import build_control, opening_record
from staleflow.runtime.launch_simulation import simulate_into
from staleflow.runtime.start import first_start
from staleflow.simulation.response_lengths import lognormal
from staleflow.simulation.settings import ClusterSettings, TrainerCosts
from staleflow.storage import LedgerWriter
from staleflow.telemetry.events import (
    BatchTaken,
    CommandSent,
    EventStream,
    ReportReceived,
    RewardReceived,
    StepTrained,
    WeightsPushed,
)
from staleflow.telemetry.journal import JournalWriter

COSTS = CostModel(k1=1e-5, k2=0.02, k3=0.006, k4=0.005, prefill=1e-4, pull=0.3)


def recorded(**changes: object) -> Recorded:
    values: dict[str, object] = {
        "lengths": ((5, 7), (None, 9)),
        "rewards": ((1.0, 0.0), (None, 1.0)),
        "prompt_length": 3.0,
        "steps": (
            RecordedStep(tokens=100, seconds=2.5, push_s=0.5),
            RecordedStep(tokens=200, seconds=3.5, push_s=0.5),
        ),
        "round_trips": (),
        "scoring": (),
        "pulls": (),
    }
    return Recorded(**(values | changes))


# ---------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(
    ("xs", "ys", "line"),
    [
        ((1, 2, 3), (3, 5, 7), (1, 2)),
        ((1, 2, 3), (4, 3, 2), (3, 0)),  # falling: no cost is negative, so the mean
        ((1, 2), (1, 3), (0, 1.4)),  # through -1: the line through the origin that fits best, (1 + 6) / 5
        ((2, 2), (5, 7), (6, 0)),  # one size only
    ],
)
def test_a_line_with_no_part_below_0(
    xs: tuple[float, ...], ys: tuple[float, ...], line: tuple[float, float]
) -> None:
    assert fit_line(xs, ys) == pytest.approx(line)


def test_the_trainer_is_a_fixed_part_a_part_per_token_and_the_push() -> None:
    # 2 s of update at 100 tokens and 3 s at 200.
    costs = recorded().trainer()
    assert (costs.fixed_s, costs.token_s, costs.push_s) == pytest.approx((1.0, 0.01, 0.5))


def test_a_way_is_half_of_the_fastest_round_trips_without_the_step_in_it() -> None:
    trips = tuple(0.05 + 0.001 * k for k in range(40))
    assert recorded(round_trips=trips).one_way_s(0.03) == pytest.approx((0.052 - 0.03) / 2)
    assert recorded(round_trips=trips).one_way_s(1.0) == 0.0
    assert recorded().one_way_s(0.03) == 0.0


def test_total_variation_is_half_the_sum_of_differences() -> None:
    assert total_variation({0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5}) == 0.0
    assert total_variation({0: 1.0}, {1: 1.0}) == 1.0
    assert total_variation({0: 0.25, 1: 0.75}, {0: 0.5, 2: 0.5}) == pytest.approx(0.75)


def test_a_deviation_is_a_share_of_the_real_figure_in_either_direction() -> None:
    assert deviation(200.0, 230.0) == pytest.approx(0.15)
    assert deviation(200.0, 170.0) == pytest.approx(0.15)
    assert deviation(0.0, 1.0) == math.inf


def test_a_replay_gives_the_kth_group_its_lengths_and_the_mean_to_what_did_not_finish() -> None:
    replay = Replay(recorded())
    assert replay.lengths("e0-p0", ["e0-p0-a0-m0", "e0-p0-a0-m1"]) == [5, 7]
    assert replay.lengths("e0-p1", ["e0-p1-a3-m0", "e0-p1-a3-m1"]) == [7, 9]  # (5 + 7 + 9) / 3
    assert replay.lengths("e1-p2", ["e1-p2-a0-m0", "e1-p2-a0-m1"]) == [5, 7]
    assert [replay.reward(f"e0-p{p}-a0-m{m}") for p in (0, 1) for m in (0, 1)] == [1.0, 0.0, 0.0, 1.0]


# ---------------------------------------------------------------------- reading


def no_trajectory(trajectory_id: str) -> None:
    """None is alive."""


class Journaled:
    """A run folder whose journal is written line by line."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.writer = JournalWriter(folder / "journal.jsonl", clock=lambda: self.now, began=0.0)
        self._stream = EventStream([self.writer])

    def at(self, seconds: float, event: Any) -> None:
        self.now = seconds
        self._stream.tell(event)


def report(acked: int, *, pull_s: float = 0.0, done: tuple[str, int] | None = None) -> InstanceReport:
    finished = () if done is None else (
        TrajectoryReport(trajectory_id=done[0], length=done[1], min_version=0, finish_reason="stop"),
    )  # fmt: skip
    return InstanceReport(instance="i", incarnation=1, revision=acked, version=0, acked_seq=acked,
                          pull_seconds=pull_s, finished=finished)  # fmt: skip


def test_what_a_journal_says_of_lengths_rewards_and_latencies(tmp_path: Path) -> None:
    run = Journaled(tmp_path)
    run.at(0, InstanceJoined(instance="i", incarnation=1, version=0, kv_capacity=100, max_running=9))
    drawn = DrawnGroup(group_id="g", members=("g-m0", "g-m1"), prompt_length=4)
    run.at(0, GroupsDrawn(groups=(drawn,)))
    route = Route(
        instance="i", incarnation=1, seq=1, trajectory_id="g-m0", group_id="g", min_version=0, length=4
    )
    run.at(1, CommandSent(route))
    run.at(1.25, ReportReceived(report(1), (), no_trajectory))
    run.at(2, CommandSent(Pull(instance="i", incarnation=1, seq=2, version=1)))
    run.at(3, ReportReceived(report(2, pull_s=0.75), (), no_trajectory))
    run.at(3.5, CommandSent(Pull(instance="i", incarnation=1, seq=3, version=1)))
    run.at(3.6, ReportReceived(report(3, pull_s=0.75, done=("g-m0", 10)), (), no_trajectory))
    run.at(3.7, RewardReceived("g-m0", Reward(raw=1.0, seconds=0.01), False))
    run.at(4, BatchTaken(step=0, groups=(), waited_s=0.0))
    run.at(6, StepTrained(step=0, trained=(), metrics={}, update_s=1.5, waited_s=0.5))
    run.at(6.25, WeightsPushed(version=1, seconds=0.25))
    run.writer.close()
    with LedgerWriter(tmp_path / "ledger.jsonl") as ledger:
        start = Start(bound=1, batch_size=1, group_size=1, last_batch="train", spare_limit=0)
        member = TrainedMember(id="g-m0", min=0, max=0, tokens=6, hash="x")
        ledger.append(start, 0, 0)
        ledger.append(Trained(step=0, version=0, trajectories=(member,)), 1, 0)
    found = read_recorded(tmp_path)
    assert found.lengths == ((6, None),)
    assert found.rewards == ((1.0, None),)
    assert found.unfinished == 1
    assert found.prompt_length == 4.0
    assert found.steps == (
        RecordedStep(tokens=10, seconds=1.75, push_s=0.25),
    )  # 1.5 s of work and the push after it
    assert found.round_trips == (0.25,)
    assert found.scoring == pytest.approx((0.1,))
    assert found.pulls == (0.75,)  # the second one had nothing to bring


def test_a_run_without_a_journal_or_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"telemetry\.journal"):
        read_recorded(tmp_path)
    Journaled(tmp_path).writer.close()
    (tmp_path / "ledger.jsonl").touch()
    with pytest.raises(UserError, match="no trained step"):
        read_recorded(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "summary", "run/seconds": 1.0}) + "\n")
    with pytest.raises(UserError, match="no summary with a cost model"):
        refined_costs(load_run(tmp_path))


# ---------------------------------------------------------------------- the whole of it


def small_config() -> Config:
    overrides = (
        *("run.steps=12", "data.batch_size=3", "data.group_size=4", "staleness.bound=2"),
        *("rollout.instances=3", "rollout.max_new_tokens=120", "rollout.kv_capacity_tokens=900"),
        *("rollout.max_running=6", "training.dynamic_sampling=false", "rollout.progress_interval_s=1"),
    )
    return load_config([], overrides, {})


def simulated(folder: Path, config: Config, settings: ClusterSettings) -> None:
    folder.mkdir()
    control = build_control(
        config, first_start(opening_record(config)), patience=Patience(stall_after_s=math.inf)
    )
    assert simulate_into(folder, config, settings, control) == "completed"


def test_a_run_that_obeys_the_model_is_told_by_what_it_recorded(tmp_path: Path) -> None:
    """The truth is a simulated run here, so nothing but the way through the record can differ."""
    config = small_config()
    truth = ClusterSettings(
        instances=3,
        kv_capacity=900,
        max_running=6,
        costs=COSTS,
        trainer=TrainerCosts(fixed_s=0.5, token_s=2e-3, push_s=0.1),
        group_size=4,
        lengths=lognormal(median=30, sigma=0.8, most=120, correlation=0.5, seed=3),
        prompt_length=20,
        max_new_tokens=120,
        command_s=0.01,
        report_s=0.01,
        reward_s=0.2,
        progress_interval_s=1.0,
    )
    simulated(tmp_path / "real", config, truth)
    real, found = load_run(tmp_path / "real"), read_recorded(tmp_path / "real")
    learned = Learned.of(found, COSTS, real)
    assert (learned.trainer.fixed_s, learned.trainer.token_s) == pytest.approx((0.5, 2e-3), rel=1e-3)
    assert learned.trainer.push_s == pytest.approx(0.1)
    assert learned.reward_s == pytest.approx(0.21, rel=0.1)  # the report's way is in it
    simulated(tmp_path / "again", config, cluster_of(config, found, learned=learned))
    comparison = Comparison(name="x", real=real, simulated=load_run(tmp_path / "again"))
    rate, trimmed, distance = comparison.findings(judged=True)
    assert rate.value < 3.0
    assert trimmed.value < 5.0
    assert distance.value < 0.1
    assert all(f.reached in (True, None) for f in (rate, trimmed, distance))
    assert len(comparison.table().rows) == 15
    assert comparison.explanation().startswith("x: a simulated step takes ")
    assert sum(staleness(real).values()) == pytest.approx(1.0)
    assert sum(step_parts(real).values()) == pytest.approx(sum(r["time/step_s"] for r in real.train) / 12)
    assert throughput(real, skip=2) > 0
    assert 50 < decode_speed(real) < 1 / COSTS.k3
