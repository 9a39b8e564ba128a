"""For faults that show only in a whole: the runs of tests/runtime, the clusters of tests/properties."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for folder in ("runtime", "properties"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))

from toy import make_model_folder  # noqa: E402


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy model, made once."""
    return make_model_folder(tmp_path_factory.mktemp("faults") / "model")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs and killed processes: all of this folder is slow."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)
