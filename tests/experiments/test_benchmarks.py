"""The studies that time something: each runs small, and what it shows was measured, not declared."""

from __future__ import annotations

from typing import get_type_hints

import pytest

from staleflow.cli.measuring_commands import experiment
from staleflow.errors import ConfigError
from staleflow.experiments import (
    engines,
    generate_beside_engine,
    protocol_rate,
    simulator,
    transfer,
    whole_step,
)
from staleflow.experiments.study import STUDIES, Options, Result, load_study

QUICK = Options(quick=True, run=None, say=lambda _: None)


def value(result: Result, name: str) -> float:
    (finding,) = [finding for finding in result.findings if finding.name == name]
    return finding.value


def test_every_benchmark_is_a_study_by_name_and_a_mistyped_one_is_suggested() -> None:
    names = ("engines", "whole-step", "simulator", "protocol", "weights")
    assert [load_study(name).name for name in names] == list(names)
    assert set(names) < set(STUDIES)
    with pytest.raises(ConfigError, match="did you mean simulator"):
        load_study("simulater")


def test_the_help_names_every_study() -> None:
    argument = get_type_hints(experiment, include_extras=True)["name"].__metadata__[0]
    assert argument.help.split(", or ")[0].split(", ") == list(STUDIES)


def test_protocol_and_weights_are_those_of_the_overhead_study() -> None:
    result = load_study("protocol").script(QUICK)
    with_ledger, without = (
        value(result, f"protocol transitions, {kind}") for kind in ("with ledger", "without ledger")
    )
    assert 0 < with_ledger < without
    assert [f.goal for f in result.findings] == [protocol_rate.GOALS.get(k) for k in protocol_rate.KINDS]
    assert value(load_study("weights").script(QUICK), "push and pull, of two plain copies") > 0


def test_notes_keep_the_best_the_wall_time_and_the_plain_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"per_cpu_s": 2_000, "per_cpu_s_best": 3_000, "per_wall_s": 1_000, "goal": None}
    monkeypatch.setattr(protocol_rate, "measure", lambda *_: dict.fromkeys(protocol_rate.KINDS, rates))
    for finding in protocol_rate.findings(QUICK):
        assert finding.value == 2_000
        assert finding.note.endswith("; best 3,000, median per second of wall time 1,000")
    copies = {"ratio": 1.5, "plain_s": 0.004, "push_pull_s": 0.006}
    monkeypatch.setattr(transfer, "measure", lambda *_: copies)
    ratio, pair = transfer.findings(QUICK)
    assert (ratio.value, pair.value) == (1.5, pytest.approx(6.0))
    assert ratio.note.endswith("; two plain copies: 4 ms")


def test_the_simulator_counts_whole_trajectories() -> None:
    row = simulator.measure((64, 1, 1.0))
    assert row["trajectories"] >= 128 * 16, "a step of 128 groups of 16"
    assert row["per_cpu_s"] > 0
    assert row["peak_mb"] >= row["peak_mb_early"] > 0


def test_generate_and_the_engine_make_the_tokens_that_are_wanted() -> None:
    rows = generate_beside_engine.measure((2,), tokens=8, rounds=1)
    assert [(row[0], row[1]) for row in rows] == [(2, "equal"), (2, "mixed")]
    assert all(row[4] == pytest.approx(float(row[2]) / float(row[3])) for row in rows)


def test_without_vllm_the_engine_is_shown_alone_and_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(generate_beside_engine, "measure", lambda *_: [(1, "equal", 10.0, 5.0, 2.0)])
    result = engines.measure_engines(QUICK)
    assert [table.title for table in result.tables] == ["Beside transformers.generate"]
    assert any("vLLM is not installed" in note for note in result.notes)
    assert value(result, "torch engine of transformers.generate, 1 equal") == 2.0


def test_without_trl_a_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="make trl"):
        whole_step.measure_whole_step(QUICK)


def test_the_faster_round_of_each_system_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([5.0, 7.0, 1.0, 2.0, 3.0, 4.0, 6.0, 6.0, 9.0, 1.0, 1.0, 8.0])

    def figures(*_: object, **__: object) -> dict[str, float]:
        return {"tokens_per_s": next(rates)}

    monkeypatch.setattr(whole_step, "trl_process", figures)
    monkeypatch.setattr(whole_step, "staleflow_rate", figures)
    best = whole_step.best_rounds(steps=1, rounds=2)
    assert [f["tokens_per_s"] for f in best.values()] == [6.0, 7.0, 9.0, 2.0, 3.0, 8.0]
