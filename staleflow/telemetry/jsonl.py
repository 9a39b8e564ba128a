"""metrics.jsonl: one JSON object a line, appended and flushed row by row.

- Nothing written before is overwritten: a resumed run goes on in the same file.
- Every line is valid JSON: NaN and infinity, which JSON does not know, become null.
- A name that the catalogue does not know is recorded, and a warning says so.
- A line torn by a kill stays alone: the next attempt starts on a line of its own.
"""

from __future__ import annotations

import json
import math
import numbers
import os
from pathlib import Path
from typing import Any

from staleflow.telemetry.catalogue import check_names
from staleflow.telemetry.rows import Row


class JsonlSink:
    """Appends rows to `path`; creates the file, not its folder."""

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        torn = _ends_mid_line(path)
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def write(self, row: Row) -> None:
        """Append one line and flush it to the operating system, so that a killed process loses nothing."""
        self._file.write(row_to_json(row) + "\n")
        self._file.flush()
        check_names(row)

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()


def row_to_json(row: Row) -> str:
    """Return the line, without its line end: `{"kind": ..., "time": ..., **values}`."""
    line = {"kind": row.kind, "time": row.time, **row.values}
    return json.dumps(
        {key: _plain(value) for key, value in line.items()}, allow_nan=False, ensure_ascii=False
    )


def _plain(value: Any) -> Any:
    """Turn NumPy's numbers into Python's, and what is not finite into None."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def _ends_mid_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
