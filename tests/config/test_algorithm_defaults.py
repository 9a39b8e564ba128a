"""An algorithm's own defaults lie above default.yaml and below whatever a person sets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from staleflow.config import load_config
from staleflow.config.algorithms import ALGORITHMS
from staleflow.config.schema_training import Training
from staleflow.errors import ConfigError
from staleflow.training.correction_rules import CORRECTION_NAMES


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_bare_choice_of_algorithm_is_allowed_and_shows_its_values(name: str) -> None:
    resolved = yaml.safe_load(load_config([], [f"training.algorithm={name}"]).to_yaml())["training"]
    for key, value in ALGORITHMS[name].defaults.items():
        seen = {k: resolved[key][k] for k in value} if isinstance(value, dict) else resolved[key]
        assert seen == value


def test_without_a_word_the_config_is_that_of_dapo() -> None:
    assert load_config() == load_config([], ["training.algorithm=dapo"])
    assert load_config().training.kl.coefficient == 0.0


@pytest.mark.parametrize("order", [1, -1])
def test_what_a_person_sets_wins_wherever_it_stands(tmp_path: Path, order: int) -> None:
    own = ["training.algorithm=gspo", "training.clip_low=0.1"][::order]
    training = load_config([], own).training
    assert (training.clip_low, training.clip_high) == (0.1, 4e-4)
    (tmp_path / "mine.yaml").write_text("training: {kl: {estimator: k2}}\n")
    kl = load_config([tmp_path / "mine.yaml"], ["training.algorithm=grpo"]).training.kl
    assert (kl.coefficient, kl.estimator) == (0.04, "k2")
    assert load_config([], [], {"STALEFLOW__TRAINING__ALGORITHM": "grpo"}).training.clip_high == 0.2


def test_a_resolved_config_reads_back_as_itself(tmp_path: Path) -> None:
    config = load_config([], ["training.algorithm=gspo", "training.clip_high=0.5"])
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_config([tmp_path / "config.yaml"]) == config


def test_an_algorithm_of_ones_own_has_no_defaults_and_the_fewest_rules() -> None:
    training = load_config(
        [], ["training.algorithm=my_package.MINE", "data.group_size=1", "training.dynamic_sampling=false"]
    ).training
    assert training.algorithm == "my_package.MINE"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.algorithm=gppo"], "training.algorithm.*allowed: grpo, dr_grpo"),
        (["training.algorithm=rloo", "data.group_size=1"], "data.group_size.*rloo compares"),
        (["training.algorithm=ppo", "training.dynamic_sampling=true"], "dynamic_sampling.*groups of equal"),
        (
            ["training.algorithm=a.B", "data.group_size=1", "training.dynamic_sampling=true"],
            "dynamic_sampling.*always equal",
        ),
        (["training.kl.coefficient=0.1", "training.kl.estimator=k1"], "estimator.*zero on average"),
        (["training.kl.reference=there"], "kl.reference.*no effect"),
        (["training.icepop_band=[1.5, 2.0]"], "icepop_band.*must contain 1"),
        (["training.sequence_band=[0.5, 0.9]"], "sequence_band.*must contain 1"),
        (
            ["training.algorithm=ppo", "training.correction=none"],
            "needs a correction: set tis or another",
        ),  # F6
    ],
)
def test_what_cannot_go_together_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], overrides)
    assert re.search(message, str(caught.value), re.DOTALL), caught.value


@pytest.mark.parametrize(
    "correction", ["tis", "sequence_tis", "icepop", "decoupled", "sequence_mask", "behaviour"]
)
@pytest.mark.parametrize("bound", [0, 1, 10])
def test_every_real_correction_goes_with_any_bound(correction: str, bound: int) -> None:
    """F6."""
    load_config([], [f"training.correction={correction}", f"staleness.bound={bound}"])


def test_groups_of_one_are_allowed_where_nothing_is_compared() -> None:
    for name in ("ppo", "reinforce_pp"):
        config = load_config([], [f"training.algorithm={name}", "data.group_size=1"])
        assert not config.training.dynamic_sampling


def test_the_schema_names_the_corrections_that_there_are() -> None:
    assert get_args(Training.model_fields["correction"].annotation) == CORRECTION_NAMES
