"""What must hold of the whole run of a random cluster, once it has ended."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from random_cluster import RandomCluster

from staleflow.audit import audit_ledger
from staleflow.protocol.records import Consume, Record, Release, Reserve, Trained


def check_end(cluster: RandomCluster) -> None:
    """It ends as it should, every reserved group has come to something, and no prompt is left out."""
    settings, seed = cluster.settings, f"seed {cluster.settings.seed}"
    usual = "completed" if settings.prompts is None else "exhausted"
    allowed = {usual}
    if settings.stop_at is not None:
        allowed.add("interrupted")
    if settings.is_filtered or cluster.given_up:  # a masked group may be filtered, too
        allowed.add("filtered_out")
    assert cluster.finish in allowed, f"{seed}: ended as {cluster.finish}"
    check_tokens(cluster)
    check_beside(cluster)
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


def check_tokens(cluster: RandomCluster) -> None:
    """What instances reported is what is accounted for, once; no payload is left behind."""
    seed, balance = f"seed {cluster.settings.seed}", cluster.server.balance
    assert balance.generated == cluster.backend.instances.told_tokens, f"{seed}: {balance.as_dict()}"
    trained = [m.tokens for r in cluster.records if isinstance(r, Trained) for m in r.trajectories]
    assert balance.trained == sum(trained), f"{seed}: {balance.as_dict()}"
    assert balance.in_flight == 0, f"{seed}: tokens unaccounted for: {balance.as_dict()}"
    assert list(cluster.control._trajectories.members()) == [], seed
    assert cluster.server._trajectories == {}, f"{seed}: payload is left behind"


def check_beside(cluster: RandomCluster) -> None:
    """The last version is saved; no version is held for an evaluation any more."""
    settings, seed = cluster.settings, f"seed {cluster.settings.seed}"
    newest = sum(isinstance(r, Trained) for r in cluster.records)
    saved, every = cluster.backend.saved, settings.checkpoint_every
    if every is None or cluster.loop._trained < 0:  # stopped before the trainer was up
        assert saved == [], seed
    else:
        due = {v for v in range(1, newest + 1) if every and v % every == 0}
        assert saved == sorted(due | {newest}), f"{seed}: {saved} of {newest}"
    if not cluster.loop._stop.is_set():  # a stop lets the evaluation under way go
        assert cluster.backend.held == set(), f"{seed}: {cluster.backend.held}"


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
