"""Layers of config values: order, merging, places, and YAML as people mean it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from staleflow.config import Config, load_config
from staleflow.config.document import documented_defaults
from staleflow.config.key_names import key_paths
from staleflow.config.layers import split_arguments
from staleflow.config.yaml_text import dump, parse
from staleflow.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_bare_run_uses_the_defaults_of_the_schema() -> None:
    assert load_config() == Config()


def test_the_default_file_is_the_printed_schema() -> None:
    """Regenerate it with `staleflow config > configs/default.yaml`."""
    assert (REPOSITORY / "configs" / "default.yaml").read_text(encoding="utf-8") == documented_defaults()


def test_every_key_is_documented() -> None:
    for path, field in key_paths(Config):
        section = isinstance(field.annotation, type) and field.annotation.__doc__
        assert field.description or section, ".".join(path)


def test_later_layers_win_in_the_order_default_files_environment_overrides(tmp_path: Path) -> None:
    base = written(tmp_path, "a.yaml", "run: {seed: 1, steps: 1}\ndata: {size: 100, batch_size: 4}\n")
    overlay = written(tmp_path, "b.yaml", "run: {seed: 2, name: b}\n")
    environ = {"STALEFLOW__RUN__SEED": "3", "STALEFLOW__RUN__STEPS": "3", "OTHER": "x"}
    config = load_config([base, overlay], ["run.seed=4"], environ)
    assert (config.run.seed, config.run.steps, config.run.name) == (4, 3, "b")
    assert (config.data.size, config.data.batch_size, config.data.group_size) == (100, 4, 8)


def test_maps_merge_deeply_and_lists_are_replaced(tmp_path: Path) -> None:
    base = written(
        tmp_path, "a.yaml", "training: {betas: [0.5, 0.6]}\ndata: {options: {a: 1, b: {c: [1, 2]}}}\n"
    )
    config = load_config([base], ["training.betas=[0.7, 0.8]", "data.options={b: {c: [3], d: 4}}"])
    assert config.training.betas == (0.7, 0.8)
    assert config.data.options == {"a": 1, "b": {"c": [3], "d": 4}}


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load_config([written(tmp_path, "a.yaml", "# nothing yet\n")]) == Config()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-3", -3),
        ("010", 10),
        ("0x10", 16),
        ("off", "off"),
        ("no", "no"),
        ("y", "y"),
        ("true", True),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("null", None),
        ("~", None),
        ("", None),
        ("[1, a]", [1, "a"]),
        ("=", "="),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    read = parse(f"a: {text}", "x").values["a"]
    assert read == value
    assert type(read) is type(value)


def test_off_and_small_numbers_mean_what_they_look_like() -> None:
    config = load_config([], ["telemetry.console=off", "training.learning_rate=1e-4", "training.tis_cap=2"])
    assert config.telemetry.console == "off"
    assert config.training.learning_rate == 1e-4
    assert config.training.tis_cap == 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {seed: 1}\nrun: {seed: 2}\n", "a.yaml:2: run is given twice, first in line 1"),
        ("run:\n  seed: 1\n  seed: 1\n", "a.yaml:3: run.seed is given twice, first in line 2"),
        ("run: [1", "a.yaml:1: not valid YAML"),
        ("run: &r {seed: *r}\n", "a value contains itself"),
        ("1: 2\n", "is not a name"),
        ("- 1\n", "must be a map of sections"),
        ("run: {}\n---\nrun: {}\n", "a.yaml:2: not valid YAML"),
        (
            "run: !!python/object/apply:os.getcwd []\n",
            "a.yaml:1: the tag !!python/object/apply:os.getcwd is not allowed",
        ),
        ("run: !!timestamp x\n", "a.yaml:1: the tag !!timestamp is not allowed"),
        ("run: {seed: !!int x}\n", "a.yaml:1: 'x' is not a valid int"),
        ("data: {shuffle: !!bool x}\n", "a.yaml:1: 'x' is not a valid bool"),
    ],
)
def test_unusable_yaml_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([written(tmp_path, "a.yaml", text)])
    assert message in str(caught.value)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config file"):
        load_config([tmp_path / "none.yaml"])
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config([tmp_path / "b.yaml"])


def test_arguments_are_files_or_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "eta=1").mkdir(parents=True)
    written(tmp_path / "runs" / "eta=1", "config.yaml", "")
    files, overrides = split_arguments(["runs/eta=1/config.yaml", "staleness.bound=2", "run.name=a=b"])
    assert files == [Path("runs/eta=1/config.yaml")]
    assert overrides == ["staleness.bound=2", "run.name=a=b"]
    with pytest.raises(ConfigError, match=r"no config file 'nope.yaml'"):
        split_arguments(["nope.yaml"])
    with pytest.raises(ConfigError, match=r"write key.path=value"):
        split_arguments(["=3"])


def test_a_resolved_config_reads_back_as_itself(tmp_path: Path) -> None:
    overrides = ["run.name='1e-4'", "run.seed=7", "telemetry.wandb.entity='off'", "training.betas=[0.1, 0.2]"]
    config = load_config(
        [], [*overrides, "training.learning_rate=1e-5", "data.options={a: [1, {b: 'null'}]}"]
    )
    assert load_config([written(tmp_path, "c.yaml", config.to_yaml())]) == config


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
    max_leaves=8,
)


@given(values=JSON)
@example(values={"\x85": ["a\u2028b", "\u2029"]})
def test_dumped_values_read_back_as_themselves(values: object) -> None:
    read = parse(dump(values), "x").values
    assert read == values
    assert type(read) is type(values)


def test_a_pipe_is_a_config_file_and_minus_is_standard_input(tmp_path: Path) -> None:
    """`staleflow run --dry-run | staleflow run -`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert split_arguments([str(pipe), "-"]) == ([pipe, Path("/dev/stdin")], [])


def test_an_argument_longer_than_a_file_name_is_an_override() -> None:
    long = f"run.name={'x' * 5000}"
    assert split_arguments([long]) == ([], [long])


@pytest.mark.parametrize(
    "name", ["STALEFLOW__", "STALEFLOW__RUN__", "STALEFLOW____RUN", "STALEFLOW_RUN__SEED"]
)
def test_a_variable_that_nearly_names_a_key_is_refused(name: str) -> None:
    """F32: never passed over in silence."""
    with pytest.raises(ConfigError, match=f"{name} .* write STALEFLOW__SECTION__KEY"):
        load_config([], [], {name: "3"})


def test_yaml_nested_too_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("run: " + "[" * 3000)
    with pytest.raises(ConfigError, match=r"c\.yaml: not usable YAML: it is nested too deeply"):
        load_config([path])
