"""The study of convergence: curves of known runs, verdicts by hand, and no finished run is made again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from staleflow.config import load_config
from staleflow.errors import RunFailed, UserError
from staleflow.experiments import convergence
from staleflow.experiments.convergence import Sweep, make_runs, read_runs, summarise
from staleflow.experiments.convergence_figure import convergence_figure
from staleflow.experiments.curves import CurveSetting, RunCurves, band, read_run, settings, smoothed
from staleflow.experiments.study import Options
from staleflow.experiments.verdicts import PAPER, judge, outcome
from staleflow.protocol.records import End, EndReason, Start
from staleflow.storage import LedgerWriter

pytestmark = pytest.mark.slow

SMALL = Sweep(
    name="s", bounds=(0, 3), rates=(1.5e-4,), seeds=(0, 1), steps=2, overrides=("data.batch_size=2",)
)


def lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_folder(
    folder: Path,
    *overrides: str,
    accuracies: Mapping[int, float],
    staleness: Sequence[float] = (0.0, 1.0),
    reason: EndReason = "completed",
) -> Path:
    """A finished run: one training step for each of `staleness`; 3 groups filtered for every 2 trained on."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(load_config([], overrides).to_yaml(), encoding="utf-8")
    train = [
        {
            "kind": "train",
            "train/step": step,
            "staleness/mean": mean,
            "staleness/max": step,
            "rollout/groups": 2,
            "rollout/filtered_groups": 3,
        }
        for step, mean in enumerate(staleness)
    ]
    evals = [
        {"kind": "eval", "eval/weight_version": v, "eval/heldout/avg@1": a} for v, a in accuracies.items()
    ]
    lines(folder / "metrics.jsonl", [*train, *evals, {"kind": "summary", "run/reason": reason}])
    scores = [
        {"t": 0.0, "k": "score", "id": "x", "raw": raw, "st": "ok"} for raw in (1.0, 0.0, 0.0, 0.0, 1.0)
    ]
    trained = [{"t": 0.0, "k": "trained", "step": step} for step in range(2)]
    begin = {"t": 0.0, "k": "begin", "a": 0, "step": 0, "wall": 0.0}
    lines(folder / "journal.jsonl", [begin, *scores[:4], trained[0], scores[4], trained[1]])
    with LedgerWriter(folder / "ledger.jsonl") as writer:
        start = Start(bound=3, batch_size=2, group_size=8, last_batch="train", spare_limit=0)
        writer.append(start, 0, 0)
        writer.append(End(steps=0, reason=reason), 1, 0)
    return folder


def sweep_folder(output: Path, sweep: Sweep) -> list[Path]:
    """Its runs, finished, as `staleflow sweep` would have left them."""
    return [
        run_folder(
            output / part.name / f"eta={bound},learning_rate=0.00015,seed={seed}",
            *part.overrides,
            f"run.steps={part.steps}",
            f"staleness.bound={bound}",
            f"run.seed={seed}",
            "training.learning_rate=1.5e-4",
            accuracies={0: 0.4, 2: 0.5 + 0.1 * seed},
        )
        for part in sweep.parts()
        for bound in part.bounds
        for seed in part.seeds
    ]


def run(bound: int, seed: int, accuracy: Mapping[int, float], **other: Any) -> RunCurves:
    values: dict[str, Any] = {
        "folder": Path(f"eta={bound},seed={seed}"),
        "rate": 1e-4,
        "steps": max(accuracy),
        "reason": "completed",
        "reward": {0: 0.4, 1: 0.5},
        "staleness": {0: 0.0, 1: float(min(1, bound))},
        "worst_staleness": min(1, bound),
        "filtered": 0.5,
        "violations": 0,
        "attempts": 1,
    }
    return RunCurves(**{**values, "bound": bound, "seed": seed, "accuracy": accuracy, **other})


def setting(bound: int, *accuracies: float) -> CurveSetting:
    """One seed, evaluated every 10 steps."""
    curve = {10 * i: accuracy for i, accuracy in enumerate(accuracies)}
    return CurveSetting(bound=bound, rate=1e-4, runs=(run(bound, 0, curve),))


