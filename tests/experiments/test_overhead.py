"""The study of overhead: a cluster that stays as it is meant to be, and figures read from the right place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from staleflow.coordination.actions import Send
from staleflow.errors import UserError
from staleflow.experiments import coordination_cost, overhead
from staleflow.experiments.coordination_cost import ClusterSize, Cost, build_cluster, exponent
from staleflow.experiments.growth_figure import growth_figure
from staleflow.experiments.run_share import share_of_run
from staleflow.experiments.synthetic_cluster import GROUP_SIZE
from staleflow.protocol.lifecycle import TrajectoryState

SMALL = ClusterSize(instances=3, pending=64, per_instance=20)


def test_a_cold_fill_fills_every_instance_and_leaves_the_queue_as_long_as_asked_for() -> None:
    cluster = build_cluster(SMALL, batch_size=8)
    _, routes = cluster.cold_fill()
    control = cluster.control
    assert routes == 3 * 20
    assert [len(control.view.resident(name)) for name in control.view.instances()] == [20, 20, 20]
    assert SMALL.pending <= control.view.count(TrajectoryState.PENDING) < SMALL.pending + GROUP_SIZE


def test_in_steady_state_instances_stay_full_steps_are_trained_and_the_queue_keeps_its_length() -> None:
    cluster = build_cluster(SMALL, batch_size=2)
    cluster.cold_fill()
    lengths = []
    for _ in range(2000):
        cluster.interval()
        lengths.append(cluster.control.view.count(TrajectoryState.PENDING))
    control = cluster.control
    assert cluster.pushes >= 2
    assert control.view.next_buffer >= cluster.pushes
    # One that finished is missed until the next report was answered.
    assert control.view.count(TrajectoryState.RUNNING) >= 3 * 20 - 3
    assert min(lengths) > SMALL.pending - 2 * GROUP_SIZE
    assert max(lengths) < SMALL.pending + 2 * GROUP_SIZE


def test_an_interval_counts_the_reports_of_all_instances_and_the_commands_sent() -> None:
    cluster = build_cluster(SMALL, batch_size=8)
    cluster.cold_fill()
    seen = [cluster.interval() for _ in range(200)]
    assert {i.reports for i in seen} == {3}
    assert sum(i.commands for i in seen) > 0
    assert all(i.cycle_s >= 0 and i.reports_s >= 0 for i in seen)
    actions = cluster.control.cycle(1e6)  # whatever is overdue by then, it is told to instances
    assert any(isinstance(action, Send) for action in actions)


def test_a_point_is_measured_in_a_process_of_its_own() -> None:
    [cost] = coordination_cost.measure_all([ClusterSize(instances=2, pending=16, per_instance=4)])
    assert (cost.instances, cost.pending, cost.routes) == (2, 16, 8)
    assert 0 < cost.cycle_p50_ms <= cost.cycle_p99_ms <= cost.cycle_max_ms
    assert cost.cold_fill_s > 0


def test_the_exponent_of_a_power_law_is_found() -> None:
    sizes = [16, 128, 1024]
    assert exponent(sizes, [3.0 * n**1.5 for n in sizes]) == pytest.approx(1.5)
    assert exponent(sizes, [7.0] * 3) == pytest.approx(0.0)


def cost(instances: int, pending: int) -> Cost:
    values = dict.fromkeys(Cost.__slots__, 1.0)
    return Cost(**{**values, "instances": instances, "pending": pending})


def test_the_figure_has_both_directions_of_growth() -> None:
    figure = growth_figure([cost(16, 100), cost(128, 100)], [cost(128, 10), cost(128, 100)])
    assert "instances (100 wait)" in figure
    assert "waiting (128 instances)" in figure
    assert figure == growth_figure([cost(16, 100), cost(128, 100)], [cost(128, 10), cost(128, 100)])


def run_folder(folder: Path, **summary: float) -> Path:
    rows = [
        {"kind": "train", "time": 0.0, "train/step": s, "time/step_s": 10.0, "time/instances_s": 40.0}
        for s in range(2)
    ]
    rows.append({"kind": "summary", "time": 0.0, "run/seconds": 25.0, **summary})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def test_shares_are_of_the_time_in_which_all_parts_were_up(tmp_path: Path) -> None:
    seconds = {"step": 0.1, "handle": 0.3, "route": 0.8, "interrupt": 0.0, "abort": 0.4, "pull": 4.0}
    folder = run_folder(tmp_path, **{f"coord/{name}_seconds": value for name, value in seconds.items()})
    share = share_of_run(folder, steps=1)
    assert (share.wall_s, share.steps, share.instances) == (20.0, 2, 4.0)
    assert share.step == pytest.approx(0.005)
    assert share.handle == pytest.approx(0.015)
    assert share.still == pytest.approx({"route": 0.01, "interrupt": 0.0, "abort": 0.005, "pull": 0.05})


def test_a_run_that_did_not_end_has_no_shares(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no summary"):
        share_of_run(run_folder(tmp_path), steps=1)


def test_goals_are_judged_for_the_largest_cluster_at_full_size_only() -> None:
    costs = [cost(n, 100_000) for n in overhead.INSTANCES] + [cost(1024, 1_000)]
    for quick, judged in ((False, 3), (True, 0)):
        options = overhead.Options(quick=quick, run=None, say=print)
        findings = overhead._control(costs, options)
        assert sum(f.goal is not None for f in findings) == judged
        assert all("1,024 instances" in f.name for f in findings if f.goal is not None)


def test_a_run_that_is_not_there_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(UserError, match="is not a folder"):
        overhead.measure_overhead(overhead.Options(quick=True, run=tmp_path / "none", say=said.append))
    assert said == [f"the run {tmp_path / 'none'}"]


def test_the_goal_for_a_run_is_not_judged_by_the_short_one_of_quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("step", "handle", "route", "interrupt", "abort", "pull")
    folder = run_folder(tmp_path, **{f"coord/{name}_seconds": 0.1 for name in names})
    share = share_of_run(folder, steps=1)
    monkeypatch.setattr(overhead.run_share, "share_of_run", lambda *_, **__: share)
    for quick, run, judged in ((True, None, 0), (True, folder, 1), (False, None, 1)):
        findings = overhead._run(overhead.Options(quick=quick, run=run, say=print))
        assert sum(f.goal is not None for f in findings) == judged
