"""The auditor passes a clean ledger and names the offender of each kind of violation planted in it."""

import copy
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from staleflow.audit import audit_ledger
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.records import (
    Consume,
    ConsumedGroup,
    End,
    Lower,
    Occupy,
    Promote,
    Release,
    Reserve,
    Resume,
    Start,
    Swap,
    Trained,
    TrainedMember,
    to_json,
)

BOUND, BATCH, GROUP = 1, 2, 2


class World:
    """Drives the real buffer and keeps the ledger lines of what it did."""

    def __init__(self, last_batch="train"):
        self.buffer = StalenessBuffer(bound=BOUND, batch_size=BATCH, spare_limit=1)
        self.lines = []
        self.attempt = 0
        self.prompts = 0
        self.write(
            Start(bound=BOUND, batch_size=BATCH, group_size=GROUP, last_batch=last_batch, spare_limit=1)
        )

    def write(self, record):
        self.lines.append(json.loads(to_json(record, len(self.lines), self.attempt)))

    def reserve(self, version=None, spare=False, prompt=None):
        if prompt is None:
            prompt, self.prompts = self.prompts, self.prompts + 1
        group = f"e0-p{prompt}-a{self.attempt}"
        version = self.buffer.next_buffer if version is None else version
        self.buffer.reserve(group, version, spare)
        self.write(Reserve(group=group, version=version, spare=spare))
        return group

    def lower(self, group, version):
        self.buffer.lower(group, version)
        self.write(Lower(group=group, version=version))

    def occupy(self, *groups):
        for group in groups:
            self.buffer.occupy(group)
            self.write(Occupy(group=group))

    def release(self, group, reason):
        self.buffer.release(group)
        self.write(Release(group=group, reason=reason))

    def promote(self, group):
        self.buffer.promote(group)
        self.write(Promote(group=group))

    def swap(self, spare, firm):
        self.buffer.swap(spare, firm)
        self.write(Swap(spare=spare, firm=firm))

    def consume(self, final=False):
        consumed = self.buffer.consume(final)
        groups = tuple(
            ConsumedGroup(
                group=e.group,
                version=e.version,
                ids=tuple(f"{e.group}-m{m}" for m in range(GROUP)),
                hashes=tuple(f"h{e.order}{m}" for m in range(GROUP)),
            )
            for e in consumed.entries
        )
        self.write(Consume(buffer=consumed.buffer, final=final, groups=groups))
        for group in consumed.expired:
            self.write(Release(group=group, reason="expired"))
        return groups

    def train(self, groups):
        step = self.buffer.next_buffer - 1
        trajectories = tuple(
            TrainedMember(id=member, min=g.version, max=step, tokens=3, hash=digest)
            for g in groups
            for member, digest in zip(g.ids, g.hashes, strict=True)
        )
        self.write(Trained(step=step, version=step, trajectories=trajectories))

    def resume(self, step):
        self.buffer = StalenessBuffer(bound=BOUND, batch_size=BATCH, spare_limit=1, next_buffer=step)
        self.attempt += 1
        self.write(Resume(step=step))

    def end(self, reason="completed"):
        self.write(End(steps=self.buffer.next_buffer, reason=reason))


def clean():
    """Five steps in which every kind of transition occurs; one occupied and one reserved group remain."""
    w = World()
    p0, p1, p2, p3 = (w.reserve() for _ in range(4))
    w.occupy(p1, p0)
    w.train(w.consume())  # step 0; p2 and p3 are now of deadline 1
    p4 = w.reserve()
    w.release(p3, "filtered")
    p5 = w.reserve()
    w.lower(p5, 0)
    w.occupy(p5, p2)
    w.train(w.consume())  # step 1: p2, p5; p4 is now of deadline 2
    p6 = w.reserve()
    p7 = w.reserve(spare=True)
    w.occupy(p7)
    w.swap(p7, p6)
    w.release(p6, "aborted")
    w.occupy(p4)
    w.train(w.consume())  # step 2: p4, p7
    p8 = w.reserve()
    p9 = w.reserve(spare=True)
    w.promote(p9)
    p10 = w.reserve(version=2, spare=True)
    w.occupy(p9, p8, p10)
    w.train(w.consume())  # step 3: p8, p9; p10 expires
    p11, p12, p13, _p14 = (w.reserve() for _ in range(4))
    w.occupy(p11, p12, p13)
    w.train(w.consume())  # step 4: p11, p12
    w.end()
    return w.lines