# ---------------------------------------------------------------------- curves


def test_a_run_is_read_from_its_own_files(tmp_path: Path) -> None:
    folder = run_folder(
        tmp_path / "r",
        *("staleness.bound=3", "training.learning_rate=3e-4", "run.seed=7"),
        accuracies={0: 0.25, 2: 0.5},
    )
    read = read_run(folder)
    assert (read.bound, read.rate, read.seed, read.steps) == (3, 3e-4, 7, 2)
    assert (read.start, read.end) == (0.25, 0.5)
    assert read.staleness == {0: 0.0, 1: 1.0}
    assert read.worst_staleness == 1
    assert read.filtered == 1.5
    assert (read.violations, read.attempts, read.reason) == (0, 1, "completed")


def test_the_reward_of_a_step_is_of_everything_scored_since_the_one_before(tmp_path: Path) -> None:
    assert read_run(run_folder(tmp_path / "r", accuracies={0: 0.4})).reward == {0: 0.25, 1: 1.0}


def test_what_an_interrupted_attempt_scored_does_not_count_for_the_step_trained_again(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "r", accuracies={0: 0.4})
    again = {"t": 0.0, "k": "begin", "a": 1, "step": 1, "wall": 0.0}
    scores = [{"t": 0.0, "k": "score", "id": "x", "raw": raw, "st": "ok"} for raw in (0.0, 1.0)]
    with (folder / "journal.jsonl").open("a", encoding="utf-8") as file:
        for line in (scores[0], again, *scores, {"t": 0.0, "k": "trained", "step": 1}):
            file.write(json.dumps(line) + "\n")
    assert read_run(folder).reward == {0: 0.25, 1: 0.5}


def test_a_lost_ledger_is_a_violation_of_that_run(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "r", accuracies={0: 0.4})
    (folder / "ledger.jsonl").unlink()
    assert read_run(folder).violations == 1


@pytest.mark.parametrize("reason", ["interrupted", None])
def test_a_run_that_did_not_end_by_itself_is_refused(tmp_path: Path, reason: EndReason | None) -> None:
    folder = run_folder(tmp_path / "r", accuracies={0: 0.4}, reason=reason or "completed")
    if reason is None:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
        (folder / "metrics.jsonl").write_text(text.rpartition('{"kind": "summary"')[0], encoding="utf-8")
    with pytest.raises(RunFailed, match="ended with"):
        read_run(folder)


def test_a_band_is_median_least_and_most_at_every_x() -> None:
    shown = band([{0: 0.5, 5: 0.1}, {0: 0.3, 5: 0.9}, {0: 0.4}])
    assert shown.xs == (0, 5)
    assert shown.median == pytest.approx((0.4, 0.5))
    assert shown.least == (0.3, 0.1)
    assert shown.most == (0.5, 0.9)


def test_smoothing_looks_back_only() -> None:
    assert smoothed({0: 1.0, 1: 0.0, 2: 0.5, 4: 1.0}, 2) == {0: 1.0, 1: 0.5, 2: 0.25, 4: 0.75}


def test_a_run_that_ended_early_keeps_its_last_accuracy_in_the_band() -> None:
    runs = (run(10, 0, {0: 0.4, 10: 0.1}), run(10, 1, {0: 0.4, 10: 0.3, 20: 0.5}))
    assert CurveSetting(bound=10, rate=1e-4, runs=runs).accuracy.least == (0.4, 0.1, 0.1)


def test_runs_are_put_together_by_learning_rate_then_bound_with_seeds_in_order() -> None:
    found = settings([run(3, 1, {0: 0.4}), run(0, 0, {0: 0.4}, rate=1e-3), run(3, 0, {0: 0.4})])
    assert [(s.rate, s.bound, [r.seed for r in s.runs]) for s in found] == [(1e-4, 3, [0, 1]), (1e-3, 0, [0])]


