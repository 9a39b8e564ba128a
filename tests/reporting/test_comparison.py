"""The table of a comparison."""

from __future__ import annotations

from pathlib import Path

from small_runs import STEPS, run_of

from staleflow.reporting.comparison import DROPPED, compare
from staleflow.reporting.groups import RunGroup, group_runs
from staleflow.reporting.page import page


def dropped(groups: list[RunGroup]) -> list[tuple[str, list[str]]]:
    rows = [row for row in compare(groups) if row.measure.section == DROPPED]
    return [(row.measure.title, [cell.text for cell in row.cells]) for row in rows]


def test_what_was_dropped_or_truncated_is_a_row_if_any_run_has_some(tmp_path: Path) -> None:
    waits = run_of(tmp_path / "a", {**STEPS[1], "rollout/straggler_retried": 0, "rollout/filtered_groups": 0})
    retries = run_of(
        tmp_path / "b", {**STEPS[1], "rollout/straggler_retried": 2, "rollout/filtered_groups": 0}
    )
    assert dropped(group_runs([waits, retries])) == [("stragglers resampled", ["0", "2"])]
    assert dropped(group_runs([waits])) == []


def test_the_page_of_one_run_has_what_was_dropped_or_truncated(tmp_path: Path) -> None:
    told = {"rollout/filtered_groups": 3, "rollout/straggler_truncated": 2, "rollout/expired_groups": 0}
    text = page([run_of(tmp_path / "a", {**STEPS[1], **told})])
    assert text.count(DROPPED) == 1
    assert (
        "<tr><td>groups filtered</td><td>3</td></tr>\n<tr><td>stragglers truncated</td><td>2</td></tr>"
        in text
    )
    assert DROPPED not in page([run_of(tmp_path / "b", STEPS[1])])
    assert page([run_of(tmp_path / n, {**STEPS[1], **told}) for n in "cd"]).count(DROPPED) == 1
