"""The table of a comparison."""

from __future__ import annotations

from pathlib import Path

from small_runs import STEPS, run_of

from staleflow.reporting.comparison import DROPPED, compare
from staleflow.reporting.groups import RunGroup, group_runs


def dropped(groups: list[RunGroup]) -> list[tuple[str, list[str]]]:
    lines = [line for line in compare(groups) if line.figure.section == DROPPED]
    return [(line.figure.title, [cell.text for cell in line.cells]) for line in lines]


def test_what_was_dropped_or_cut_is_told_where_any_run_has_some(tmp_path: Path) -> None:
    waits = run_of(tmp_path / "a", {**STEPS[1], "rollout/straggler_retried": 0, "rollout/filtered_groups": 0})
    retries = run_of(
        tmp_path / "b", {**STEPS[1], "rollout/straggler_retried": 2, "rollout/filtered_groups": 0}
    )
    assert dropped(group_runs([waits, retries])) == [("stragglers sampled anew", ["0", "2"])]
    assert dropped(group_runs([waits])) == []
