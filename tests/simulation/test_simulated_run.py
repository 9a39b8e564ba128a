"""A simulated run is a run: its folder has what a real run's has, and everything that reads one reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from staleflow.audit import audit_ledger
from staleflow.cli.main import app
from staleflow.config import Config, load_config
from staleflow.errors import EXIT_INTERRUPTED, RunFolderError, UserError
from staleflow.reporting.explain import explain
from staleflow.reporting.report import comparison
from staleflow.runtime.launch_simulation import simulate_run
from staleflow.runtime.session import ThreadSession
from staleflow.storage.journal import read_journal

SMALL = (
    "run.name=s",
    "run.steps=5",
    "data.batch_size=4",
    "data.group_size=4",
    "rollout.max_new_tokens=400",
    "simulation.prompt_tokens=50",
    "simulation.rollout_gpus=4",
    "simulation.training_gpus=12",
    "simulation.latencies.progress_interval_s=2",
    "telemetry.console=off",
)
OWN = {"simulation/wall_s", "simulation/speed"}
"""Real time: all that two simulated runs of one config differ in."""
BALANCE = ("trained", "filtered", "aborted", "discarded", "in_flight")


@pytest.fixture
def with_report() -> None:
    """The test looks at report.html or trace.json; the others do without, which takes most of the time."""


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "with_report" not in request.fixturenames:
        for name in ("_write_report", "_write_trace"):
            monkeypatch.setattr(f"staleflow.runtime.launch.{name}", lambda *_: None)


def config(folder: Path, *overrides: str) -> Config:
    return load_config([], [*SMALL, f"run.output_dir={folder}", *overrides], {}, simulated=True)


def simulated(folder: Path, *overrides: str) -> Path:
    assert simulate_run(config(folder, *overrides), clean=False) == 0
    return folder / "s"


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


@pytest.mark.usefixtures("with_report")
def test_the_folder_has_what_a_real_run_leaves_and_the_rows_its_names(tmp_path: Path) -> None:
    from staleflow.runtime.launch import launch

    real = load_config(
        [],
        [
            *(o for o in SMALL if not o.startswith("run.name")),
            f"run.output_dir={tmp_path}",
            "run.name=real",
            "run.steps=2",
            "cluster.runtime=inline",
            "rollout.engine=fake",
            "rollout.max_new_tokens=40",
            "evaluation.every=0",
            "telemetry.wandb.mode=disabled",
            "training.dynamic_sampling=false",
            "rollout.fake.seconds_per_step=0.1",
        ],
        {},
    )
    assert launch(real, resume=False, clean=False) == 0
    folder = simulated(tmp_path, "rollout.max_new_tokens=40", "simulation.solved=0.5")
    files = {p.name for p in folder.iterdir() if p.is_file()}
    assert files - {p.name for p in (tmp_path / "real").iterdir()} == {"simulation.json"}
    assert {"config.yaml", "ledger.jsonl", "journal.jsonl", "metrics.jsonl", "trace.json"} < files
    ours, theirs = rows(folder, "train")[-1], rows(tmp_path / "real", "train")[-1]
    learned = {name for name in theirs if name.startswith("train/") and name != "train/step"}
    assert set(theirs) - learned == set(ours) | {"coord/cost_model_error"}
    summaries = [rows(where, "summary")[0] for where in (folder, tmp_path / "real")]
    assert {k for k in summaries[0] if "lengths/" not in k} - OWN == {
        k for k in summaries[1] if "lengths/" not in k
    }
    assert {"instance/instance-0/running", "trainer/busy"} <= set(rows(folder, "instances")[0])


def test_the_same_seed_gives_the_same_ledger_and_rows(tmp_path: Path) -> None:
    first, second = (simulated(tmp_path / name) for name in ("a", "b"))
    assert (first / "ledger.jsonl").read_bytes() == (second / "ledger.jsonl").read_bytes()
    assert (first / "journal.jsonl").read_bytes() == (second / "journal.jsonl").read_bytes()
    kept = [
        [{k: v for k, v in row.items() if k not in OWN} for kind in ("train", "instances", "summary")
         for row in rows(folder, kind)]
        for folder in (first, second)
    ]  # fmt: skip
    assert kept[0] == kept[1]
    other = simulated(tmp_path / "c", "run.seed=1")
    assert (first / "ledger.jsonl").read_bytes() != (other / "ledger.jsonl").read_bytes()


@pytest.mark.parametrize(
    "overrides",
    [
        ("redundancy.groups=3",),
        ("redundancy.members=2",),
        ("coordination.stragglers.action=retry",),
        ("coordination.stragglers.action=truncate",),
        ("simulation.solved=0.6",),
        ("simulation.outages=[{at: 2, instance: 1, down_s: 5}]", "staleness.bound=2"),
        ("data.epochs=1", "data.size=18", "simulation.solved=0.6", "data.last_batch=pad"),
        *((f"coordination.policy={name}",) for name in ("sync", "one_step", "strict", "strict_queue")),
    ],
    ids=lambda overrides: overrides[0],
)
def test_every_token_is_accounted_for_and_the_audit_is_clean(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    folder = simulated(tmp_path, *overrides)
    assert audit_ledger(folder).ok
    train, (summary,) = rows(folder, "train"), rows(folder, "summary")
    for row in (*train, summary):
        assert row["tokens/generated"] == sum(row[f"tokens/{fate}"] for fate in BALANCE)
        assert min(row[f"tokens/{fate}"] for fate in BALANCE) >= 0
    assert summary["tokens/in_flight"] == 0
    assert summary["tokens/trained"] == sum(
        t["tokens"]
        for record in map(json.loads, (folder / "ledger.jsonl").read_text().splitlines())
        if record["kind"] == "trained"
        for t in record["trajectories"]
    )
    waiting = sum(row["time/trainer_waiting_s"] for row in train)
    working = sum(row["timing_s/update"] + row["timing_s/push"] for row in train)
    assert waiting + working == pytest.approx(sum(row["time/step_s"] for row in train))
    if "redundancy.members=2" in overrides:
        assert summary["tokens/aborted"] > 0
        assert sum(row["rollout/surplus_members"] for row in train) >= 30
    # Whatever was sampled is there by its length: what finished, and what was cut off on the way.
    buckets = [v for k, v in summary.items() if k.startswith("lengths/sampled/") and not k.endswith("mean")]
    finished = sum(line["k"] == "done" for line in read_journal(folder / "journal.jsonl"))
    assert finished <= sum(buckets) <= finished + summary["lengths/cut"]


@pytest.mark.usefixtures("with_report")
def test_the_report_says_that_it_is_simulated_and_with_what(tmp_path: Path) -> None:
    folder = simulated(tmp_path)
    page = (folder / "report.html").read_text()
    assert "simulated · policy staleflow" in page
    assert "roofline of qwen2.5-14b on H20, 4 instances, 4 GPUs generate, 12 train" in page
    assert all(f"<th>{name}</th>" in page for name in ("rollout limit", "trainer limit", "latency limit"))
    figures = comparison([folder])["groups"][0]["figures"]
    assert 0.2 < figures["bound_share"]["median"] < 1.0
    bounds = json.loads((folder / "simulation.json").read_text())["bounds"]
    rate = figures["trained_tokens_per_s"]["median"]
    assert rate / figures["bound_share"]["median"] == pytest.approx(bounds[bounds["binding"]])


def test_there_are_no_rewards_where_nobody_said_how_many_are_right(tmp_path: Path) -> None:
    without, drawn = simulated(tmp_path / "a"), simulated(tmp_path / "b", "simulation.solved=0.5")
    assert all("rollout/reward_mean" not in row for row in rows(without, "train"))
    assert {row["rollout/filtered_groups"] for row in rows(without, "train")} == {0}
    assert all(0 < row["rollout/reward_mean"] < 1 for row in rows(drawn, "train"))


def test_a_real_run_and_a_simulated_one_are_no_siblings(tmp_path: Path) -> None:
    one, other = simulated(tmp_path / "a"), simulated(tmp_path / "b", "run.seed=1")
    assert len(comparison([one, other])["groups"]) == 1
    (other / "simulation.json").unlink()
    groups = comparison([one, other])["groups"]
    assert [group["keys"] for group in groups] == [{"simulated": "yes"}, {"simulated": "–"}]  # noqa: RUF001
    assert "simulated" in groups[0]["bottleneck"]["remark"]
    assert "simulated" not in groups[1]["bottleneck"]["remark"]


def test_explain_tells_a_simulated_life(tmp_path: Path) -> None:
    folder = simulated(tmp_path, "simulation.outages=[{at: 3, instance: 0, down_s: 2}]")
    lost = next(
        line for line in read_journal(folder / "journal.jsonl") if line["k"] == "lost" and line["back"]
    )
    story = explain(folder, lost["back"][0][0])
    assert "instance-0 was lost" in story
    assert "summary: trained in step" in story
    assert "verdict" in explain(folder, "step 2")


def test_a_costs_file_stands_for_model_and_gpus(tmp_path: Path) -> None:
    costs = {"k1": 1e-6, "k2": 0.01, "k3": 1e-3, "k4": 5e-3, "prefill": 1e-5, "pull": 0.1}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"model": costs}))
    trainer = [f"simulation.training.{key}={value}" for key, value in
               (("fixed_s", 1), ("token_s", 1e-3), ("push_s", 0.1))]  # fmt: skip
    folder = simulated(tmp_path, f"simulation.costs={file}", "rollout.instances=3", *trainer)
    about = json.loads((folder / "simulation.json").read_text())
    assert (about["costs"], about["instances"], about["gpus"]) == (f"the profile {file}", 3, None)
    assert about["cost_model"] == costs


def test_what_cannot_work_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tensor_parallel must be at least 2"):
        simulate_run(config(tmp_path, "simulation.model=qwen2.5-32b", "simulation.gpu=A100",
                            "rollout.max_new_tokens=200000"), clean=False)  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_a_name_in_use_is_refused_and_cleaned_on_demand(tmp_path: Path) -> None:
    folder = simulated(tmp_path)
    before = (folder / "ledger.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match="in use"):
        simulate_run(config(tmp_path), clean=False)
    assert simulate_run(config(tmp_path), clean=True) == 0
    assert (folder / "ledger.jsonl").read_bytes() == before


def test_a_stop_finishes_the_step_and_ends_with_a_clean_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    look = ThreadSession.look

    def stop_soon(session: ThreadSession, timeout_s: float) -> Any:
        session.request_stop()
        steps.append(1)
        return look(session, timeout_s)

    monkeypatch.setattr(ThreadSession, "look", stop_soon)
    assert simulate_run(config(tmp_path, "run.steps=5000"), clean=False) == EXIT_INTERRUPTED
    assert audit_ledger(tmp_path / "s").ok
    assert rows(tmp_path / "s", "summary")[0]["run/reason"] == "interrupted"


def test_rows_of_the_instances_stay_few_however_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staleflow.runtime.assembly.simulated.SAMPLES_BEFORE_DOUBLING", 10)
    folder = simulated(tmp_path, "run.steps=30")
    seconds = rows(folder, "summary")[0]["run/seconds"]
    assert seconds > 100
    assert 10 < len(rows(folder, "instances")) < 60


@pytest.mark.usefixtures("with_report")
def test_the_command_prints_the_config_or_runs_it(tmp_path: Path) -> None:
    arguments = ["simulate", *SMALL, f"run.output_dir={tmp_path}"]
    dry = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert dry.exit_code == 0
    assert "rollout_gpus: 4" in dry.stdout
    assert list(tmp_path.iterdir()) == []
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "0 violations" in result.output
    assert f"report:     {tmp_path}/s/report.html" in result.output
