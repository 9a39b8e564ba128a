"""Small random clusters with naive strategies, in which one thing is made certain each time.

What must hold at every moment is checked as the run goes; see `random_cluster`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cluster_checks import check_end
from cluster_settings import FAST, ClusterSettings, InstanceSettings
from random_cluster import RandomCluster

from staleflow.audit import AuditReport, audit_ledger
from staleflow.coordination.policies import PolicySettings
from staleflow.protocol.records import LastBatch, Trained
from staleflow.telemetry.events import BatchTaken, Handlers

SMALL = ClusterSettings(
    seed=0,
    strategies=PolicySettings(routing="naive", synchronization="naive", migration="naive"),
    instances=(InstanceSettings(kv_capacity=60, max_running=3, costs=FAST),) * 3,
    prompt_lengths=(5,),
    median_response=8.0,
    max_new_tokens=24,
    is_filtered=True,
    delay=0.02,
    stall_after_s=2.0,
)
TROUBLE = replace(SMALL, deaths=0.01, refusals=0.15, losses=0.02, restart_s=0.1, repeats=0.1)


def audited(cluster: RandomCluster, folder: Path) -> AuditReport:
    """Play it to the end; what the audit says."""
    cluster.run()
    check_end(cluster)
    path = folder / "ledger.jsonl"
    path.write_text("".join(line + "\n" for line in cluster.lines))
    report = audit_ledger(path)
    assert report.violations == ()
    return report


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("base", [SMALL, TROUBLE], ids=["calm", "trouble"])
def test_the_bound_is_reached_and_never_exceeded(base: ClusterSettings, bound: int, tmp_path: Path) -> None:
    """F2, F3, F15, F16: whatever dies, refuses or forgets."""
    seen = 0
    for seed in range(40):
        settings = replace(base, seed=seed, bound=bound, equal_rewards=0.3 * (seed % 3))
        cluster = RandomCluster(settings)
        seen = max(seen, audited(cluster, tmp_path).max_staleness or 0)
        assert cluster.finish == "completed"
    assert seen == bound


@pytest.mark.parametrize("last_batch", ["train", "drop", "pad"])
def test_a_source_of_seven_prompts_ends_by_the_stated_policy(last_batch: LastBatch, tmp_path: Path) -> None:
    """F17: 7 prompts, batch 4: a last batch of 3, none, or one filled up with the next epoch's."""
    for seed in range(10):
        settings = replace(SMALL, seed=seed, batch_size=4, prompts=7, steps=50, last_batch=last_batch)
        cluster = RandomCluster(settings)
        audited(cluster, tmp_path)
        assert cluster.finish == "exhausted"
        own = [group for group in cluster.trained if group.startswith("e0")]
        expected = {"train": (7, 7), "drop": (4, 4), "pad": (8, 7)}[last_batch]
        assert (len(cluster.trained), len(own)) == expected
        assert len(set(cluster.trained)) == len(cluster.trained)


def test_a_source_that_only_gives_equal_rewards_ends_with_that_reason(tmp_path: Path) -> None:
    """F26: everything is filtered; the run ends instead of filtering for ever."""
    cluster = RandomCluster(replace(SMALL, seed=1, equal_rewards=1.0))
    audited(cluster, tmp_path)
    assert cluster.finish == "filtered_out"
    assert cluster.trained == []


def test_surplus_members_are_aborted_and_the_first_ones_are_trained(tmp_path: Path) -> None:
    """5 steps of 2 groups of 2, one more of each drawn."""
    for seed in range(10):
        cluster = RandomCluster(replace(SMALL, seed=seed, surplus=1))
        audited(cluster, tmp_path)
        trained = [m for r in cluster.records if isinstance(r, Trained) for m in r.trajectories]
        assert len(trained) == 5 * 2 * 2
        assert cluster.server.balance.aborted > 0


def test_a_trajectory_that_is_always_lost_is_given_up_and_its_group_still_trains(tmp_path: Path) -> None:
    """F15, F25: after three retries the member is masked; no group waits for it for ever."""
    victim = "e0-p0-a0-m0"
    settings = replace(SMALL, instances=SMALL.instances[:1], group_size=3, always_lost=victim)
    cluster = RandomCluster(settings)
    audited(cluster, tmp_path)
    assert cluster.given_up == {victim}
    assert cluster.watch.routes[victim] == 4
    assert "e0-p0-a0" in cluster.trained


class StopInStep:
    """Asks the run to stop while this step is trained."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.cluster: RandomCluster | None = None

    def handlers(self) -> Handlers:
        """See `Listener`."""
        return {BatchTaken: self._taken}

    def _taken(self, event: BatchTaken) -> None:
        if event.step == self._step and self.cluster is not None:
            self.cluster.loop.request_stop()


def test_a_stop_request_ends_the_run_after_the_step_in_training(tmp_path: Path) -> None:
    """Step 2 makes version 3; nothing is consumed after it."""
    stop = StopInStep(2)
    cluster = stop.cluster = RandomCluster(replace(SMALL, seed=3, steps=100), listeners=[stop])
    assert cluster.run() == "interrupted"
    assert cluster.control.view.next_buffer == 3
    assert cluster.control.view.newest_version == 3
    assert [r.step for r in cluster.records if isinstance(r, Trained)] == [0, 1, 2]
