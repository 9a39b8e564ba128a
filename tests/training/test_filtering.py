import math
import subprocess
import sys

import pytest

from staleflow.data.trajectory import FinishReason, Reward
from staleflow.errors import ConfigError
from staleflow.training.correction_rules import CORRECTION_NAMES, check_correction
from staleflow.training.filtering import is_uninformative, is_usable, is_usable_reward


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ([1.0, 1.0, 1.0], True),
        ([0.0, 0.0, 1.0], False),
        ([0.1 + 0.2, 0.3], True),
        ([0.0, 0.01], False),
        ([1.0], True),
        ([], True),
        ([math.nan, 1.0], True),
        ([math.nan, 1.0, 0.0], False),
        ([math.inf, 0.0, 0.0], True),
    ],
)
def test_a_group_without_two_different_usable_raw_rewards_is_uninformative(raw, expected):
    """F26."""
    assert is_uninformative(raw) is expected


def test_a_reward_that_is_not_finite_or_marked_unusable_does_not_count(member):
    assert is_usable_reward(Reward(raw=0.0))
    assert not is_usable_reward(Reward(raw=math.nan))
    assert not is_usable_reward(Reward(raw=math.inf))
    assert not is_usable_reward(Reward(raw=1.0, usable=False))
    assert not is_usable(member("g", 0, [1], 1.0, finish_reason=FinishReason.FAILED))


@pytest.mark.parametrize("name", [n for n in CORRECTION_NAMES if n != "none"])
def test_a_real_correction_goes_with_any_bound(name):
    for bound in (0, 1, 10):
        check_correction(name, bound)


def test_no_correction_is_refused_unless_the_bound_is_zero():
    """F6."""
    check_correction("none", 0)
    with pytest.raises(ConfigError, match=r"staleness\.bound = 1.*use 'tis' or another"):
        check_correction("none", 1)


def test_an_unknown_correction_is_refused_with_the_allowed_names():
    with pytest.raises(ConfigError, match=r"'ppo'.*tis, .*behaviour, none"):
        check_correction("ppo", 1)


def test_filter_rules_and_model_lookup_do_not_import_torch():
    modules = "filtering, correction_rules, models, algorithms, checkpoints, trainer, gae"
    code = f"import sys; from staleflow.training import {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
