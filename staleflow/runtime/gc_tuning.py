"""The heap of the process that coordinates: what lives long is looked through once by the garbage collector.

A large run keeps a million objects alive for minutes: trajectories, groups, what waits. They hold no cycles
and are freed by their reference counts, yet Python looks through all of them whenever their number has grown
by a quarter: most of a second, in the middle of a cycle. So once per training step, while the trainer has
work, what is new is collected and what is left of it is set aside (`gc.freeze`). The collector goes on as
ever over what has come since.

Invariant: garbage in cycles is found at the latest `THAW_EVERY` steps after it was set aside.
"""

from __future__ import annotations

import gc

THAW_EVERY = 100
"""Steps after which all is looked through once."""


class Heap:
    """Of this process."""

    def __init__(self) -> None:
        self._settled = 0

    def settle(self) -> None:
        """Collect what is new, and set aside what is left."""
        self._settled += 1
        if self._settled % THAW_EVERY == 0:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