def test_staleness_of_a_span_is_the_mean_over_its_steps_and_runs() -> None:
    runs = (run(2, 0, {0: 0.4}, staleness={0: 0.0, 1: 1.0}), run(2, 1, {0: 0.4}, staleness={0: 0.0, 1: 2.0}))
    both = CurveSetting(bound=2, rate=1e-4, runs=runs)
    assert both.staleness(1, 1) == 1.5
    assert both.staleness(0, 9) == 0.75
    assert both.staleness(2, 9) is None


def test_the_figure_has_a_row_for_each_learning_rate_and_is_the_same_every_time() -> None:
    shown = settings([run(b, 0, {0: 0.4, 2: 0.5}, rate=r) for b in (0, 10) for r in (1e-4, 3e-4)])
    figure = convergence_figure(shown)
    assert "learning rate 0.0001" in figure
    assert "learning rate 0.0003" in figure
    assert "η = 10" in figure
    assert figure == convergence_figure(shown)


# ---------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ((0.4, 0.7, 0.86), "like synchronous"),  # 0.04 below
        ((0.4, 0.7, 0.84), "falls behind"),  # 0.06 below
        ((0.4, 0.21, 0.84), "falls behind"),  # a dip, but not below half
        ((0.4, 0.19, 0.9), "collapses"),  # and comes back
        ((0.4, 0.3, 0.1), "collapses"),
    ],
)
def test_outcomes(accuracies: tuple[float, ...], expected: str) -> None:
    assert outcome(setting(2, *accuracies), setting(0, 0.4, 0.8, 0.9)) == expected


def test_one_seed_of_three_that_collapses_does_not_make_the_median_collapse() -> None:
    curves = ({0: 0.4, 10: 0.1}, {0: 0.4, 10: 0.9}, {0: 0.4, 10: 0.88})
    three = CurveSetting(bound=2, rate=1e-4, runs=tuple(run(2, i, curve) for i, curve in enumerate(curves)))
    assert outcome(three, setting(0, 0.4, 0.9)) == "like synchronous"


def test_the_verdict_names_the_bounds_that_do_not_do_what_the_paper_says() -> None:
    by_bound = {
        0: setting(0, 0.4, 0.8, 0.9),
        1: setting(1, 0.4, 0.8, 0.91),
        2: setting(2, 0.4, 0.12, 0.48),
        3: setting(3, 0.4, 0.5, 0.6),
        10: setting(10, 0.4, 0.1, 0.02),
    }
    converges, collapses = (judge(statement, by_bound) for statement in PAPER)
    assert converges.verdict == "disagrees"
    assert converges.reason == (
        "η = 2 collapses: 0.40 at first, 0.12 after 10 steps, 0.48 in the end; "
        "η = 3 falls behind and ends at 0.60; η = 0 ends at 0.90"
    )
    assert collapses.verdict == "agrees"
    assert collapses.reason == (
        "η = 10 collapses: 0.40 at first, 0.02 after 20 steps, 0.02 in the end; η = 0 ends at 0.90"
    )


def test_the_verdict_agrees_where_all_bounds_do_what_the_paper_says() -> None:
    by_bound = {b: setting(b, 0.4, 0.9 - 0.01 * b) for b in (0, 1, 2, 3)} | {10: setting(10, 0.4, 0.89)}
    converges, collapses = (judge(statement, by_bound) for statement in PAPER)
    assert converges.verdict == "agrees"
    assert (
        converges.reason == "η = 1 ends at 0.89; η = 2 ends at 0.88; η = 3 ends at 0.87; η = 0 ends at 0.90"
    )
    assert collapses.verdict == "disagrees"
    assert collapses.reason == "η = 10 ends at 0.89; η = 0 ends at 0.90"


def test_where_synchronous_training_learns_nothing_nothing_can_be_said() -> None:
    by_bound = {b: setting(b, 0.4, 0.43) for b in (0, 1, 2, 3, 10)}
    for statement in PAPER:
        assert judge(statement, by_bound).verdict == "cannot be said"
    assert judge(PAPER[1], {0: setting(0, 0.4, 0.9)}).reason == "there is no such run"


# ---------------------------------------------------------------------- runs


