"""What is packaged, and that the import contracts catch what they forbid."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
NOT_CODE = shutil.ignore_patterns("__pycache__")


def code_folders() -> dict[str, Path]:
    """Package name -> folder, of everything that is packaged as code."""
    folders = {"staleflow": ROOT / "staleflow", "staleflow.cli": ROOT / "cli"}
    folders["staleflow.experiments"] = ROOT / "experiments"
    for init in [p for top in list(folders.values()) for p in top.rglob("__init__.py")]:
        for name, top in list(folders.items()):
            if name in ("staleflow", "staleflow.cli", "staleflow.experiments") and init.is_relative_to(top):
                folders[".".join((name, *init.parent.relative_to(top).parts))] = init.parent
    return folders


def test_the_package_list_is_what_is_on_disk() -> None:
    assert set(SETUPTOOLS["packages"]) == {*code_folders(), "staleflow.configs"}


def test_all_that_the_image_copies_reaches_docker() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            for name in line.split()[1:-1]:
                assert (ROOT / name).exists(), name
                assert f"!{name}" in ignored, name


def test_constraints_pin_everything_that_is_depended_on() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["dev"]]
    names = {w.partition(">")[0].partition("[")[0].lower() for w in wanted}
    assert names <= pinned


def imported(folder: Path) -> set[str]:
    """Top-level names that the files of a folder import."""
    names: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                names.add(node.module or "")
    return names


@pytest.mark.parametrize(
    ("package", "own"),
    [
        ("protocol", ("staleflow.protocol", "staleflow.errors")),
        ("coordination", ("staleflow.coordination", "staleflow.protocol", "staleflow.errors")),
        ("audit", ("staleflow.audit",)),
    ],
)
def test_the_pure_packages_import_the_standard_library_only(package: str, own: tuple[str, ...]) -> None:
    """Completes the contracts, which can only name what they forbid."""
    foreign = {
        name
        for name in imported(ROOT / "staleflow" / package)
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not any(name == o or name.startswith(f"{o}.") for o in own)
    }
    assert foreign == set()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for folder in ("staleflow", "cli", "experiments", "configs"):
        shutil.copytree(ROOT / folder, source / folder, ignore=NOT_CODE)
    for file in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / file).exists():
            shutil.copy(ROOT / file, source / file)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        "out",
        ".",
    ]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = (source / "out").iterdir()
    return built


def test_the_wheel_holds_all_code_and_data_and_claims_no_other_name(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {"staleflow/py.typed", "staleflow/configs/default.yaml", "staleflow/cli/main.py"}
    expected |= {
        str(path.relative_to(ROOT))
        for path in (ROOT / "staleflow").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and "config/" not in str(path.relative_to(ROOT))
    }
    assert expected <= names
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"staleflow"}


def test_the_installed_wheel_finds_its_default_config(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import staleflow, staleflow.cli.main\nfrom staleflow.config import Config, load_config\n"
        f"assert staleflow.__file__.startswith({str(tmp_path)!r})\n"
        f"assert staleflow.cli.main.__file__.startswith({str(tmp_path)!r})\n"
        "assert load_config() == Config()\n"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=True,
    )


PLANTED = {
    "protocol/planted.py": ("import torch\nimport time\n", "staleflow.protocol.planted -> torch"),
    "coordination/planted.py": (
        "from staleflow.data import trajectory\n",
        "staleflow.coordination.planted -> staleflow.data",
    ),
    "audit/planted.py": (
        "from staleflow.errors import UserError\n",
        "staleflow.audit.planted -> staleflow.errors",
    ),
    "config/planted.py": ("import ray\n", "staleflow.config.planted -> ray"),
    "rollout/planted.py": ("import staleflow.config\n", "staleflow.rollout.planted -> staleflow.config"),
    "runtime/planted.py": ("import staleflow.cli.main\n", "staleflow.runtime.planted -> staleflow.cli.main"),
    "runtime/planted_backend.py": (
        "import staleflow.runtime.backends.inline\n",
        "staleflow.runtime.planted_backend -> staleflow.runtime.backends.inline",
    ),
    "training/planted_one.py": (
        "import staleflow.training.planted_two\n",
        "No cycles are allowed in staleflow.training.",
    ),
    "training/planted_two.py": (
        "import staleflow.training.planted_one\n",
        "No cycles are allowed in staleflow.training.",
    ),
}
"""File, text, and the line of the report that names it: one for each thing a contract is there for."""


def lint_imports(site: Path) -> subprocess.CompletedProcess[str]:
    linter = Path(sys.executable).with_name("lint-imports")
    command = [str(linter), "--no-cache", str(ROOT / "pyproject.toml")]
    environment = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "200"}
    return subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True, check=False)


def test_planted_bad_imports_are_caught(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    clean = lint_imports(tmp_path)
    assert clean.returncode == 0, clean.stdout
    for name, (text, _) in PLANTED.items():
        (tmp_path / "staleflow" / name).write_text(text)
    broken = lint_imports(tmp_path)
    assert broken.returncode == 1
    for _, report in PLANTED.values():
        assert report in broken.stdout


@pytest.mark.parametrize("statement", ["import cli", "from experiments import x"])
def test_the_folders_own_names_cannot_be_imported(statement: str) -> None:
    ruff = Path(sys.executable).with_name("ruff")
    command = [str(ruff), "check", "--config", str(ROOT / "pyproject.toml"), "--select", "TID251", "-"]
    done = subprocess.run(command, input=f"{statement}\n", capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "TID251" in done.stdout
