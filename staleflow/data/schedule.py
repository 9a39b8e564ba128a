"""The order in which the prompts of a data set are used, and how often.

Invariants:

- every epoch yields each index at most once, and exactly once counting those in `used`: nothing is skipped
  or repeated, even after interruptions;
- the order of an epoch is a function of (seed, epoch) alone, so that a resumed run continues in the same
  order, unfinished prompts first;
- with `epochs` set, exactly `epochs * n` uses are yielded over all attempts of a run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

from staleflow.errors import ConfigError, DataError


class PromptSchedule:
    """Iterator of `(epoch, index)` over a data set of `n` prompts.

    `epochs`: None is unlimited. `used`: per epoch, the indices already trained or filtered out; they exclude
    work that was in flight when a run stopped, which therefore comes again, before later prompts.
    """

    def __init__(
        self,
        n: int,
        *,
        epochs: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        used: Mapping[int, AbstractSet[int]] | None = None,
    ) -> None:
        """Raises DataError for an empty data set."""
        if n < 1:
            raise DataError("The data set is empty; it needs at least one prompt.")
        self._n = n
        self._epochs = epochs
        self._seed = seed
        self._shuffle = shuffle
        self._used = {epoch: frozenset(indices) for epoch, indices in (used or {}).items()}
        self._uses = self._generate()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self

    def __next__(self) -> tuple[int, int]:
        return next(self._uses)

    def order(self, epoch: int) -> list[int]:
        """All indices in the order of an epoch, used or not."""
        order = list(range(self._n))
        if self._shuffle:
            random.Random(f"{self._seed}-epoch-{epoch}").shuffle(order)
        return order

    def _generate(self) -> Iterator[tuple[int, int]]:
        epoch = 0
        while self._epochs is None or epoch < self._epochs:
            used = self._used.get(epoch, frozenset())
            if len(used) < self._n:
                yield from ((epoch, index) for index in self.order(epoch) if index not in used)
            epoch += 1


def check_batch_size(batch_size: int, n: int, *, epochs: int | None) -> None:
    """Refuse a batch that the data set cannot fill. Raises ConfigError.

    A batch may contain prompts of two successive epochs; but a batch larger than the data set would train a
    prompt twice in one step.
    """
    if batch_size > n:
        total = "" if epochs is None else f" (epochs: {epochs})"
        raise ConfigError(
            f"data.batch_size is {batch_size}, but the data set has only {n} prompts{total}; use at most {n}."
        )