def short_end(last_batch="train"):
    """Two steps, the second with the one group that was left."""
    w = World(last_batch)
    p0, p1, p2 = (w.reserve() for _ in range(3))
    w.occupy(p0, p1, p2)
    w.train(w.consume())
    w.train(w.consume(final=True))
    w.end("exhausted")
    return w.lines


def resumed():
    """Killed with step 3 consumed; resumed from the checkpoint after two steps; ended after four."""
    w = World()
    for _ in range(3):
        groups = [w.reserve(), w.reserve()]
        w.occupy(*groups)
        w.train(w.consume())
    w.occupy(w.reserve(), w.reserve())
    w.consume()
    w.reserve()
    w.resume(2)
    for prompt in (4, 6):
        groups = [w.reserve(prompt=prompt), w.reserve(prompt=prompt + 1)]
        w.occupy(*groups)
        w.train(w.consume())
    w.end()
    return w.lines


def audit(tmp_path, lines, renumber=True, tail=""):
    path = tmp_path / "ledger.jsonl"
    if renumber:
        lines = [{**line, "seq": seq} for seq, line in enumerate(lines)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return audit_ledger(path)


def codes(report):
    return {violation.code for violation in report.violations}


# Clean ledgers ----------------------------------------------------------------------------------------------


def test_a_clean_ledger_passes_with_its_figures(tmp_path):
    report = audit(tmp_path, clean())
    assert report.violations == ()
    assert (report.steps, report.trained_groups, report.trajectories) == (5, 10, 20)
    # V of the groups: step 0: 0 0, step 1: 0 0, step 2: 1 2, step 3: 3 3, step 4: 4 4; two trajectories each
    assert report.staleness_histogram == {0: 14, 1: 6}
    assert (report.max_staleness, report.mean_staleness) == (1, 0.3)
    assert report.released == {"filtered": 1, "aborted": 1, "expired": 1}
    assert (report.attempts, report.end_reason, report.incomplete) == (1, "completed", None)


def test_a_short_final_batch_passes(tmp_path):
    report = audit(tmp_path, short_end())
    assert report.violations == ()
    assert report.trained_groups == 3


def test_a_resume_voids_what_the_checkpoint_does_not_hold(tmp_path):
    report = audit(tmp_path, resumed())
    assert report.violations == ()
    assert (report.steps, report.attempts, report.voided_steps, report.trajectories) == (4, 2, 1, 16)


@pytest.mark.parametrize("lines", [clean(), resumed()], ids=["clean", "resumed"])
def test_a_run_killed_after_any_record_is_clean_but_for_having_no_step(tmp_path, lines):
    for kept in range(1, len(lines)):
        report = audit(tmp_path, lines[:kept], tail='{"seq": 99, "atte')
        assert codes(report) <= {"no_steps"}
        assert bool(report.violations) == all(line["kind"] != "trained" for line in lines[:kept])
        assert report.torn


def test_the_last_consume_of_a_killed_run_is_incomplete_and_no_violation(tmp_path):
    lines = clean()
    report = audit(tmp_path, lines[:-2])
    assert report.violations == ()
    assert report.incomplete == "step 4 was consumed but not trained"
    assert "incomplete: step 4" in report.text()


# Planted violations -----------------------------------------------------------------------------------------


def nth(lines, kind, n=0):
    return [at for at, line in enumerate(lines) if line["kind"] == kind][n]


def of(lines, kind, group):
    return next(at for at, line in enumerate(lines) if line["kind"] == kind and line.get("group") == group)


def insert(lines, at, *records):
    for offset, record in enumerate(records):
        lines.insert(at + offset, {"seq": 0, "attempt": 0, **record})


def trained(lines, step):
    return lines[nth(lines, "trained", step)]


def consumed(lines, step):
    return lines[nth(lines, "consume", step)]


X = "e0-p90-a0"
"""A group that a plant adds."""


def reserve(version, group=X, spare=False):
    return {"kind": "reserve", "group": group, "version": version, "spare": spare}


def release(group=X, reason="aborted"):
    return {"kind": "release", "group": group, "reason": reason}


PLANTS = []


def plants(code, *more, world=clean, offender=None):
    def register(plant):
        PLANTS.append(
            pytest.param(world, plant, {code, *more}, offender, id=f"{code}-{plant.__name__}".rstrip("_"))
        )
        return plant

    return register


@plants("staleness", offender={"step": 3, "group": "e0-p8-a0", "trajectory": "e0-p8-a0-m0"})
def trained_on_tokens_older_than_the_bound(lines):
    trained(lines, 3)["trajectories"][0]["min"] = 1


@plants("below_group", offender={"step": 3, "trajectory": "e0-p8-a0-m0"})
def trained_on_tokens_older_than_the_reservation(lines):
    trained(lines, 3)["trajectories"][0]["min"] = 2


@plants("version_future", offender={"step": 3, "trajectory": "e0-p8-a0-m0"})
def trained_on_tokens_of_weights_to_come(lines):
    trained(lines, 3)["trajectories"][0]["max"] = 4


@plants("version_range", offender={"trajectory": "e0-p8-a0-m0"})
def trained_with_min_above_max(lines):
    trained(lines, 3)["trajectories"][0]["max"] = 2


@plants("hash_mismatch", offender={"step": 1, "trajectory": "e0-p2-a0-m1"})
def trained_on_other_tokens_than_consumed(lines):
    trained(lines, 1)["trajectories"][1]["hash"] = "f00"


@plants("consumed_not_trained", offender={"step": 1, "trajectory": "e0-p2-a0-m1"})
def trajectory_left_out_of_the_update(lines):
    del trained(lines, 1)["trajectories"][1]


@plants("trained_not_consumed", offender={"step": 1, "trajectory": "e0-p0-a0-m0"})
def trajectory_of_another_step_in_the_update(lines):
    trained(lines, 1)["trajectories"].append(
        dict(trained(lines, 0)["trajectories"][0]) | {"min": 0, "max": 1}
    )


@plants("trajectory_trained_twice", offender={"step": 1, "trajectory": "e0-p2-a0-m0"})
def trajectory_twice_in_the_update(lines):
    trained(lines, 1)["trajectories"].append(trained(lines, 1)["trajectories"][0])


@plants("trained_version", offender={"step": 2})
def trained_from_other_weights(lines):
    trained(lines, 2)["version"] = 1


@plants("trained_twice", offender={"step": 2})
def step_trained_twice(lines):
    at = nth(lines, "trained", 2)
    lines.insert(at, lines[at])


@plants("trained_unconsumed", offender={"step": 2})
def trained_before_consume(lines):
    at = nth(lines, "consume", 2)
    lines[at], lines[at + 1] = lines[at + 1], lines[at]


@plants("step_gap", offender={"step": 3})
def step_without_its_trained_record(lines):
    del lines[nth(lines, "trained", 2)]


@plants("step_untrained", offender={"step": 4})
def last_step_without_its_trained_record_in_a_run_that_ended(lines):
    del lines[nth(lines, "trained", 4)]


@plants("step_gap", "step_untrained")
def two_steps_without_their_trained_records(lines):
    del lines[nth(lines, "trained", 4)]
    del lines[nth(lines, "trained", 2)]


@plants("reserve_twice", offender={"group": "e0-p3-a0"})
def reserved_twice(lines):
    at = of(lines, "reserve", "e0-p3-a0")
    lines.insert(at, lines[at])


@plants("group_reused", offender={"group": "e0-p3-a0"})
def released_id_used_again(lines):
    insert(lines, of(lines, "release", "e0-p3-a0") + 1, reserve(1, "e0-p3-a0"), release("e0-p3-a0"))


@plants("version_ahead", offender={"group": X})
def reserved_at_a_version_to_come(lines):
    insert(lines, nth(lines, "trained", 1) + 1, reserve(3), release())


@plants("too_old", offender={"group": X})
def reserved_beyond_the_bound(lines):
    insert(lines, nth(lines, "trained", 1) + 1, reserve(0), release())


@plants("too_old", offender={"group": X})
def spare_reserved_beyond_the_bound(lines):
    insert(lines, nth(lines, "trained", 1) + 1, reserve(0, spare=True), release())


@plants("over_capacity", offender={"group": X})
def reserved_above_capacity(lines):
    insert(lines, of(lines, "reserve", "e0-p3-a0") + 1, reserve(0), release())


@plants("not_placeable", offender={"group": X})
def reserved_where_earlier_deadlines_fill_the_buffer(lines):
    insert(lines, nth(lines, "trained", 0) + 1, reserve(0), release())


@plants("spare_limit", offender={"group": X})
def one_spare_too_many(lines):
    other = "e0-p91-a0"
    insert(lines, 1, reserve(0, other, True), reserve(0, X, True), release(other), release())


@plants("unknown_group", offender={"group": X})
def occupied_without_reservation(lines):
    insert(lines, 1, {"kind": "occupy", "group": X})


@plants("unknown_group", offender={"group": X})
def lowered_without_reservation(lines):
    insert(lines, 1, {"kind": "lower", "group": X, "version": 0})


@plants("unknown_group", offender={"group": X})
def promoted_without_reservation(lines):
    insert(lines, 1, {"kind": "promote", "group": X})


@plants("unknown_group", offender={"group": "e0-p3-a0"})
def released_twice(lines):
    insert(lines, of(lines, "release", "e0-p3-a0") + 1, release("e0-p3-a0"))


@plants("unknown_group", offender={"group": "e0-p10-a0"})
def expired_spare_used(lines):
    at = of(lines, "release", "e0-p10-a0")
    insert(lines, at, {"kind": "promote", "group": "e0-p10-a0"})


@plants("lower_occupied", offender={"group": "e0-p1-a0"})
def lowered_though_occupied(lines):
    insert(lines, of(lines, "occupy", "e0-p1-a0") + 1, {"kind": "lower", "group": "e0-p1-a0", "version": 0})


@plants("version_raised", offender={"group": X})
def version_raised_by_lower(lines):
    at = nth(lines, "trained", 1) + 1
    insert(lines, at, reserve(1, spare=True), {"kind": "lower", "group": X, "version": 2}, release())


@plants("not_placeable", "consume_version", "consume_bound", offender={"group": "e0-p4-a0"})
def lowered_where_it_does_not_fit(lines):
    insert(lines, of(lines, "occupy", "e0-p2-a0"), {"kind": "lower", "group": "e0-p4-a0", "version": 0})


@plants("occupy_twice", offender={"group": "e0-p1-a0"})
def occupied_twice(lines):
    at = of(lines, "occupy", "e0-p1-a0")
    lines.insert(at, lines[at])


@plants("release_occupied", offender={"group": "e0-p13-a0"})
def released_though_occupied(lines):
    insert(lines, len(lines) - 1, release("e0-p13-a0", "discarded"))


@plants("release_expired", offender={"group": "e0-p14-a0"})
def firm_group_dropped_for_staleness(lines):
    insert(lines, len(lines) - 1, release("e0-p14-a0", "expired"))


@plants("promote_firm", offender={"group": "e0-p3-a0"})
def firm_group_promoted(lines):
    insert(lines, of(lines, "reserve", "e0-p3-a0") + 1, {"kind": "promote", "group": "e0-p3-a0"})


@plants("over_capacity", offender={"group": X})
def spare_promoted_above_capacity(lines):
    at = of(lines, "reserve", "e0-p3-a0") + 1
    insert(lines, at, reserve(0, spare=True), {"kind": "promote", "group": X}, release())


@plants("not_placeable", offender={"group": X})
def spare_promoted_where_earlier_deadlines_fill_the_buffer(lines):
    at = nth(lines, "trained", 0) + 1
    insert(lines, at, reserve(0, spare=True), {"kind": "promote", "group": X}, release())


@plants("not_placeable", offender={"group": X})
def old_spare_swapped_in_where_earlier_deadlines_fill_the_buffer(lines):
    young = "e0-p91-a0"  # of deadline 6; p13 and p14, of deadline 5, fill buffer 5
    insert(
        lines,
        len(lines) - 1,
        reserve(5, young),
        reserve(4, spare=True),
        {"kind": "occupy", "group": X},
        {"kind": "swap", "spare": X, "firm": young},
    )


@plants("swap_kind", offender={"group": "e0-p3-a0"})
def firm_swapped_for_firm(lines):
    insert(
        lines,
        of(lines, "reserve", "e0-p3-a0") + 1,
        {"kind": "swap", "spare": "e0-p3-a0", "firm": "e0-p2-a0"},
    )


@plants("swap_unfinished", offender={"group": "e0-p7-a0"})
def unfinished_spare_swapped_in(lines):
    occupied = lines.pop(of(lines, "occupy", "e0-p7-a0"))
    lines.insert(nth(lines, "swap") + 1, occupied)


@plants("swap_occupied", offender={"group": "e0-p6-a0"})
def finished_firm_group_swapped_out(lines):
    insert(lines, nth(lines, "swap"), {"kind": "occupy", "group": "e0-p6-a0"})


@plants("buffer_order", offender={"step": 2})
def buffer_skipped(lines):
    consumed(lines, 2)["buffer"] = 3


@plants("batch_size", offender={"step": 4})
def batch_too_large(lines):
    group = {
        "group": "e0-p13-a0",
        "version": 4,
        "trajectories": [{"id": f"e0-p13-a0-m{m}", "hash": "aa"} for m in range(2)],
    }
    consumed(lines, 4)["groups"].append(group)
    trained(lines, 4)["trajectories"] += [
        {"id": m["id"], "min": 4, "max": 4, "tokens": 1, "hash": "aa"} for m in group["trajectories"]
    ]


@plants("batch_size", world=short_end, offender={"step": 1})
def short_batch_that_is_not_final(lines):
    consumed(lines, 1)["final"] = False


@plants("batch_size", world=lambda: short_end("drop"), offender={"step": 1})
def short_batch_trained_that_was_to_be_dropped(lines):
    pass


@plants("final_unoccupied", world=short_end, offender={"step": 1, "group": X})
def final_batch_with_a_group_unfinished(lines):
    insert(lines, nth(lines, "consume", 1), reserve(1, spare=True))


@plants("reserve_after_final", world=short_end, offender={"group": X})
def reserved_after_the_final_batch(lines):
    insert(lines, len(lines) - 1, reserve(2))


@plants("consume_unoccupied", offender={"step": 1, "group": "e0-p5-a0"})
def consumed_though_not_occupied(lines):
    del lines[of(lines, "occupy", "e0-p5-a0")]


@plants("consume_released", offender={"step": 1, "group": "e0-p5-a0"})
def consumed_though_released(lines):
    lines[of(lines, "occupy", "e0-p5-a0")] = {"seq": 0, "attempt": 0, **release("e0-p5-a0", "failed")}


@plants("consume_unknown", offender={"step": 3, "group": "e0-p8-a0"})
def consumed_though_never_reserved(lines):
    del lines[of(lines, "occupy", "e0-p8-a0")]
    del lines[of(lines, "reserve", "e0-p8-a0")]


@plants("consumed_twice", offender={"step": 4, "group": "e0-p0-a0"})
def group_of_an_earlier_step_consumed_again(lines):
    earlier, of_earlier = consumed(lines, 0)["groups"][0], trained(lines, 0)["trajectories"][:2]
    consumed(lines, 4)["groups"][1] = dict(earlier)
    del lines[of(lines, "reserve", "e0-p14-a0")]  # makes room for the group that stays
    trained(lines, 4)["trajectories"][2:] = [dict(m) | {"min": 4, "max": 4} for m in of_earlier]


@plants("consumed_twice", offender={"step": 4, "group": "e0-p11-a0"})
def group_twice_in_a_batch(lines):
    consumed(lines, 4)["groups"][1] = consumed(lines, 4)["groups"][0]
    del lines[of(lines, "reserve", "e0-p14-a0")]  # makes room for the group that stays
    del trained(lines, 4)["trajectories"][2:]


@plants("consume_spare", offender={"step": 3, "group": "e0-p9-a0"})
def spare_consumed(lines):
    del lines[nth(lines, "promote")]
    lines[:] = [line for line in lines if line.get("group") != "e0-p10-a0"]  # the one spare allowed


@plants("consume_version", offender={"step": 3, "group": "e0-p8-a0"})
def consumed_as_of_another_version(lines):
    consumed(lines, 3)["groups"][0]["version"] = 2


@plants("too_old", "consume_bound", "staleness", offender={"group": "e0-p8-a0"})
def consumed_beyond_the_bound(lines):
    insert(lines, of(lines, "occupy", "e0-p8-a0"), {"kind": "lower", "group": "e0-p8-a0", "version": 1})
    consumed(lines, 3)["groups"][0]["version"] = 1
    trained(lines, 3)["trajectories"][0]["min"] = 1


@plants("consume_order", offender={"step": 4, "group": "e0-p12-a0"})
def later_group_taken_first(lines):
    consumed(lines, 4)["groups"].reverse()


@plants("group_size", offender={"step": 1, "group": "e0-p2-a0"})
def group_with_a_member_missing(lines):
    del consumed(lines, 1)["groups"][0]["trajectories"][1]
    del trained(lines, 1)["trajectories"][1]


@plants("trajectory_twice", offender={"step": 3, "trajectory": "e0-p0-a0-m0"})
def trajectory_consumed_in_two_steps(lines):
    for member in (
        consumed(lines, 3)["groups"][0]["trajectories"][0],
        trained(lines, 3)["trajectories"][0],
    ):
        member["id"] = "e0-p0-a0-m0"


@plants("prompt_twice", offender={"step": 3, "group": "e0-p0-a1"})
def prompt_used_twice_in_an_epoch(lines):
    text = json.dumps(lines).replace("e0-p8-a0", "e0-p0-a1")
    lines[:] = json.loads(text)


@plants("prompt_twice", world=resumed)
def prompt_trained_again_after_a_resume(lines):
    text = json.dumps(lines).replace("e0-p4-a1", "e0-p0-a1")
    lines[:] = json.loads(text)


@plants("resume_ahead", world=resumed)
def resumed_ahead_of_what_was_trained(lines):
    del lines[nth(lines, "resume") + 1 : -1]
    lines[nth(lines, "resume")]["step"] = 6


@plants("consume_unknown", world=resumed, offender={"group": "e0-p8-a0"})
def group_voided_by_the_resume_consumed(lines):
    text = json.dumps(consumed(lines, -1)).replace("e0-p7-a1", "e0-p8-a0")
    lines[nth(lines, "consume", -1)] = json.loads(text)
    lines[nth(lines, "trained", -1)] = json.loads(
        json.dumps(trained(lines, -1)).replace("e0-p7-a1", "e0-p8-a0")
    )


@plants("end_steps")
def end_record_counts_more_steps(lines):
    lines[-1]["steps"] = 6


@plants("attempt_order")
def attempt_grows_without_a_resume(lines):
    for line in lines[10:]:
        line["attempt"] = 1


@plants("attempt_order", world=resumed)
def attempt_does_not_grow_with_a_resume(lines):
    for line in lines:
        line["attempt"] = 0


@plants("after_end")
def record_after_the_end(lines):
    insert(lines, len(lines), {"kind": "occupy", "group": "e0-p14-a0"})


@plants("start_twice")
def second_start(lines):
    lines.insert(4, lines[0])


@plants("no_start")
def first_line_missing(lines):
    del lines[0]


@plants("no_start")
def constants_out_of_range(lines):
    lines[0]["batch_size"] = 0


@plants("unreadable_line")
def unknown_kind(lines):
    insert(lines, 4, {"kind": "reserved", "group": X})


@plants("unreadable_line")
def field_of_a_wrong_type(lines):
    insert(lines, 4, {"kind": "lower", "group": X, "version": "0"})


@plants("unreadable_line")
def word_outside_its_set(lines):
    insert(lines, 4, {"kind": "release", "group": X, "reason": "stale"})


@pytest.mark.parametrize(("world", "plant", "expected", "offender"), PLANTS)
def test_a_planted_violation_is_caught_and_its_offender_named(tmp_path, world, plant, expected, offender):
    lines = copy.deepcopy(world())
    plant(lines)
    # a line that cannot be read has no number, so the numbers after it must not count it
    unreadable = expected == {"unreadable_line"}
    if unreadable:
        lines = [{**line, "seq": at - (at > 4)} for at, line in enumerate(lines)]
    report = audit(tmp_path, lines, renumber=not unreadable)
    assert codes(report) == expected
    for name, value in (offender or {}).items():
        assert any(getattr(violation, name) == value for violation in report.violations), name
        assert any(str(value) in violation.message for violation in report.violations)


def test_every_code_of_the_checker_is_planted_or_tested_below():
    sources = [path.read_text() for path in Path("staleflow/audit").glob("*.py")]
    planted = set().union(*(param.values[2] for param in PLANTS))
    below = {"missing_ledger", "empty_ledger", "seq_gap", "cut_ledger", "no_steps"}
    written = set(re.findall(r'(?:_say|say|findings\.add|_findings\.add)\(\s*"(\w+)"', "\n".join(sources)))
    written |= {"consumed_twice", "consume_released", "consume_unknown"}  # chosen from a dict
    assert written == planted | below


# The file as a whole ----------------------------------------------------------------------------------------


def test_a_missing_ledger_is_a_violation(tmp_path):
    assert codes(audit_ledger(tmp_path)) == {"missing_ledger"}
    assert codes(audit_ledger(tmp_path / "nothing.jsonl")) == {"missing_ledger"}


def test_an_empty_ledger_is_a_violation(tmp_path):
    assert codes(audit(tmp_path, [])) == {"empty_ledger"}
    assert codes(audit(tmp_path, [], tail='{"seq": 0')) == {"unreadable_line", "empty_ledger"}


def test_a_ledger_without_any_step_vouches_for_nothing(tmp_path):
    assert codes(audit(tmp_path, clean()[:3])) == {"no_steps"}


def test_a_line_lost_anywhere_leaves_a_gap(tmp_path):
    lines = clean()
    for lost in range(1, len(lines) - 1):
        kept = lines[:lost] + lines[lost + 1 :]
        report = audit(tmp_path, kept, renumber=False)
        gaps = [v for v in report.violations if v.code == "seq_gap"]
        assert [gap.line for gap in gaps] == [lost + 1]


def test_a_torn_line_is_tolerated_only_at_the_end_of_a_run_that_did_not_end(tmp_path):
    lines = clean()
    assert audit(tmp_path, lines[:-1], tail='{"seq": 5, "ki').violations == ()
    ended = audit(tmp_path, lines, tail='{"seq": 5, "ki')
    assert [(v.code, v.line) for v in ended.violations] == [("unreadable_line", len(lines) + 1)]


def test_a_ledger_cut_behind_its_checkpoint_is_a_violation(tmp_path):
    (tmp_path / "checkpoints" / "step_4").mkdir(parents=True)
    lines = clean()
    audit(tmp_path, lines)
    assert audit_ledger(tmp_path).violations == ()
    audit(tmp_path, lines[: nth(lines, "trained", 2) + 1])
    assert codes(audit_ledger(tmp_path)) == codes(audit_ledger(tmp_path / "ledger.jsonl")) == {"cut_ledger"}


def test_trajectories_without_a_generated_token_have_no_staleness(tmp_path):
    lines = clean()
    trained(lines, 0)["trajectories"][0] |= {"min": -1, "max": -1, "tokens": 0}
    report = audit(tmp_path, lines)
    assert report.violations == ()
    assert Counter(report.staleness_histogram).total() == 19
    trained(lines, 0)["trajectories"][0]["tokens"] = 1
    assert codes(audit(tmp_path, lines)) == {"version_range"}


def test_the_command_exits_with_3_on_violations_and_imports_no_code_of_the_protocol(tmp_path):
    lines = clean()
    audit(tmp_path, lines)
    run = [sys.executable, "-X", "importtime", "-m", "staleflow.audit", str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "0 violations" in done.stdout
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert {name for name in imported if name.startswith("staleflow") and "audit" not in name} == {
        "staleflow"
    }
    assert not imported & {"numpy", "torch", "pydantic", "ray"}

    trained(lines, 3)["trajectories"][0]["min"] = 1
    audit(tmp_path, lines)
    done = subprocess.run([*run, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert json.loads(done.stdout)["violations"][0]["code"] == "staleness"
