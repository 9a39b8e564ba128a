"""Random clusters with surplus members, spare groups and a rule for stragglers, all at once."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from test_control_cluster import World

from staleflow.audit import audit_ledger
from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.migration import NaiveMigration
from staleflow.coordination.policies import PolicySettings, build_coordinator
from staleflow.coordination.routing import NaiveRouting, has_room
from staleflow.coordination.speculative import SpeculativeState
from staleflow.coordination.stragglers import StragglerAction, StragglerRule
from staleflow.coordination.synchronization import NaiveSynchronization
from staleflow.protocol.records import LastBatch, Promote, Record, Release, Reserve, Swap, from_json


class GreedySpares(NaiveRouting):
    """Fills every spare place as soon as any instance has room, firm places left or not: the worst case."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)

    def route(self, state: SpeculativeState) -> None:
        """In some cycles spares, in the others as the naive one."""
        if self._rng.random() < 0.5:
            self._spares(state)
        else:
            super().route(state)

    def _spares(self, state: SpeculativeState) -> None:
        for item in list(state.snapshot.pending.level(None))[: state.snapshot.spares_free]:
            for name, instance in state.instances.items():
                if state.group_version(item) is None and has_room(instance, item.length, 10):
                    state.route(item, name, "a spare", spare=True)
                    break


def cluster(seed: int, folder: Path, *, routing: str = "greedy", **settings: object) -> World:
    coordinator = (
        build_coordinator("staleflow", PolicySettings())
        if routing == "staleflow"
        else Coordinator(
            routing=GreedySpares(seed), synchronization=NaiveSynchronization(), migration=NaiveMigration()
        )
    )
    return World(seed, folder, coordinator=coordinator, **settings)  # type: ignore[arg-type]


def records(world: World) -> list[Record]:
    return [from_json(line)[2] for line in world.lines]


@pytest.mark.parametrize("routing", ["greedy", "staleflow"])
@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("action", ["wait", "retry", "truncate"])
def test_every_invariant_holds_with_all_kinds_of_redundancy(
    routing: str, bound: int, action: StragglerAction, tmp_path: Path
) -> None:
    """F2, F3, F15, F25: the bound, no hang, batches of full groups, and nothing left behind at the end."""
    kinds: Counter[type[Record]] = Counter()
    straggled = 0
    for seed in range(12):
        world = cluster(
            seed,
            tmp_path,
            routing=routing,
            bound=bound,
            spares=seed % 4,
            surplus=seed % 3,
            rule=StragglerRule(action=action, at_most=2),
            trouble=0.2 * (seed % 2),
            same_reward=0.2 * (seed % 3),
        )
        report = audit_ledger(world.run())
        assert report.violations == ()
        assert world.finish == "completed"
        assert report.trajectories == world.steps * world.batch_size * world.group_size
        kinds.update(map(type, records(world)))
        straggled += len(world.straggled)
    if bound:
        assert kinds[Promote] > 0
    assert kinds[Swap] > 0
    assert (straggled > 0) == (action != "wait")


@pytest.mark.parametrize("last_batch", ["train", "drop", "pad"])
@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("trouble", [0.0, 0.2])
def test_spares_neither_lose_nor_repeat_a_prompt(
    last_batch: LastBatch, bound: int, trouble: float, tmp_path: Path
) -> None:
    """F17, F19: 27 prompts in batches of 4, with three spares that come and go: each is trained once."""
    expired = 0
    for seed in range(8):
        world = cluster(
            seed,
            tmp_path,
            bound=bound,
            batch_size=4,
            prompts=27,
            steps=50,
            spares=3,
            surplus=1,
            last_batch=last_batch,
            trouble=trouble,
        )
        assert audit_ledger(world.run()).violations == ()
        assert world.finish == "exhausted"
        uses = Counter(group.rpartition("-a")[0] for group in world.trained_groups)
        failed = sum(isinstance(r, Release) and r.reason in ("filtered", "failed") for r in records(world))
        left = 27 - failed
        expected = {"train": left, "drop": left // 4 * 4, "pad": -(-left // 4) * 4}[last_batch]
        assert uses.total() == expected
        assert set(uses.values()) == {1}
        assert sum(use.startswith("e0") for use in uses) == min(left, expected)
        expired += sum(isinstance(r, Release) and r.reason == "expired" for r in records(world))
    assert expired > 0


def test_no_more_spares_are_reserved_than_allowed_and_none_without_the_setting(tmp_path: Path) -> None:
    for seed in range(10):
        world = cluster(seed, tmp_path, spares=0)
        world.run()
        assert not any(isinstance(r, Reserve) and r.spare for r in records(world))
        assert not any(isinstance(r, Promote | Swap) for r in records(world))
