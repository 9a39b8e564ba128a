"""Random clusters with real rollout instances: every property of coordination, each seed to its end.

What must hold at every moment is checked by `cluster_watch`, as the run goes; here is what must hold of the
whole. More seeds than the default: `STALEFLOW_SEEDS=10000`. One seed, with its story:
`RandomCluster(draw_settings(seed), print).run()`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_settings import FAST, ClusterSettings, InstanceSettings, draw_settings
from random_cluster import RandomCluster

from staleflow.audit import audit_ledger
from staleflow.coordination.policies import PolicySettings
from staleflow.protocol.records import Consume, Promote, Record, Release, Reserve, Swap

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


# ---------------------------------------------------------------------- the whole of a run


def check_end(cluster: RandomCluster) -> None:
    """It ends as it should, every reserved group has come to something, and no prompt is left out."""
    settings, seed = cluster.settings, f"seed {cluster.settings.seed}"
    usual = "completed" if settings.prompts is None else "exhausted"
    allowed = {usual}
    if settings.stop_at is not None:
        allowed.add("interrupted")
    if settings.is_filtered or cluster.given_up:
        allowed.add("filtered_out")
    assert cluster.finish in allowed, f"{seed}: ended as {cluster.finish}"
    assert cluster.server.balance.in_flight == 0, f"{seed}: tokens unaccounted for: {cluster.server.balance}"
    assert "other" not in cluster.watch.rejected, f"{seed}: {cluster.watch.rejected}"
    left = left_over(cluster.records)
    reasons = Counter(record.reason for record in cluster.records if isinstance(record, Release))
    assert reasons.keys() <= {"filtered", "failed", "expired"}, f"{seed}: {reasons}"
    assert settings.is_filtered or not reasons["filtered"], f"{seed}: {reasons}"
    assert settings.spare_groups or not reasons["expired"], f"{seed}: {reasons}"
    assert cluster.given_up or not reasons["failed"], f"{seed}: {reasons}"
    if cluster.finish == usual:
        dropped = settings.batch_size - 1 if settings.prompts and settings.last_batch == "drop" else 0
        assert len(left) <= dropped, f"{seed}: reserved, and came to nothing: {left}"
        check_prompts(cluster)


def left_over(records: list[Record]) -> set[str]:
    """Groups that were reserved and neither consumed nor released."""
    groups = {r.group for r in records if isinstance(r, Reserve)}
    groups -= {group.group for r in records if isinstance(r, Consume) for group in r.groups}
    return groups - {r.group for r in records if isinstance(r, Release)}


def check_prompts(cluster: RandomCluster) -> None:
    """Each prompt's use is trained on or filtered out, once, long prompts as much as short ones."""
    settings, seed = cluster.settings, f"seed {cluster.settings.seed}"
    trained = Counter(map(prompt_of, cluster.trained))
    dropped = Counter(
        prompt_of(r.group) for r in cluster.records if isinstance(r, Release) and r.reason != "expired"
    )
    used = trained + dropped
    assert max(used.values(), default=1) == 1, f"{seed}: used more than once: {used}"
    if settings.prompts is None:
        assert trained.total() == settings.steps * settings.batch_size, f"{seed}: {trained}"
        passed_over = set(cluster.drawn) - set(used)
        assert len(passed_over) <= settings.spare_groups, f"{seed}: drawn, and never used: {passed_over}"
    else:
        own = {prompt for prompt in used if prompt.startswith("e0-")}
        lacking = settings.prompts - len(own)
        most = settings.batch_size - 1 if settings.last_batch == "drop" else 0
        assert 0 <= lacking <= most, f"{seed}: {lacking} of {settings.prompts} prompts were not used"
        if settings.last_batch == "pad" and not dropped:
            assert trained.total() % settings.batch_size == 0, f"{seed}: {trained}"


def prompt_of(group: str) -> str:
    """`e0-p3` of `e0-p3-a1`."""
    match = re.fullmatch(r"(e\d+-p\d+)-a\d+", group)
    assert match is not None, group
    return match[1]


def check_ledger(cluster: RandomCluster, path: Path) -> None:
    """The independent audit finds nothing, and no more staleness than the policy promises."""
    path.write_text("".join(line + "\n" for line in cluster.lines))
    report = audit_ledger(path)
    assert report.violations == (), f"seed {cluster.settings.seed}: {report.violations}"
    assert (report.max_staleness or 0) <= cluster.settings.kept_bound, f"seed {cluster.settings.seed}"


# ---------------------------------------------------------------------- that this tests something


def test_the_seeds_reach_what_the_properties_are_about() -> None:
    """Moves, preemptions, refusals, promotions, swaps and every end: a property of nothing would hold too."""
    seen: Counter[str] = Counter()
    for seed in range(150):
        cluster = RandomCluster(draw_settings(seed))
        seen[cluster.run()] += 1
        seen[cluster.settings.policy] += 1
        seen["moves"] += cluster.watch.migrations
        seen["preemptions"] += sum(cluster.watch.preemptions.values())
        seen.update({f"refused: {kind}": count for kind, count in cluster.watch.rejected.items()})
        seen["restarts"] += sum(node.incarnation - 1 for node in cluster.nodes.values())
        for kind in (Promote, Swap):
            seen[kind.__name__] += sum(isinstance(record, kind) for record in cluster.records)
    wanted = {"completed", "exhausted", "interrupted", "filtered_out", "moves", "preemptions", "restarts"}
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
