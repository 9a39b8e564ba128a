"""Rows of the cache joining, leaving and growing."""

from __future__ import annotations

import torch

from staleflow.rollout.torch.kv_cache import RowCache


def write(cache: RowCache, rows: list[int], starts: list[int], values: list[list[float]]) -> torch.Tensor:
    """Write `values` (one list per row) as keys of one head of size 1; returns the keys read."""
    cache.aim(rows, starts, [len(v) for v in values])
    longest = max(len(v) for v in values)
    states = torch.tensor([v + [99.0] * (longest - len(v)) for v in values], dtype=torch.float32)
    states = states[:, None, :, None]
    keys, read = cache.update(states, -states, 0)
    assert torch.equal(keys, -read)
    return keys[:, 0, :, 0]


def test_rows_have_lengths_of_their_own() -> None:
    cache = RowCache(torch.device("cpu"))
    cache.join(["a", "b"])
    write(cache, [0, 1], [0, 0], [[1, 2, 3], [10]])
    keys = write(cache, [0, 1], [3, 1], [[4], [11]])
    assert keys[0].tolist() == [1, 2, 3, 4]
    assert keys[1, :2].tolist() == [10, 11]


def test_the_last_row_closes_a_gap_and_keeps_its_tokens() -> None:
    cache = RowCache(torch.device("cpu"))
    cache.join("abc")
    write(cache, [0, 1, 2], [0, 0, 0], [[1, 2], [3], [5, 6, 7]])
    cache.leave(["a"])
    assert (cache.row("c"), cache.row("b")) == (0, 1)
    keys = write(cache, [0, 1], [3, 1], [[8], [4]])
    assert keys[0].tolist() == [5, 6, 7, 8]
    assert keys[1, :2].tolist() == [3, 4]
    cache.leave(["b", "c"])
    cache.join("d")
    assert cache.row("d") == 0


def test_decode_reads_a_view_and_storage_grows_seldom() -> None:
    cache = RowCache(torch.device("cpu"))
    cache.join("ab")
    addresses = set()
    for i in range(1000):
        cache.aim([0, 1], [i, i], [1, 1])
        keys, _ = cache.update(torch.full((2, 1, 1, 1), float(i)), torch.zeros(2, 1, 1, 1), 0)
        addresses.add(keys.data_ptr())
    assert keys[0, 0, :, 0].tolist() == list(range(1000))
    assert len(addresses) <= 5  # 64, 128, 256, 512 and 1024 columns


def test_columns_never_written_hold_finite_numbers() -> None:
    cache = RowCache(torch.device("cpu"))
    cache.join("ab")
    keys = write(cache, [0, 1], [0, 40], [[1], [2]])
    assert torch.isfinite(keys).all()
