"""What a resume must not lose, repeat or let through (F19, F20, F21, F23), and how the data end (F17)."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from toy import ToyRun, toy_config
from whole_runs import Killed, every_poll, kill, records_of, resume, rows, use_of, uses

from staleflow.audit import audit_ledger
from staleflow.coordination.policies import POLICIES
from staleflow.protocol.records import Consume, End, Resume
from staleflow.runtime.start import StartPoint


def killed_at(run: ToyRun, poll: int) -> bool:
    """Run until it ends (False) or is killed before that poll (True)."""

    def look(now: int) -> None:
        if now == poll:
            kill(run)

    every_poll(run, look)
    try:
        run.run()
    except Killed:
        return True
    return False


MIXES = [
    (
        f"coordination.routing.strategy={routing}",
        f"coordination.synchronization.strategy={synchronization}",
        f"coordination.migration.strategy={migration}",
    )
    for routing, synchronization, migration in product(
        ("waterfall", "naive"), ("selective", "naive"), ("cost_aware", "naive")
    )
]
BASELINES = [(f"coordination.policy={policy}",) for policy in POLICIES if policy != "staleflow"]


@pytest.mark.parametrize(
    "coordination", [*MIXES, *BASELINES], ids=lambda c: ",".join(c).replace("coordination.", "")
)
@pytest.mark.parametrize(
    ("on_pull", "shuffle", "filtering"), [("recompute", "true", "true"), ("keep_kv", "false", "false")]
)
def test_in_every_mode_kills_neither_skip_nor_repeat_a_prompt(
    coordination: tuple[str, ...],
    on_pull: str,
    shuffle: str,
    filtering: str,
    model: Path,
    tmp_path: Path,
) -> None:
    """F19, F21: each policy and each mix of strategies, both pull modes, shuffled or not, filtering or not;
    killed at five moments, every prompt of both epochs is trained or filtered exactly once."""
    config = toy_config(
        model,
        tmp_path,
        "staleness.bound=2",
        "data.size=16",
        "data.epochs=2",
        "run.steps=50",
        "checkpoint.every=2",
        *coordination,
        f"rollout.on_pull={on_pull}",
        f"data.shuffle={shuffle}",
        f"training.dynamic_sampling={filtering}",
    )
    start: StartPoint | None = None
    kills = 0
    for poll in (3, 26, 33, 19, 40, 0):
        if not killed_at(ToyRun(config, tmp_path, start=start), poll):
            break
        kills += 1
        start = resume(config, tmp_path)
    ledger = tmp_path / "ledger.jsonl"
    assert records_of(ledger, End)[-1].reason == "exhausted"
    assert kills >= 4
    trained, filtered = uses(ledger)
    assert trained + filtered == {f"e{e}-p{p}": 1 for e in range(2) for p in range(16)}
    assert (len(filtered) > 0) == (filtering == "true")
    report = audit_ledger(ledger)
    assert report.violations == ()
    assert (report.max_staleness or 0) <= 2


@pytest.mark.parametrize("moment", ["at the save", "in the next step"])
def test_what_had_been_generated_ahead_comes_again_after_a_resume(
    moment: str, model: Path, tmp_path: Path
) -> None:
    """F20: prompts 0..7, batch 2, four groups generated ahead; saved after step 1 and killed with 2 and 3
    finished and untrained. They are trained next, and every prompt once."""
    config = toy_config(
        model,
        tmp_path,
        "data.size=8",
        "data.shuffle=false",
        "data.epochs=1",
        "data.batch_size=2",
        "rollout.fake.lengths.kind=fixed",
        "run.steps=50",
        "checkpoint.every=1",
        "training.dynamic_sampling=false",
    )
    run = ToyRun(config, tmp_path)
    backend, buffer = run.loop._backend, run.loop._control._buffer
    save = backend.save
    ahead: list[str] = []

    def save_and_die(version: int) -> None:
        save(version)
        ahead.extend(g for g in buffer.groups() if buffer.entry(g).occupied)
        if moment == "at the save":
            kill(run)

    backend.save = save_and_die  # type: ignore[method-assign]
    every_poll(run, lambda _: kill(run) if ahead else None)
    with pytest.raises(Killed):
        run.run()
    assert [use_of(group) for group in ahead] == ["e0-p2", "e0-p3"]

    again = ToyRun(config, tmp_path, start=resume(config, tmp_path))
    assert again.run() == "exhausted"
    assert records_of(again.ledger, Resume) == [Resume(step=1)]
    next_batch = [c for c in records_of(again.ledger, Consume) if c.buffer == 1][-1]
    assert [g.group for g in next_batch.groups] == ["e0-p2-a1", "e0-p3-a1"]
    assert uses(again.ledger)[0] == {f"e0-p{p}": 1 for p in range(8)}
    assert audit_ledger(again.ledger).violations == ()


@pytest.mark.parametrize("polls", [None, 24])
def test_two_epochs_of_six_prompts_are_twelve_uses_also_across_a_resume(
    polls: int | None, model: Path, tmp_path: Path
) -> None:
    """F23, asynchronous (η = 1); `polls`: when the first attempt is killed, in the second epoch."""
    config = toy_config(
        model,
        tmp_path,
        "data.size=6",
        "data.epochs=2",
        "run.steps=50",
        "checkpoint.every=1",
        "training.dynamic_sampling=false",
    )
    run = ToyRun(config, tmp_path)
    if polls is not None:
        assert killed_at(run, polls)
        assert len(uses(run.ledger)[0]) > 6
        run = ToyRun(config, tmp_path, start=resume(config, tmp_path))
    assert run.run() == "exhausted"
    trained, _ = uses(run.ledger)
    assert trained == {f"e{e}-p{p}": 1 for e in range(2) for p in range(6)}
    assert audit_ledger(run.ledger).violations == ()


@pytest.mark.parametrize(
    ("policy", "sizes", "final"), [("train", [4, 3], True), ("drop", [4], False), ("pad", [4, 4], False)]
)
def test_seven_prompts_in_batches_of_four_end_as_stated_and_it_is_reported(
    policy: str, sizes: list[int], final: bool, model: Path, tmp_path: Path
) -> None:
    """F17: one epoch; what is dropped is counted, the smaller batch is marked as final."""
    config = toy_config(
        model,
        tmp_path,
        "data.size=7",
        "data.batch_size=4",
        "data.epochs=1",
        "run.steps=50",
        f"data.last_batch={policy}",
        "training.dynamic_sampling=false",
    )
    run = ToyRun(config, tmp_path)
    assert run.run() == "exhausted"
    consumed = records_of(run.ledger, Consume)
    assert [len(c.groups) for c in consumed] == sizes
    assert [c.final for c in consumed] == [False] * (len(sizes) - 1) + [final]
    (summary,) = rows(run, "summary")
    assert (summary["run/reason"], summary["run/steps"]) == ("exhausted", len(sizes))
    assert (int(summary["tokens/discarded"]) > 0) == (policy == "drop")
    assert audit_ledger(run.ledger).violations == ()
