"""The toy runs of tests/runtime, for the faults that show only in a whole run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))

from toy import make_model_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy model, made once."""
    return make_model_folder(tmp_path_factory.mktemp("faults") / "model")
