"""Random clusters with surplus members, spare groups and a rule for stragglers, all at once."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_settings import ClusterSettings
from random_cluster import RandomCluster
from test_small_clusters import SMALL, TROUBLE, audited

from staleflow.coordination.coordinator import Coordinator, Decision
from staleflow.coordination.migration import NaiveMigration
from staleflow.coordination.policies import PolicySettings
from staleflow.coordination.routing import NaiveRouting, has_room
from staleflow.coordination.snapshot import Snapshot
from staleflow.coordination.speculative import SpeculativeState
from staleflow.coordination.stragglers import StragglerAction, StragglerRule
from staleflow.coordination.synchronization import NaiveSynchronization
from staleflow.protocol.records import LastBatch, Promote, Record, Release, Reserve, Swap


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


class Restless(Coordinator):
    """Decides every 100 ms, since `GreedySpares` leaves work that no event brings up again."""

    def step(self, snapshot: Snapshot) -> Decision:
        """As `Coordinator`."""
        return replace(super().step(snapshot), wake_at=snapshot.now + 0.1)


def cluster(settings: ClusterSettings, *, routing: str = "greedy") -> RandomCluster:
    """`staleflow` as it is, or greedy with spares."""
    if routing == "staleflow":
        return RandomCluster(replace(settings, strategies=PolicySettings()))
    greedy = Restless(
        routing=GreedySpares(settings.seed),
        synchronization=NaiveSynchronization(),
        migration=NaiveMigration(),
    )
    return RandomCluster(settings, coordinator=greedy)


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
        settings = replace(
            TROUBLE if seed % 2 else SMALL,
            seed=seed,
            bound=bound,
            spare_groups=seed % 4,
            surplus=seed % 3,
            stragglers=StragglerRule(action=action, at_most=2),
            equal_rewards=0.2 * (seed % 3),
            train_s=0.05,  # training waits for rollout, so that there are stragglers
            steps=10,
        )
        world = cluster(settings, routing=routing)
        report = audited(world, tmp_path)
        assert world.finish == "completed"
        assert report.trajectories == settings.steps * settings.batch_size * settings.group_size
        kinds.update(map(type, world.records))
        straggled += len(world.straggled)
    if bound:
        assert kinds[Promote] > 0
    assert kinds[Swap] > 0
    assert (straggled > 0) == (action != "wait")


@pytest.mark.parametrize("last_batch", ["train", "drop", "pad"])
@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("base", [SMALL, TROUBLE], ids=["calm", "trouble"])
def test_spares_neither_lose_nor_repeat_a_prompt(
    last_batch: LastBatch, bound: int, base: ClusterSettings, tmp_path: Path
) -> None:
    """F17, F19: 27 prompts in batches of 4, with three spares that come and go: each is trained once."""
    expired = 0
    for seed in range(8):
        settings = replace(
            base,
            seed=seed,
            bound=bound,
            batch_size=4,
            prompts=27,
            steps=50,
            spare_groups=3,
            surplus=1,
            last_batch=last_batch,
        )
        world = cluster(settings)
        audited(world, tmp_path)
        assert world.finish == "exhausted"
        uses = Counter(group.rpartition("-a")[0] for group in world.trained)
        failed = sum(isinstance(r, Release) and r.reason in ("filtered", "failed") for r in world.records)
        left = 27 - failed
        expected = {"train": left, "drop": left // 4 * 4, "pad": -(-left // 4) * 4}[last_batch]
        assert uses.total() == expected
        assert set(uses.values()) == {1}
        assert sum(use.startswith("e0") for use in uses) == min(left, expected)
        expired += sum(isinstance(r, Release) and r.reason == "expired" for r in world.records)
    assert expired > 0


def test_no_more_spares_are_reserved_than_allowed_and_none_without_the_setting() -> None:
    for seed in range(10):
        world = cluster(replace(SMALL, seed=seed, spare_groups=0))
        world.run()
        assert not any(isinstance(r, Reserve) and r.spare for r in world.records)
        assert not any(isinstance(r, Promote | Swap) for r in world.records)
