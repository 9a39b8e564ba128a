"""The run folder overwrites nothing, is held by one process, and is resumed only as what it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from staleflow.config import load_config
from staleflow.errors import RunFolderError
from staleflow.storage import RunFolder
from staleflow.storage.provenance import git_state, provenance
from staleflow.storage.run_folder import check_config

NOON = 1_764_504_000.0  # 2025-11-30 12:00:00 UTC


def create(folder: Path, name: str | None = "a", *, resume: bool = False, clean: bool = False) -> RunFolder:
    return RunFolder.create(folder, name, now=NOON, seed=3, resume=resume, clean=clean)


def begun(folder: Path, name: str = "a") -> Path:
    """A run that wrote something and ended."""
    with create(folder, name) as run:
        run.write_config(load_config().to_yaml(), {"staleflow": "0.1.0"})
        run.ledger.write_text("line\n")
        return run.path


def test_a_new_folder_has_its_places(tmp_path: Path) -> None:
    with create(tmp_path / "runs" / "deep", "sweep/eta=1") as run:
        assert run.path == tmp_path / "runs" / "deep" / "sweep" / "eta=1"
        assert run.logs.is_dir()
        assert run.checkpoints.is_dir()
        assert not run.ledger.exists()
        assert {run.config.name, run.metrics.name, run.ledger.name, run.report.name} == {
            "config.yaml",
            "metrics.jsonl",
            "ledger.jsonl",
            "report.html",
        }


def test_a_run_without_a_name_is_named_after_time_and_seed(tmp_path: Path) -> None:
    with create(tmp_path, None) as run:
        assert run.name == "20251130-120000-seed3"


def test_a_name_in_use_is_refused_and_nothing_changed(tmp_path: Path) -> None:
    path = begun(tmp_path)
    with pytest.raises(RunFolderError, match=r"'a' is in use .* --resume .* --clean"):
        create(tmp_path)
    assert (path / "ledger.jsonl").read_text() == "line\n"


def test_a_start_that_was_refused_does_not_use_up_its_name(tmp_path: Path) -> None:
    create(tmp_path).close()
    create(tmp_path).close()


def test_resume_keeps_and_clean_removes(tmp_path: Path) -> None:
    path = begun(tmp_path)
    (path / "checkpoints" / "step_1").mkdir()
    with create(tmp_path, resume=True) as run:
        assert run.ledger.read_text() == "line\n"
    with create(tmp_path, clean=True) as run:
        assert not run.ledger.exists()
        assert not list(run.checkpoints.iterdir())


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run to resume"):
        create(tmp_path, resume=True)
    with pytest.raises(RunFolderError, match="no run to resume"):
        create(tmp_path, None, resume=True)
    assert not list(tmp_path.iterdir())
    begun(tmp_path)
    with pytest.raises(RunFolderError, match=r"run\.name=a"):
        create(tmp_path, None, resume=True)


def test_only_a_run_folder_is_ever_cleaned(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match="not a run folder, so --clean does not remove it"):
        create(tmp_path, clean=True)
    (tmp_path / "link").symlink_to(begun(tmp_path, "b"))
    with pytest.raises(RunFolderError, match="not a folder"):
        create(tmp_path, "link", clean=True)
    assert (tmp_path / "a" / "thesis.tex").exists()
    assert (tmp_path / "b" / "ledger.jsonl").exists()


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/x", "x/", "x//y", "x/../y", ".hidden", "a\\b", "a\0"]
)
def test_a_name_that_leaves_the_output_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunFolderError, match="does not name a folder inside"):
        create(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_a_run_inside_another_is_refused(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(RunFolderError, match="lies inside the folder of another run"):
        create(tmp_path, "a/b")


def test_an_output_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot be written"):
        create(Path("/proc/staleflow"))
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be written"):
        create(tmp_path / "file")


@pytest.mark.parametrize("how", ["resume=True", "clean=True"])
def test_two_processes_cannot_have_one_folder(tmp_path: Path, how: str) -> None:
    begun(tmp_path)
    code = (
        "import sys\nfrom pathlib import Path\nfrom staleflow.storage import RunFolder\n"
        f"RunFolder.create(Path(sys.argv[1]), 'a', now=0.0, {how})\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with create(tmp_path, resume=True) as run:
        other = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "another process is running in" in other.stderr
        assert run.ledger.exists()
    assert subprocess.run(command, check=False).returncode == 0


def test_the_config_is_kept_with_its_origin_and_reads_back(tmp_path: Path) -> None:
    config = load_config([], ["staleness.bound=3"])
    with create(tmp_path) as run:
        run.write_config(config.to_yaml(), provenance())
        text = run.config.read_text()
        assert text.startswith("# staleflow: ")
        assert "# git: " in text
        assert load_config([run.config]) == config


def test_a_resumed_run_must_agree_in_what_matters(tmp_path: Path) -> None:
    begun(tmp_path)
    with create(tmp_path, resume=True) as run:

        def now(*overrides: str) -> None:
            check_config(run.path, yaml.safe_load(load_config([], overrides).to_yaml()))

        now()
        now("run.steps=99", "rollout.instances=1", "data.epochs=3", "checkpoint.keep=9", "run.name=a")
        now("redundancy.members=1")
        with pytest.raises(RunFolderError) as caught:
            now(
                "staleness.bound=2",
                "data.batch_size=8",
                "data.options={x: 1}",
                "model.source=m",
                "run.seed=1",
                "redundancy.groups=2",
            )
        with pytest.raises(RunFolderError, match=r"coordination.policy \(was 'staleflow', now 'sync'\)"):
            now("coordination.policy=sync")
        for part in (
            "staleness.bound (was 1, now 2)",
            "data.batch_size (was 24, now 8)",
            "data.options (was {}, now {'x': 1})",
            "model.source (was 'builtin:sums', now 'm')",
            "redundancy.groups (was 0, now 2)",
            "run.seed (was 0, now 1)",
        ):
            assert part in str(caught.value)


def test_git_state_is_unknown_outside_a_repository(tmp_path: Path) -> None:
    assert git_state(tmp_path) == "unknown"
