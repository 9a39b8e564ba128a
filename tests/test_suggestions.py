"""What is suggested for a mistyped name, and that nothing is suggested for an unrelated one."""

from __future__ import annotations

import pytest

from staleflow.suggestions import did_you_mean, likeness


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("waterfal", "did you mean waterfall?"),
        ("WATERFALL", "did you mean waterfall?"),
        ("eat", "did you mean eta?"),
        ("zebra", ""),
        ("", ""),
    ],
)
def test_the_closest_known_name_is_suggested(name: str, expected: str) -> None:
    assert did_you_mean(name, ["naive", "waterfall", "eta"]) == expected


def test_without_known_names_there_is_no_suggestion() -> None:
    assert did_you_mean("naive", []) == ""


def test_likeness_is_twice_the_common_letters_over_all_letters() -> None:
    assert likeness("abcd", "bcde") == pytest.approx(2 * 3 / 8)
    assert likeness("Same", "sAME") == 1.0
    assert likeness("abc", "xyz") == 0.0
