"""What is worked out for each instance, kept for as long as what it was worked out from is the same object.

That is sound where a changed instance has a new object: views, and speculative states, which nobody changes
but the cycle that has copied them. Finding out what changed takes no more than a look at each object, so a
cycle costs what changed, however many instances there are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from itertools import compress
from operator import is_not
from typing import Generic, TypeVar

Source = TypeVar("Source")
Value = TypeVar("Value")


class Kept(Generic[Source, Value]):
    """One value for each instance by name, in the order of the sources."""

    def __init__(self) -> None:
        self._basis: Hashable = None
        self._sources: dict[str, Source] = {}
        self._values: dict[str, Value] = {}

    def of(
        self, sources: Mapping[str, Source], work_out: Callable[[Source], Value], basis: Hashable = None
    ) -> dict[str, Value]:
        """The values of all instances; to be read, and good until the next call.

        `basis`: whatever `work_out` depends on beside the source.
        """
        known, values = self._sources, self._values
        changed = list(compress(sources, map(is_not, sources.values(), known.values())))
        if basis != self._basis or len(sources) != len(known) or (changed and [*sources] != [*known]):
            self._basis = basis
            known.clear()
            values.clear()
            changed = list(sources)
        for name in changed:
            known[name] = source = sources[name]
            values[name] = work_out(source)
        return values
