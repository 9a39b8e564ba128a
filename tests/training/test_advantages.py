import math

import numpy as np
import pytest

from staleflow.training.advantages import normalised_advantages, overlong_penalties
from staleflow.training.algorithms.algorithm import Shaping
from staleflow.training.algorithms.dapo import advantages
from staleflow.training.filtering import is_uninformative


def test_advantages_are_the_rewards_centred_and_scaled_by_the_population_deviation(member):
    group = [member("g", m, [1], raw) for m, raw in enumerate([1.0, 0.0, 0.0, 0.0])]
    # mean 1/4, variance 3/16: (3/4) / (sqrt(3)/4) = sqrt(3), and -1/sqrt(3).
    expected = [math.sqrt(3), *[-1 / math.sqrt(3)] * 3]
    np.testing.assert_allclose(normalised_advantages(group), expected, rtol=1e-6)


def test_unusable_members_count_neither_in_the_mean_nor_in_the_deviation(member):
    """F25: with the failed member scored 0 the mean would be 1/3 instead of 1/2."""
    group = [
        member("g", 0, [1], 1.0),
        member("g", 1, [1], 0.0, usable=False),
        member("g", 2, [1], 0.0),
        member("g", 3, [1], math.nan),
    ]
    np.testing.assert_allclose(normalised_advantages(group), [1.0, 0.0, -1.0, 0.0], rtol=1e-6)


@pytest.mark.parametrize(
    "rewards", [[1.0, 1.0, 1.0], [0.0, 0.0], [1.0], [math.nan, 1.0], [math.nan, math.nan], []]
)
def test_a_group_without_signal_has_zero_advantages_and_never_nan(member, rewards):
    """F25, F26: all equal, one survivor, none, group size 1."""
    group = [member("g", m, [1], raw) for m, raw in enumerate(rewards)]
    assert normalised_advantages(group).tolist() == [0.0] * len(rewards)


def test_the_overlong_penalty_grows_linearly_over_the_buffer(member):
    group = [member("g", m, [1] * length, 0.0) for m, length in enumerate([2, 6, 8, 10])]
    penalties = overlong_penalties(group, max_new_tokens=10, buffer=4, penalty=0.5)
    # Free up to 6; 8 is half way; 10 pays all.
    np.testing.assert_allclose(penalties, [0.0, 0.0, -0.25, -0.5], rtol=1e-6)


def test_no_buffer_means_no_penalty(member):
    group = [member("g", 0, [1] * 10, 0.0)]
    assert overlong_penalties(group, max_new_tokens=10, buffer=0, penalty=1.0).tolist() == [0.0]


def test_shaping_moves_only_the_member_it_belongs_to(member):
    lengths_and_rewards = [(2, 1.0), (10, 1.0), (2, 0.0), (2, 0.0)]
    group = [member("g", m, [1] * n, raw) for m, (n, raw) in enumerate(lengths_and_rewards)]
    shaping = Shaping(max_new_tokens=10, overlong_buffer=4, overlong_penalty=0.5)
    # Raw mean 1/2, raw deviation 1/2: (1 - 0.5 - 0.5) / 0.5 = 0 for the long one, the others as unshaped.
    np.testing.assert_allclose(advantages(group, shaping), [1.0, 0.0, -1.0, -1.0], rtol=1e-6)


def test_all_wrong_answers_of_different_lengths_are_filtered_whatever_the_overlong_penalty(member):
    """F27."""
    group = [member("g", m, [1] * n, 0.0) for m, n in enumerate([2, 7, 9, 10])]
    shaping = Shaping(max_new_tokens=10, overlong_buffer=4, overlong_penalty=1.0)
    assert is_uninformative(m.reward.raw for m in group)
    assert advantages(group, shaping).tolist() == [0.0] * 4
