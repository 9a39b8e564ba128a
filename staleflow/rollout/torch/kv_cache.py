"""A key-value cache whose rows have individual lengths, so that trajectories join and leave at any step.

Invariants:

- rows 0 to n-1 are in use, without gaps: a decode step reads one view of them and copies nothing;
- a row's tokens occupy columns 0 to length-1; the caller's mask excludes later columns, which hold finite
  numbers so that a zero attention weight does not produce NaN;
- a step writes the new column of each row in place. Storage grows by doubling; when a row leaves, the
  last row moves into its place, which copies that one row.

It is a transformers `Cache`: models call `update` on it layer by layer. Before each forward pass, `aim` sets
the rows and columns that the pass writes; masks are explicit and four-dimensional, so models use them as is.
Storage is rows × columns of the longest row, so it may exceed the tokens accounted for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_ROUNDING = 64
"""Columns are allocated in multiples of this, so that small batches do not reallocate at each step."""


@dataclass(slots=True)
class Aim:
    """Rows and columns that the next forward pass writes, and how far it reads."""

    rows: torch.Tensor
    """Rows, shape (m, 1)."""
    columns: torch.Tensor
    """Columns, shape (m, q)."""
    width: int
    """Columns read."""
    leading: int | None
    """m when the rows are exactly 0 to m-1 (they are read as a view), else None."""
    room_rows: int
    """Rows allocated."""
    room_columns: int
    """Columns allocated."""


class RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one attention layer, shape (rows, heads, columns, head size)."""

    def __init__(self, aim: Aim) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._aim = aim

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate storage for the shapes of the model's first states."""
        self.keys = self._grown(None, key_states)
        self.values = self._grown(None, value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new states, shape (m, heads, q, head size), where aimed; return all to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = keys = self._grown(self.keys, key_states)
        self.values = values = self._grown(self.values, value_states)
        aim = self._aim
        keys[aim.rows, :, aim.columns] = key_states.transpose(1, 2)
        values[aim.rows, :, aim.columns] = value_states.transpose(1, 2)
        rows = slice(aim.leading) if aim.leading is not None else aim.rows.squeeze(1)
        return keys[rows, :, : aim.width], values[rows, :, : aim.width]

    def move(self, source: int, target: int, columns: int) -> None:
        """Copy the first `columns` columns of one row over another row."""
        for stored in (self.keys, self.values):
            if stored is not None:
                stored[target, :, :columns] = stored[source, :, :columns]

    def _grown(self, stored: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
        rows, columns = self._aim.room_rows, self._aim.room_columns
        if stored is not None and stored.shape[0] >= rows and stored.shape[2] >= columns:
            return stored
        grown = states.new_zeros(rows, states.shape[1], columns, states.shape[3])
        if stored is not None:
            grown[: stored.shape[0], :, : stored.shape[2]] = stored
        return grown

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns read, first column); not used by models if the mask is four-dimensional."""
        return self._aim.width, 0

    def get_seq_length(self) -> int:
        """Columns read; not used by models if positions are given."""
        return self._aim.width

    def get_max_length(self) -> int:
        """-1: unlimited."""
        return -1


class RowCache(Cache):
    """One `RowLayer` per attention layer, and the map from trajectory ids to rows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._aim = Aim(
            rows=torch.zeros(0, 1, dtype=torch.long, device=device),
            columns=torch.zeros(0, 1, dtype=torch.long, device=device),
            width=0,
            leading=0,
            room_rows=0,
            room_columns=0,
        )
        self._ids: list[str] = []
        self._row: dict[str, int] = {}
        self._length: list[int] = []
        self._row_layers: list[RowLayer] = []
        # Layers are added when the model first updates them, so the cache need not know their number.
        super().__init__(layer_class_to_replicate=self._new_layer)  # type: ignore[arg-type]

    def _new_layer(self) -> RowLayer:
        self._row_layers.append(RowLayer(self._aim))
        return self._row_layers[-1]

    @property
    def width(self) -> int:
        """Columns that the next pass reads."""
        return self._aim.width

    def row(self, trajectory_id: str) -> int:
        """Row of a trajectory."""
        return self._row[trajectory_id]

    def join(self, trajectory_ids: Iterable[str]) -> None:
        """Assign an empty row to each."""
        for trajectory_id in trajectory_ids:
            self._row[trajectory_id] = len(self._ids)
            self._ids.append(trajectory_id)
            self._length.append(0)
        self._aim.room_rows = _room(self._aim.room_rows, len(self._ids), unit=1)

    def leave(self, trajectory_ids: Iterable[str]) -> None:
        """Free the rows, and close the gaps."""
        for trajectory_id in trajectory_ids:
            gap, last = self._row.pop(trajectory_id), len(self._ids) - 1
            if gap != last:
                for layer in self._row_layers:
                    layer.move(last, gap, self._length[last])
                self._ids[gap], self._length[gap] = self._ids[last], self._length[last]
                self._row[self._ids[gap]] = gap
            self._ids.pop()
            self._length.pop()

    def aim(self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
        """Make the next pass write `counts[i]` tokens to row `rows[i]` from column `starts[i]` on.

        Returns the columns, shape (m, q), where q is the largest count. In a row with fewer tokens, padding
        goes to the columns after its own, which later passes overwrite before reading them.
        """
        longest = max(counts)
        start = torch.tensor(starts, dtype=torch.long, device=self._device).unsqueeze(1)
        aim = self._aim
        aim.rows = torch.tensor(rows, dtype=torch.long, device=self._device).unsqueeze(1)
        aim.columns = start + torch.arange(longest, device=self._device)
        aim.width = max(starts) + longest
        aim.leading = len(rows) if list(rows) == list(range(len(rows))) else None
        aim.room_columns = _room(aim.room_columns, aim.width, unit=_ROUNDING)
        for row, begin, count in zip(rows, starts, counts, strict=True):
            self._length[row] = begin + count
        return aim.columns


def _room(room: int, needed: int, *, unit: int) -> int:
    """`room` if it suffices, else at least twice as much, in multiples of `unit`."""
    if needed <= room:
        return room
    return -(-max(needed, 2 * room) // unit) * unit
