"""Random clusters with real rollout instances: every property of coordination, each seed to its end.

What must hold at every moment is checked as the run goes, and of the whole by `cluster_checks`. More seeds
than the default: `STALEFLOW_SEEDS=10000`. One seed, with its story:
`RandomCluster(draw_settings(seed), print).run()`.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_checks import check_end, check_ledger, prompt_of
from cluster_settings import FAST, ClusterSettings, InstanceSettings, draw_settings
from random_cluster import RandomCluster

from staleflow.coordination.actions import Interrupt
from staleflow.coordination.events import TurnGiven, WaitingExternal
from staleflow.coordination.policies import PolicySettings
from staleflow.protocol.records import Promote, Swap
from staleflow.telemetry.events import (
    CheckpointSaved,
    CommandSent,
    Evaluated,
    EvaluationFailed,
    EvaluationSkipped,
    GivenUp,
    Handlers,
    Released,
    ReportReceived,
    RewardReceived,
    StepTrained,
    StragglerResampled,
    StragglerTruncated,
)

SEEDS = int(os.environ.get("STALEFLOW_SEEDS", "1200"))
PARTS = 12


@pytest.mark.slow
@pytest.mark.timeout(60 + SEEDS)
@pytest.mark.parametrize("part", range(PARTS))
def test_random_clusters_keep_every_property(part: int, tmp_path: Path) -> None:
    """F36, F41 and the properties of issue 3."""
    for seed in range(part, SEEDS, PARTS):
        cluster = RandomCluster(draw_settings(seed))
        cluster.run()
        check_end(cluster)
        check_ledger(cluster, tmp_path / "ledger.jsonl")


# ---------------------------------------------------------------------- that this tests something


class Happened:
    """Counts what happens in a run, by kind."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def handlers(self) -> Handlers:
        """See `Listener`."""
        kinds = (TurnGiven, WaitingExternal, CheckpointSaved, Evaluated, EvaluationFailed, EvaluationSkipped)
        kinds += (StragglerResampled, StragglerTruncated)
        return {
            **{kind: lambda event: self.seen.update([type(event).__name__]) for kind in kinds},
            CommandSent: self._sent,
            GivenUp: lambda event: self.seen.update([event.reason]),
            Released: lambda event: self.seen.update([event.reason]),
            RewardReceived: lambda event: self.seen.update(["late reward"] * event.dropped),
            ReportReceived: lambda event: self.seen.update(["late tokens"] * len(event.late)),
            StepTrained: lambda event: self.seen.update(["waited for a push"] * (event.waited_s > 0)),
        }

    def _sent(self, event: CommandSent) -> None:
        if isinstance(event.command, Interrupt) and event.command.reason.startswith("no new token"):
            self.seen["no new token"] += 1


def test_the_seeds_reach_what_the_properties_are_about() -> None:
    """Moves, preemptions, refusals, promotions, swaps and every end: a property of nothing would hold too."""
    seen: Counter[str] = Counter()
    for seed in range(150):
        happened = Happened()
        cluster = RandomCluster(draw_settings(seed), listeners=[happened])
        seen[cluster.run()] += 1
        seen.update(happened.seen)
        seen[cluster.settings.policy] += 1
        seen["moves"] += cluster.watch.migrations
        seen["preemptions"] += sum(cluster.watch.preemptions.values())
        seen.update({f"refused: {kind}": count for kind, count in cluster.watch.rejected.items()})
        seen["restarts"] += sum(node.incarnation - 1 for node in cluster.nodes.values())
        for kind in (Promote, Swap):
            seen[kind.__name__] += sum(isinstance(record, kind) for record in cluster.records)
    wanted = {"completed", "exhausted", "interrupted", "filtered_out", "moves", "preemptions", "restarts"}
    wanted |= {"TurnGiven", "WaitingExternal", "late reward", "late tokens", "waited for a push"}
    wanted |= {"CheckpointSaved", "Evaluated", "EvaluationFailed", "EvaluationSkipped"}
    wanted |= {"the tool is broken", "its environment did not answer in time", "no new token"}
    wanted |= {"StragglerResampled", "StragglerTruncated", "expired"}
    wanted |= {"refused: pull", "refused: stale", "Promote", "Swap"}
    wanted |= {"staleflow", "strict_queue", "strict", "one_step", "sync"}
    assert {name for name in wanted if not seen[name]} == set()


def test_the_same_seed_gives_the_same_ledger() -> None:
    first, second = RandomCluster(draw_settings(16)), RandomCluster(draw_settings(16))
    first.run()
    second.run()
    assert first.lines == second.lines


# ---------------------------------------------------------------------- worked out by hand

CROWD = ClusterSettings(
    seed=1,
    batch_size=4,
    group_size=8,
    steps=3,
    bound=1,
    instances=(InstanceSettings(kv_capacity=64, max_running=32, costs=FAST),) * 2,
    median_response=24.0,
    spread=0.3,
    max_new_tokens=32,
    progress_interval_s=0.05,
)
"""64 trajectories of 4 + 24 tokens on two caches that hold two or three of them each."""


def preemptions(settings: ClusterSettings) -> int:
    cluster = RandomCluster(settings)
    assert cluster.run() == "completed"
    return sum(cluster.watch.preemptions.values())


def test_waterfall_causes_far_fewer_preemptions_than_dispatch_by_group() -> None:
    """F41: static dispatch hands all 64 over at once, and each cache overflows again and again."""
    by_group = preemptions(replace(CROWD, policy="strict"))
    waterfall = preemptions(CROWD)
    naive = preemptions(replace(CROWD, strategies=PolicySettings(routing="naive")))
    assert by_group > 50
    assert waterfall * 4 < by_group
    assert naive * 4 < by_group


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_long_prompts_are_trained_as_often_as_they_are_drawn(bound: int) -> None:
    """Every fourth prompt has 30 tokens, where a cache holds 40 and short ones would fill it for ever."""
    settings = replace(
        CROWD,
        bound=bound,
        steps=6,
        prompt_lengths=(3, 3, 3, 30),
        max_new_tokens=8,
        median_response=4.0,
        spread=1.0,
        instances=(InstanceSettings(kv_capacity=40, max_running=32, costs=FAST),) * 2,
    )
    cluster = RandomCluster(settings)
    assert cluster.run() == "completed"
    assert sorted(map(prompt_of, cluster.trained), key=lambda p: int(p[4:])) == [
        f"e0-p{n}" for n in range(24)
    ]
    consumed = {prompt_of(group): step // 4 for step, group in enumerate(cluster.trained)}
    behind = [consumed[f"e0-p{n}"] - n // 4 for n in range(3, 24, 4)]
    assert max(behind) <= bound
