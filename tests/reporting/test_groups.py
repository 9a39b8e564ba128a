"""Which runs are one row of a comparison, and what the rows are called."""

from __future__ import annotations

from pathlib import Path

from small_runs import STEPS, run_of

from staleflow.reporting.groups import RunGroup, group_runs
from staleflow.reporting.load import RunData
from staleflow.reporting.spread import Spread, spread


def run(folder: Path, name: str, seed: int, **keys: object) -> RunData:
    sections = "".join(f"{key.replace('__', ': {')}: {value}}}\n" for key, value in keys.items())
    config = f"run: {{name: '{name}', seed: {seed}, output_dir: '{folder}'}}\n{sections}"
    return run_of(folder / f"{name}-{seed}", *STEPS, config=config)


def labels(groups: list[RunGroup]) -> list[tuple[str, int]]:
    return [(group.label, len(group.runs)) for group in groups]


def test_runs_that_differ_in_the_seed_alone_are_one_group(tmp_path: Path) -> None:
    runs = [
        run(tmp_path, f"{policy}{seed}", seed, coordination__policy=policy, telemetry__console=f"c{seed}")
        for seed in (0, 1, 2)
        for policy in ("sync", "staleflow")
    ]
    groups = group_runs(runs)
    assert labels(groups) == [("sync", 3), ("staleflow", 3)]
    assert [r.name for r in groups[0].runs] == ["sync0", "sync1", "sync2"]
    assert [group.keys for group in groups] == [
        {"coordination.policy": "sync"},
        {"coordination.policy": "staleflow"},
    ]


def test_a_label_has_every_key_that_differs(tmp_path: Path) -> None:
    runs = [
        run(tmp_path, f"r{bound}{rate}{seed}", seed, staleness__bound=bound, training__learning_rate=rate)
        for bound in (0, 1)
        for rate in (0.1, 0.2)
        for seed in (0, 1)
    ]
    assert [label for label, _ in labels(group_runs(runs))] == [
        "η=0, learning_rate=0.1",
        "η=0, learning_rate=0.2",
        "η=1, learning_rate=0.1",
        "η=1, learning_rate=0.2",
    ]


def test_groups_that_differ_in_many_keys_go_by_a_run_s_name(tmp_path: Path) -> None:
    first = [run(tmp_path, f"old,seed={s}", s, data__n=1) for s in (0, 1)]
    other = {"data__n": 2, "model__a": 1, "rollout__b": 1, "reward__c": 1}
    second = [run(tmp_path, f"new,seed={s}", s, **other) for s in (0, 1)]
    assert labels(group_runs([*first, *second])) == [("old", 2), ("new", 2)]


def test_without_siblings_runs_keep_their_names(tmp_path: Path) -> None:
    runs = [run(tmp_path, f"run{bound}", bound, staleness__bound=bound) for bound in (0, 1)]
    assert labels(group_runs(runs)) == [("run0", 1), ("run1", 1)]


def test_one_run_given_twice_is_two_rows(tmp_path: Path) -> None:
    one = run(tmp_path, "a", 0)
    assert labels(group_runs([one, one])) == [("a", 1), ("a", 1)]


def test_runs_without_a_config_are_never_taken_for_siblings(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / name, *STEPS) for name in ("a", "b")]
    assert labels(group_runs(runs)) == [("a", 1), ("b", 1)]


def test_the_verdict_is_that_of_the_medians_and_dissent_is_told(tmp_path: Path) -> None:
    """Two seeds wait 60 % for rewards, one 60 % for instances at work."""
    runs = []
    for seed, cause in enumerate(("reward", "rollout", "reward")):
        step = {
            "kind": "train",
            "train/step": 0,
            "time/step_s": 10.0,
            "time/instances_s": 10.0,
            "time/instances_idle_s": 0.0,
            "time/trainer_waiting_s": 6.0,
            "time/waiting/reward_s": 0.0,
            f"time/waiting/{cause}_s": 6.0,
        }
        runs.append(
            run_of(tmp_path / str(seed), step, config=f"run: {{seed: {seed}}}\nreward: {{workers: 1}}")
        )
    (group,) = group_runs(runs)
    assert group.verdict.kind == "reward-bound"
    assert group.dissent == "by seed: reward-bound 2 of 3, rollout-bound 1 of 3"
    assert group.remark == f"{group.dissent}; only 1 step: start-up and end distort the shares"


def test_an_inline_run_s_verdict_says_that_its_clock_is_virtual(tmp_path: Path) -> None:
    inline = run_of(tmp_path / "a", *STEPS, config="cluster: {runtime: inline}")
    (group,) = group_runs([inline])
    assert group.remark.endswith("times of an inline run's virtual clock, not of this machine")
    assert not group.resources.one_machine


def test_spread_is_the_median_and_the_ends_of_what_was_measured() -> None:
    assert spread([3.0, None, 1.0, 10.0]) == Spread(median=3.0, least=1.0, most=10.0)
    assert spread([None, None]) is None
