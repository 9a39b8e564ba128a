"""Payload and the account of tokens: redundant members, expired prompts, stragglers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from staleflow.coordination.events import InstanceReport
from staleflow.data.instance_update import Delta, InstanceUpdate
from staleflow.data.trajectory import FinishReason, Prompt, Segment
from staleflow.servers.trajectory_server import TrajectoryServer


def prompts(epoch: int, count: int) -> Iterator[tuple[int, int, Prompt]]:
    for n in range(count):
        yield epoch, n, Prompt(prompt_id=str(n), tokens=(7, 8, 9), text="", answer=None)


def server(count: int = 3, *, members: int = 2, attempt: int = 0) -> TrajectoryServer:
    return TrajectoryServer(
        prompts=prompts(0, count),
        padding=prompts(1, 5),
        members=members,
        max_new_tokens=16,
        attempt=attempt,
    )


def generate(made: TrajectoryServer, trajectory: str, tokens: int) -> None:
    segment = Segment(
        generated=True,
        tokens=np.zeros(tokens, dtype=np.int32),
        log_probs=np.zeros(tokens, dtype=np.float32),
        versions=np.zeros(tokens, dtype=np.int32),
    )
    delta = Delta(trajectory_id=trajectory, segment=segment, finish_reason=None)
    report = InstanceReport(instance="i0", incarnation=1, revision=1, version=0, acked_seq=0)
    made.absorb(InstanceUpdate(report, (delta,)))


def test_a_group_has_as_many_members_as_said() -> None:
    groups, exhausted = server(members=3).draw(2)
    assert [g.members for g in groups] == [
        ("e0-p0-a0-m0", "e0-p0-a0-m1", "e0-p0-a0-m2"),
        ("e0-p1-a0-m0", "e0-p1-a0-m1", "e0-p1-a0-m2"),
    ]
    assert not exhausted


def test_the_prompt_of_an_expired_group_is_drawn_again_before_others_as_a_new_group() -> None:
    made = server(attempt=4)
    made.draw(2)
    generate(made, "e0-p0-a4-m1", 5)
    made.discard(["e0-p0-a4-m0", "e0-p0-a4-m1"], "expired")
    groups, exhausted = made.draw(2)
    assert [(g.group_id, g.redrawn) for g in groups] == [("e0-p0-a5", True), ("e0-p2-a4", False)]
    assert made.get("e0-p0-a5-m0").prompt.prompt_id == "0"
    assert not exhausted
    assert (made.balance.discarded, made.balance.in_flight) == (5, 0)


def test_it_is_drawn_again_also_when_the_source_is_exhausted_and_before_padding() -> None:
    made = server(1)
    made.draw(1)
    assert made.draw(1) == ((), True)
    made.discard(["e0-p0-a0-m0", "e0-p0-a0-m1"], "expired")
    groups, exhausted = made.draw(2)
    assert ([g.group_id for g in groups], exhausted) == (["e0-p0-a1"], True)
    made.discard(["e0-p0-a1-m0", "e0-p0-a1-m1"], "expired")
    groups, exhausted = made.draw(2, padding=True)
    assert ([g.group_id for g in groups], exhausted) == (["e0-p0-a2", "e1-p0-a0"], False)


def test_no_other_reason_brings_a_prompt_back() -> None:
    made = server()
    made.draw(3)
    for n, reason in enumerate(("filtered", "failed", "discarded")):
        made.discard([f"e0-p{n}-a0-m0", f"e0-p{n}-a0-m1"], reason)
    assert made.draw(1) == ((), True)


def test_a_straggler_sampled_anew_starts_without_a_token_and_the_old_ones_are_aborted() -> None:
    made = server()
    made.draw(1)
    generate(made, "e0-p0-a0-m1", 6)
    assert made.resample("e0-p0-a0-m1", "e0-p0-a0-m1-r1").response_len == 6
    assert "e0-p0-a0-m1" not in made
    fresh = made.get("e0-p0-a0-m1-r1")
    assert (fresh.response_len, fresh.group_id, fresh.member) == (0, "e0-p0-a0", 1)
    generate(made, "e0-p0-a0-m1", 2)  # what was under way when it was aborted
    generate(made, "e0-p0-a0-m1-r1", 3)
    assert (made.balance.generated, made.balance.aborted, made.balance.in_flight) == (11, 8, 3)


def test_a_truncated_straggler_is_complete_as_if_its_budget_were_used_up() -> None:
    made = server()
    made.draw(1)
    generate(made, "e0-p0-a0-m0", 4)
    assert made.truncate("e0-p0-a0-m0").finish_reason is FinishReason.LENGTH
    assert made.get("e0-p0-a0-m0").response_len == 4
