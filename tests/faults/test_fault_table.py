"""The table of faults is complete, and the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

FAULTS = {
    1, 2, 3, 4, 5, 6, 8, 9, 11, 12, 13, 14, 15, 16, 17, 19, 20, 21, 23, 24, 25, 26, 27, 29, 30, 32, 33, 35,
    36, 37, 39, 41,
}  # fmt: skip
HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def test_every_fault_has_a_row_and_every_named_test_exists() -> None:
    table = (HERE / "README.md").read_text()
    rows = re.findall(r"^\| F(\d+) \| ([^|]+) \| ([^|]+) \|$", table, flags=re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == sorted(FAULTS)
    for number, scenario, tests in rows:
        assert len(scenario.split()) <= 6, f"F{number}: {scenario}"
        named = re.findall(r"`(\S+\.py)::(test_\w+)`", tests)
        assert len(named) == tests.count("`") / 2 > 0, f"F{number}"
        for path, name in named:
            assert f"\ndef {name}(" in (ROOT / path).read_text(), f"F{number}: {path}::{name}"
