"""`staleflow explain`: trajectories, groups and steps of scripted runs, line by line."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_run import ScriptedRun, left

from staleflow.coordination.actions import Admission
from staleflow.coordination.events import Rejection
from staleflow.errors import RunFolderError, UserError
from staleflow.protocol.records import Lower, Occupy, Release, Reserve, Resume, TrainedMember
from staleflow.reporting.explain import explain

RESERVE_0 = Admission(kind="reserve", version=0)


def text(*lines: str) -> str:
    return "\n".join(lines)


def trained(id_: str, low: int, high: int, tokens: int) -> TrainedMember:
    return TrainedMember(id=id_, min=low, max=high, tokens=tokens, hash="")


@pytest.fixture
def moved(tmp_path: Path) -> ScriptedRun:
    """`g-m0` is refused, migrated, lost with its instance and finished on a third; its step waits for it."""
    run = ScriptedRun(tmp_path)
    run.at(1.0)
    run.journal.pushed(0)
    for instance in ("i0", "i1", "i2"):
        run.join(instance)
    run.draw("g")
    run.at(1.5)
    run.record(Reserve(group="g", version=0, spare=False))
    run.route("i0", 1, "g-m0", admission=RESERVE_0, reason="gain 80 tokens/s")
    run.route("i1", 1, "g-m1")
    run.at(2.0)
    refused = Rejection(seq=1, trajectory_id="g-m0", reason="the KV cache is full")
    run.report("i0", 1, rejections=(refused,))
    run.report("i1", 1, running=1, kv_tokens=10)
    run.at(2.25)
    run.route("i1", 2, "g-m0", reason="gain 70 tokens/s")
    run.at(2.5)
    run.report("i1", 2, running=2, kv_tokens=30)
    run.at(3.0)
    run.interrupt("i1", 3, "g-m0", length=14, reason="migration: 2 wait on i1, there is room on i2")
    run.at(3.25)
    run.report(
        "i1",
        3,
        interrupted=(left("g-m0", 16, 0),),
        finished=(left("g-m1", 20, 0, "stop"),),
        runs={"g-m0": ((0, 6),), "g-m1": ((0, 10),)},
    )
    run.journal.scored("g-m1", 1.0, "ok")
    run.at(3.5)
    run.route("i2", 1, "g-m0", length=16)
    run.at(3.75)
    run.report("i2", 1, running=1, kv_tokens=16)
    run.at(4.0)
    run.lose("i2", (("g-m0", 18),), "killed")
    run.route("i0", 2, "g-m0", length=18, reason="gain 90 tokens/s")
    run.at(4.5)
    run.report("i0", 2, running=1, kv_tokens=18)
    run.pull("i0", 3, version=1, reason="unlocks 4 trajectories")
    run.at(5.0)
    run.report("i0", 3, version=1, running=1, kv_tokens=20, pull_seconds=0.3)
    run.at(6.0)
    run.report("i0", 3, version=1, pull_seconds=0.3, finished=(left("g-m0", 24, 0, "length"),),
               runs={"g-m0": ((0, 9), (1, 5))})  # fmt: skip
    run.at(6.5)
    run.journal.scored("g-m0", 0.0, "timeout")
    run.record(Occupy(group="g"))
    run.consume(0, ("g", 0), waited=5.5)
    run.at(8.0)
    run.trained(0, trained("g-m0", 0, 1, 14), trained("g-m1", 0, 0, 10), update_s=1.25, push_s=0.25)
    run.close()
    return run


def test_the_history_of_a_trajectory_that_was_refused_migrated_and_lost(moved: ScriptedRun) -> None:
    assert explain(moved.folder, "g-m0") == text(
        "trajectory g-m0 of group g",
        "      1.00 s  drawn: prompt of 10 tokens, group of 2",
        "      1.50 s  routed to i0 with 10 tokens after 0.50 s in the trajectory server (gain 80 tokens/s); "
        "reserves its group at V = 0, for steps 0 to 1",
        "      2.00 s  i0 refused it: the KV cache is full; returned to the trajectory server",
        "      2.25 s  routed to i1 with 10 tokens after 0.25 s in the trajectory server (gain 70 tokens/s)",
        "      2.50 s  accepted by i1 at version 0",
        "      3.00 s  Interrupt sent to i1: migration: 2 wait on i1, there is room on i2",
        "      3.25 s  returned to the trajectory server with 16 tokens: 6 by version 0",
        "      3.50 s  routed to i2 with 16 tokens after 0.25 s in the trajectory server",
        "      3.75 s  accepted by i2 at version 0",
        "      4.00 s  i2 was lost (killed): returned to the trajectory server with 18 tokens",
        "      4.00 s  routed to i0 with 18 tokens after 0.00 s in the trajectory server (gain 90 tokens/s)",
        "      4.50 s  accepted by i0 at version 0",
        "      5.00 s  i0 pulled version 1 in 0.30 s; generation continues there",
        "      6.00 s  finished on i0 with 24 tokens (length): 9 by version 0, 5 by version 1",
        "      6.50 s  scored 0 (timeout), 0.50 s after it finished",
        "      6.50 s  its group is complete; the last reward was its own",
        "      6.50 s  handed to the trainer in the batch of step 0 (V = 0, η = 1)",
        "      8.00 s  trained in step 0 with staleness 0 (η = 1): 14 tokens of versions 0 to 1",
        "summary: trained in step 0 with staleness 0; 1.00 s waiting in the trajectory server; "
        "4.00 s generating on i0, i1, i2; 0.50 s being scored",
    )


def test_the_other_member_was_there_first_and_waited(moved: ScriptedRun) -> None:
    assert explain(moved.folder, "g-m1").splitlines()[2:] == [
        "      1.50 s  routed to i1 with 10 tokens after 0.50 s in the trajectory server; "
        "its group is reserved at V = 0, for steps 0 to 1",
        "      2.00 s  accepted by i1 at version 0",
        "      3.25 s  finished on i1 with 20 tokens (stop): 10 by version 0",
        "      3.25 s  scored 1, 0.00 s after it finished",
        "      6.50 s  its group is complete; the last reward was that of g-m0",
        "      6.50 s  handed to the trainer in the batch of step 0 (V = 0, η = 1)",
        "      8.00 s  trained in step 0 with staleness 0 (η = 1): 10 tokens of version 0",
        "summary: trained in step 0 with staleness 0; 0.50 s waiting in the trajectory server; "
        "1.75 s generating on i1; 3.25 s waiting for the rest of its batch",
    ]


def test_a_group_is_its_members_in_short(moved: ScriptedRun) -> None:
    assert explain(moved.folder, "g").splitlines() == [
        "group g: 2 trajectories, V = 0",
        "      1.00 s  drawn",
        "      1.50 s  reserved",
        "      6.50 s  complete",
        "  g-m0: trained in step 0 with staleness 0; 1.00 s waiting in the trajectory server; "
        "4.00 s generating on i0, i1, i2; 0.50 s being scored",
        "  g-m1: trained in step 0 with staleness 0; 0.50 s waiting in the trajectory server; "
        "1.75 s generating on i1; 3.25 s waiting for the rest of its batch",
    ]


def test_a_step_says_for_whom_it_waited_and_what_that_one_did_meanwhile(moved: ScriptedRun) -> None:
    expected = text(
        "step 0: 1 group, 2 trajectories",
        "      1.00 s  the trainer has weights 0 and is idle; 0 of 1 groups are complete",
        "      6.50 s  group g (V = 0) is complete, last with g-m0; since the trainer was idle: "
        "0.50 s waiting in the trajectory server, "
        "0.50 s generating on i0, 0.25 s waiting in the trajectory server, 1.00 s generating on i1, "
        "0.25 s waiting in the trajectory server, 0.50 s generating on i2, 2.00 s generating on i0, "
        "0.50 s being scored",
        "      6.50 s  the batch is handed out: the trainer waited 5.50 s",
        "      8.00 s  trained: 1.25 s update, 0.25 s push",
        "verdict: step 0 waited 5.50 s, last for g-m0, which could start only when the trainer was "
        "idle: 2.00 s generating on i0.",
    )
    assert explain(moved.folder, "step 0") == expected
    assert explain(moved.folder, "step=0") == expected


def two_steps(run: ScriptedRun) -> None:
    """Step 0 with g; h is complete while it trains, or later."""
    run.journal.pushed(0)
    run.join("i0")
    run.draw("g", 1)
    run.draw("h", 1)
    for seq, group in enumerate(("g", "h"), start=1):
        run.record(Reserve(group=group, version=0, spare=False))
        run.route("i0", seq, f"{group}-m0", admission=RESERVE_0)
    run.at(1.0)
    run.report("i0", 2, finished=(left("g-m0", 20, 0, "stop"),))
    run.journal.scored("g-m0", 1.0, "ok")
    run.record(Occupy(group="g"))
    run.consume(0, ("g", 0), waited=1.0, members=1)


def test_a_step_whose_batch_was_there_did_not_wait(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, group_size=1)
    two_steps(run)
    run.at(2.0)
    run.report("i0", 2, finished=(left("h-m0", 20, 0, "stop"),))
    run.journal.scored("h-m0", 1.0, "ok")
    run.record(Occupy(group="h"))
    run.at(3.0)
    run.trained(0, trained("g-m0", 0, 0, 10), update_s=1.5, push_s=0.5)
    run.consume(1, ("h", 0), waited=0.0, members=1)
    run.close()
    assert explain(tmp_path, "step 1") == text(
        "step 1: 1 group, 1 trajectory",
        "      3.00 s  the trainer has weights 1 and is idle; 1 of 1 groups are complete",
        "      3.00 s  the batch is handed out: the trainer waited 0.00 s",
        "verdict: step 1 did not wait: its batch was complete before the trainer was idle.",
    )
    assert explain(tmp_path, "h-m0").splitlines()[-1] == (
        "summary: handed to the trainer in step 1; 2.00 s generating on i0; "
        "1.00 s waiting for the rest of its batch"
    )


def test_a_step_that_is_waited_for_at_the_end_names_who_is_missing(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, group_size=1)
    two_steps(run)
    run.at(3.0)
    run.trained(0, trained("g-m0", 0, 0, 10), update_s=1.5, push_s=0.5)
    run.at(7.0)
    run.report("i0", 2, running=1)
    run.close()
    assert explain(tmp_path, "step 1") == text(
        "step 1 has not been handed out: the trainer has been idle for 4.00 s",
        "  0 groups complete of the 1 in a batch",
        "  group h (V = 0): h-m0 generating on i0 for 7.00 s",
        "verdict: step 1 waits: 1 trajectory missing, 1 of them generating on i0.",
    )


def test_a_wait_that_began_long_before_says_since_when_and_filtered_groups_are_counted(
    tmp_path: Path,
) -> None:
    run = ScriptedRun(tmp_path, group_size=1)
    two_steps(run)
    run.draw("f", 1)
    run.record(Reserve(group="f", version=0, spare=False))
    run.at(3.0)
    run.trained(0, trained("g-m0", 0, 0, 10), update_s=1.5, push_s=0.5)
    run.at(4.0)
    run.record(Release(group="f", reason="filtered"))
    run.journal.released(["f-m0"], "filtered")
    run.at(5.0)
    run.report("i0", 2, finished=(left("h-m0", 20, 0, "stop"),))
    run.journal.scored("h-m0", 1.0, "ok")
    run.record(Occupy(group="h"))
    run.consume(1, ("h", 0), waited=2.0, members=1)
    run.close()
    assert explain(tmp_path, "step 1").splitlines()[-1] == (
        "verdict: step 1 waited 2.00 s, last for h-m0: 2.00 s generating on i0 (since 0.00 s); "
        "1 group filtered meanwhile and replaced."
    )
    assert explain(tmp_path, "f-m0").splitlines()[-2:] == [
        "      4.00 s  released: all rewards of its group were equal, so it would have taught nothing",
        "summary: released: filtered; 3.00 s waiting in the trajectory server",
    ]


def test_lowered_aborted_given_up_and_cut_off_are_told(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, bound=3, group_size=4)
    run.join("i0", version=1)
    run.draw("g", 4)
    run.record(Reserve(group="g", version=2, spare=False))
    run.record(Lower(group="g", version=1))
    run.route("i0", 1, "g-m0", admission=Admission(kind="lower", version=1))
    run.route("i0", 2, "g-m1")
    run.abort("i0", 3, "g-m0", length=30, reason="surplus member")
    run.journal.released(["g-m0"], "aborted")
    run.journal.gave_up("g-m2", "no new token for 60 s on i0")
    run.journal.scored("g-m2", 0.0, "failed")
    run.abort("i0", 4, "g-m1", length=30, reason="a straggler")
    run.journal.truncated("g-m1", "step 2 waits for it")
    run.journal.external("g-m3", 30.0)
    run.journal.given("g-m3", 25)
    run.close()
    told = {m: [line[14:] for line in explain(tmp_path, f"g-m{m}").splitlines()[2:-1]] for m in range(4)}
    assert told == {
        0: [
            "routed to i0 with 10 tokens after 0.00 s in the trajectory server; "
            "lowers its group to V = 1, for steps 0 to 4",
            "aborted on i0: surplus member",
            "released: a surplus member",
        ],
        1: [
            "routed to i0 with 10 tokens after 0.00 s in the trajectory server; "
            "its group is reserved at V = 1, for steps 0 to 4",
            "aborted on i0: a straggler",
            "truncated: step 2 waits for it",
        ],
        2: ["given up, and masked in training: no new token for 60 s on i0",
            "scored 0 (failed), 0.00 s after it finished"],
        3: ["waits for its environment, at most 30 s", "its environment answered: continues with 25 tokens"],
    }  # fmt: skip


def test_a_trajectory_that_took_anothers_place_is_found_by_its_own_id(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, group_size=1)
    run.join("i0")
    run.draw("g", 1)
    run.at(2.0)
    run.journal.resampled("g-m0", "g-m1", "step 0 waits for it")
    run.journal.resampled("g-m1", "g-m2", "again")
    run.close()
    assert explain(tmp_path, "g-m2") == text(
        "trajectory g-m2 of group g",
        "      2.00 s  replaces g-m1 in its group, from the prompt on",
        "summary: still waiting in the trajectory server",
    )
    assert explain(tmp_path, "g-m0").splitlines()[-1] == (
        "summary: dropped for g-m1; 2.00 s waiting in the trajectory server"
    )


def test_a_killed_attempt_leaves_trajectories_that_the_next_one_voids(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, group_size=1)
    two_steps(run)
    run.at(3.0)
    run.trained(0, trained("g-m0", 0, 0, 10), update_s=1.5, push_s=0.5)
    run.resume(0)
    run.record(Resume(step=0))
    run.at(0.5)
    run.journal.pushed(0)
    run.draw("g2", 1)
    run.close()
    assert explain(tmp_path, "h-m0").splitlines()[-2:] == [
        "      3.00 s  attempt 0 ended; attempt 1 began with step 0 and draws the prompt again",
        "summary: void; 3.00 s generating on i0",
    ]
    assert explain(tmp_path, "g-m0").splitlines()[-2] == (
        "      3.00 s  its training is void: attempt 1 resumed at step 0, before it"
    )
    assert explain(tmp_path, "g2-m0").splitlines()[0] == "trajectory g2-m0 of group g2, attempt 1"


def retried(run: ScriptedRun) -> None:
    """g-m0-r1 has taken the place of g-m0."""
    run.journal.pushed(0)
    run.join("i0")
    run.draw("g", 1)
    run.record(Reserve(group="g", version=0, spare=False))
    run.route("i0", 1, "g-m0", admission=RESERVE_0)
    run.at(2.0)
    run.abort("i0", 2, "g-m0", length=30, reason="straggler of step 0: retry")
    run.journal.resampled("g-m0", "g-m0-r1", "straggler of step 0: retry")
    run.route("i0", 3, "g-m0-r1")
    run.at(3.0)
    run.report("i0", 3, running=1)


def test_a_step_does_not_wait_for_one_whose_place_was_taken(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, group_size=1)
    retried(run)
    run.close()
    assert explain(tmp_path, "step 0").splitlines()[2:] == [
        "  group g (V = 0): g-m0-r1 generating on i0 for 1.00 s",
        "verdict: step 0 waits: 1 trajectory missing, 1 of them generating on i0.",
    ]


def test_a_batch_counts_the_trajectories_that_are_trained_on(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, group_size=1)
    retried(run)
    run.report("i0", 3, finished=(left("g-m0-r1", 20, 0, "stop"),))
    run.journal.scored("g-m0-r1", 1.0, "ok")
    run.record(Occupy(group="g"))
    run.consume(0, ("g", 0), waited=3.0, members=1)
    run.close()
    assert explain(tmp_path, "step 0").startswith("step 0: 1 group, 1 trajectory\n")


def test_a_step_that_is_waited_for_after_a_resume_does_not_wait_for_the_attempt_before(
    tmp_path: Path,
) -> None:
    run = ScriptedRun(tmp_path, group_size=1)
    two_steps(run)
    run.resume(0)
    run.record(Resume(step=0))
    run.journal.pushed(0)
    run.join("i0")
    run.draw("k", 1)
    run.at(1.0)
    run.journal.evaluated(0, 0.5)
    run.close()
    assert explain(tmp_path, "step 0").splitlines()[1:] == [
        "  0 groups complete of the 1 in a batch",
        "  group k (not reserved): k-m0 waiting in the trajectory server for 1.00 s",
        "verdict: step 0 waits: 1 trajectory missing, 1 of them waiting in the trajectory server.",
    ]


def test_what_is_not_there_is_refused_with_the_nearest(moved: ScriptedRun) -> None:
    with pytest.raises(UserError, match=r"no trajectory or group 'g-m7' in .*: give an id such as g-m"):
        explain(moved.folder, "g-m7")
    with pytest.raises(UserError, match=r"step 3 was not handed to the trainer .*: the last step was 0"):
        explain(moved.folder, "step 3")
    with pytest.raises(UserError, match="a number from 0 on, not 'one'"):
        explain(moved.folder, "step one")


def test_a_run_without_a_journal_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"has no journal\.jsonl.*telemetry\.journal"):
        explain(tmp_path, "step 0")
    with pytest.raises(RunFolderError, match="there is no run folder"):
        explain(tmp_path / "none", "g-m0")
    ScriptedRun(tmp_path).close()
    with pytest.raises(UserError, match="no trajectory was drawn"):
        explain(tmp_path, "g-m0")
    with pytest.raises(UserError, match="no step has started"):
        explain(tmp_path, "step 0")