@pytest.mark.parametrize("together", [False, True])
def test_finished_runs_are_not_made_again(tmp_path: Path, together: bool) -> None:
    sweep = replace(SMALL, together=together)
    folders = sweep_folder(tmp_path, sweep)
    before = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders]
    said: list[str] = []
    make_runs(sweep, tmp_path, said.append)
    assert len([line for line in said if line.endswith("done already")]) == 4
    assert [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders] == before
    assert [(r.bound, r.seed, r.end) for r in read_runs(sweep, tmp_path)] == [
        *((0, 0, 0.5), (0, 1, 0.6)),
        *((3, 0, 0.5), (3, 1, 0.6)),
    ]


def test_finished_runs_of_another_config_are_not_taken_for_these(tmp_path: Path) -> None:
    sweep_folder(tmp_path, SMALL)
    said: list[str] = []
    with pytest.raises(UserError, match="name another --run"):
        make_runs(replace(SMALL, steps=5), tmp_path, said.append)
    assert any("had another run.steps (was 2, now 5)" in line for line in said)


def test_runs_that_may_be_made_together_are_split_by_learning_rate_and_seed() -> None:
    sweep = replace(SMALL, rates=(1e-4, 3e-4), together=True)
    parts = sweep.parts()
    assert [(p.rates, p.seeds) for p in parts] == [((r,), (s,)) for r in (1e-4, 3e-4) for s in (0, 1)]
    assert len({p.name for p in parts}) == 4
    assert replace(sweep, together=False).parts() == [replace(sweep, together=False)]


def test_a_run_that_is_missing_is_named(tmp_path: Path) -> None:
    folders = sweep_folder(tmp_path, SMALL)
    for path in folders[3].iterdir():
        path.unlink()
    with pytest.raises(RunFailed, match=r"missing in .*s: η = 3, learning rate 0.00015, seed 1; see"):
        read_runs(SMALL, tmp_path)


def test_the_page_judges_only_at_full_size_and_says_what_happened_to_runs() -> None:
    runs = [run(b, 0, {0: 0.4, 10: 0.9, 20: 0.9 - 0.03 * b}, rate=1.5e-4) for b in (0, 1, 2, 3)]
    runs.append(run(10, 0, {0: 0.4, 7: 0.1}, rate=1.5e-4, reason="filtered_out", attempts=2, violations=1))
    full, quick = (summarise((SMALL,), [runs], quick=quick) for quick in (False, True))
    assert [f.reached for f in full.findings] == [False, True, False, False, None]
    assert [f.reached for f in quick.findings] == [False, None, None, None, None]
    assert [row[2] for row in full.tables[0].rows] == ["disagrees", "agrees"]
    assert any("Ended early, because they only filtered: eta=10,seed=0 (7 steps)." in n for n in full.notes)
    assert any(n.startswith("Interrupted and resumed: eta=10,seed=0;") for n in full.notes)
    assert any(n.startswith("Quick") for n in quick.notes)


@pytest.mark.timeout(300)
def test_the_study_makes_audits_and_shows_real_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = (
        "data.batch_size=2",
        "data.group_size=4",
        "evaluation.prompts=4",
        "training.dynamic_sampling=false",
    )
    [quick] = convergence.QUICK
    sweep = replace(quick, bounds=(0,), seeds=(0,), steps=2, overrides=(*quick.overrides, *tiny))
    monkeypatch.setattr(convergence, "QUICK", (sweep,))
    said: list[str] = []
    result = convergence.measure_convergence(Options(quick=True, run=tmp_path, say=said.append))
    [made] = read_runs(sweep, tmp_path)
    assert (made.steps, made.violations, made.reason, made.worst_staleness) == (2, 0, "completed", 0)
    assert sorted(made.accuracy) == [0, 2]
    assert sorted(made.reward) == sorted(made.staleness) == [0, 1]
    assert [f.reached for f in result.findings] == [True]
    assert "η = 0" in result.figures["convergence.svg"]
    assert any(line.endswith("seed=0: done") for line in said)
