"""Spare groups and redundant members over kills and resumes."""

from __future__ import annotations

from pathlib import Path

from toy import ToyRun, toy_config
from whole_runs import Killed, every_poll, kill, resume, uses

from staleflow.audit import audit_ledger
from staleflow.protocol.records import Release
from staleflow.runtime.start import StartPoint
from staleflow.storage.ledger import read_ledger


def test_spares_that_expired_or_were_open_at_a_kill_come_again(model: Path, tmp_path: Path) -> None:
    """F19, F20: 23 prompts, two kills: each is trained once, whatever expired or was lost on the way."""
    config = toy_config(
        model,
        tmp_path,
        "redundancy.groups=2",
        "redundancy.members=1",
        "data.size=23",
        "data.epochs=1",
        "run.steps=50",
        "checkpoint.every=1",
        "training.dynamic_sampling=false",
    )
    start: StartPoint | None = None
    for polls in (18, 26):
        run = ToyRun(config, tmp_path, start=start)

        def look(poll: int, run: ToyRun = run, last: int = polls) -> None:
            if poll == last:
                kill(run)

        every_poll(run, look)
        try:
            raise AssertionError(f"ended before the kill: {run.run()}")
        except Killed:
            start = resume(config, tmp_path)
    run = ToyRun(config, tmp_path, start=start)
    assert run.run() == "exhausted"
    report = audit_ledger(run.ledger)
    assert report.violations == ()
    assert report.attempts == 3
    assert any(isinstance(r, Release) and r.reason == "expired" for _, _, r in read_ledger(run.ledger))
    trained, _ = uses(run.ledger)
    assert trained == {f"e0-p{n}": 1 for n in range(23)}
