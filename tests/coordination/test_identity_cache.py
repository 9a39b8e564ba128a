"""Values are worked out anew where the source is another object, and only there."""

from __future__ import annotations

import random

from staleflow.coordination.speculative import IdentityCache


class Source:
    """Equal to every other one: only identity tells them apart."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_only_what_changed_is_worked_out() -> None:
    kept: IdentityCache[Source, int] = IdentityCache()
    seen: list[int] = []

    def doubled(source: Source) -> int:
        seen.append(source.number)
        return 2 * source.number

    sources = {"a": Source(1), "b": Source(2), "c": Source(3)}
    assert kept.of(sources, doubled) == {"a": 2, "b": 4, "c": 6}
    assert kept.of(sources, doubled) == {"a": 2, "b": 4, "c": 6}
    assert seen == [1, 2, 3]
    sources["b"] = Source(5)
    assert kept.of(sources, doubled) == {"a": 2, "b": 10, "c": 6}
    assert seen == [1, 2, 3, 5]
    kept.of(sources, doubled, basis="another")
    assert seen == [1, 2, 3, 5, 1, 5, 3]


def test_instances_come_leave_and_come_back_in_another_place() -> None:
    rng = random.Random(0)
    kept: IdentityCache[Source, int] = IdentityCache()
    sources: dict[str, Source] = {}
    for _ in range(3000):
        name = f"i{rng.randrange(6)}"
        draw = rng.random()
        if draw < 0.3:
            sources.pop(name, None)
        elif draw < 0.6:
            sources.pop(name, None)
            sources[name] = Source(rng.randrange(100))  # at the end now
        elif name in sources:
            sources[name] = Source(rng.randrange(100))
        if rng.random() < 0.5:
            found = kept.of(sources, lambda source: source.number)
            assert list(found.items()) == [(name, source.number) for name, source in sources.items()]
