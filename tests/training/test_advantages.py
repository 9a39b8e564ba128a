"""Each estimator against values worked out by hand."""

import math

import numpy as np
import pytest

from staleflow.training.advantages import (
    group_baseline,
    group_centred,
    group_estimator,
    group_normalised,
    leave_one_out,
    overlong_penalty,
    returns_to_go,
)
from staleflow.training.filtering import is_uninformative
from staleflow.training.gae import generalized_advantages
from staleflow.training.outcomes import Discount, MemberOutcome

RULES = [group_normalised, group_centred, leave_one_out]
BATCH_WIDE = [returns_to_go, group_baseline, generalized_advantages]
ONCE = Discount()


def outcome(raw, tokens=1, *, shaping=0.0, usable=True, kl=None, values=None):
    """A member; `kl` are the penalties of its tokens."""
    count = tokens if usable else 0
    return MemberOutcome(
        raw=raw,
        shaping=shaping,
        usable=usable,
        token_rewards=np.zeros(count, dtype=np.float32) if kl is None else -np.array(kl, dtype=np.float32),
        values=np.zeros(count, dtype=np.float32) if values is None else np.array(values, dtype=np.float32),
    )


def group_of(*raw):
    return [outcome(r, usable=math.isfinite(r)) for r in raw]


def advantages(estimates):
    return [[e.advantages.tolist() for e in group] for group in estimates]


def test_grpo_centres_and_scales_by_the_population_deviation():
    # mean 1/4, variance 3/16: (3/4) / (sqrt(3)/4) = sqrt(3), and -1/sqrt(3).
    expected = [math.sqrt(3), *[-1 / math.sqrt(3)] * 3]
    np.testing.assert_allclose(group_normalised(group_of(1, 0, 0, 0)), expected, rtol=1e-6)


def test_dr_grpo_only_centres():
    np.testing.assert_allclose(group_centred(group_of(1, 0, 0, 0)), [0.75, -0.25, -0.25, -0.25])


def test_rloo_compares_with_the_mean_of_the_others():
    # 1 against (0 + 0 + 2) / 3; 0 against (1 + 0 + 2) / 3, twice; 2 against (1 + 0 + 0) / 3.
    np.testing.assert_allclose(leave_one_out(group_of(1, 0, 0, 2)), [1 / 3, -1, -1, 5 / 3], rtol=1e-6)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(group_normalised, [1, 0, -1, 0]), (group_centred, [0.5, 0, -0.5, 0]), (leave_one_out, [1, 0, -1, 0])],
)
def test_unusable_members_count_neither_in_the_mean_nor_in_the_deviation(rule, expected):
    """F25: with the failed member scored 0 the mean would be 1/3 instead of 1/2."""
    group = [outcome(1.0), outcome(0.0, usable=False), outcome(0.0), outcome(math.nan, usable=False)]
    np.testing.assert_allclose(rule(group), expected, rtol=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "rewards", [[1.0, 1.0, 1.0], [0.0, 0.0], [1.0], [math.nan, 1.0], [math.nan, math.nan], []]
)
def test_a_group_without_signal_has_zero_advantages_and_never_nan(rule, rewards):
    """F25, F26: all equal, one survivor, none, group size 1."""
    assert rule(group_of(*rewards)).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("rule", RULES)
def test_shaping_moves_only_the_member_it_belongs_to(rule):
    plain = group_of(1, 1, 0, 0)
    moved = rule([plain[0], outcome(1.0, shaping=-0.5), *plain[2:]]) - rule(plain)
    # The deviation of 1, 1, 0, 0 is 1/2, so grpo's member moves by 0.5 / 0.5.
    np.testing.assert_allclose(moved, [0, -1.0 if rule is group_normalised else -0.5, 0, 0], atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_all_wrong_answers_are_filtered_whatever_their_penalties(rule):
    """F27: neither the overlong penalty nor the KL makes a signal of equal raw rewards."""
    group = [outcome(0.0, shaping=s, kl=[k]) for s, k in [(0.0, 0.1), (-0.25, 0.3), (-1.0, 0.0)]]
    assert is_uninformative(m.raw for m in group)
    assert rule(group).tolist() == [0.0] * 3


def test_a_kl_penalty_in_the_reward_is_summed_over_the_response_and_centred_with_it():
    group = [outcome(1.0, kl=[0.25, 0.25]), outcome(0.0, kl=[0.1])]
    # R: 1 - 0.5 = 0.5 and -0.1; mean 0.2.
    np.testing.assert_allclose(group_centred(group), [0.3, -0.3], rtol=1e-6)


def test_different_rewards_made_equal_by_the_kl_penalty_give_zeros():
    """F26."""
    for almost in (1.0, 1 - 2**-23):  # rounding must not become a signal, nor scale the shaping up
        group = [outcome(1.0, kl=[almost]), outcome(0.0, kl=[0.0], shaping=-0.5)]
        assert group_normalised(group).tolist() == [0.0, 0.0]


def test_every_token_of_a_member_has_its_advantage():
    group = [outcome(1.0, 3), outcome(0.0, 1), outcome(5.0, 4, usable=False)]
    estimate = group_estimator(group_centred)
    assert advantages(estimate([group], ONCE)) == [[[0.5] * 3, [-0.5], []]]


def test_reinforce_pp_takes_off_the_penalties_still_to_come_and_normalises_over_the_batch():
    groups = [[outcome(1.0, kl=[0.2, 0.1])], [outcome(0.0, kl=[0.3])]]
    # A: 1 - 0.3 = 0.7, 1 - 0.1 = 0.9; -0.3. Mean 1.3 / 3; the squares' mean (0.49 + 0.81 + 0.09) / 3.
    mean = 1.3 / 3
    deviation = math.sqrt(1.39 / 3 - mean**2)
    first, second = advantages(returns_to_go(groups, ONCE))
    np.testing.assert_allclose(first[0], [(0.7 - mean) / deviation, (0.9 - mean) / deviation], rtol=1e-5)
    np.testing.assert_allclose(second[0], [(-0.3 - mean) / deviation], rtol=1e-5)


def test_reinforce_pp_baseline_takes_off_the_groups_mean_and_normalises_over_the_batch():
    groups = [group_of(1, 0), [outcome(1.0, 2), outcome(1.0), outcome(0.0)]]
    # Centred: 1/2, -1/2; 1/3 (two tokens), 1/3, -2/3. Over the six tokens the mean is
    # (1/2 - 1/2 + 1/3 + 1/3 + 1/3 - 2/3) / 6 = 1/18, the squares' mean (1/2 + 3/9 + 4/9) / 6 = 23/108.
    deviation = math.sqrt(23 / 108 - 1 / 18**2)
    expected = [[[1 / 2], [-1 / 2]], [[1 / 3, 1 / 3], [1 / 3], [-2 / 3]]]
    for group, wanted in zip(advantages(group_baseline(groups, ONCE)), expected, strict=True):
        for got, want in zip(group, wanted, strict=True):
            np.testing.assert_allclose(got, (np.array(want) - 1 / 18) / deviation, rtol=1e-5)


def test_reinforce_pp_baseline_gives_nothing_to_a_group_without_signal():
    """F25, F26: all equal, one survivor. The batch's mean over tokens is not 0, and does not reach them."""
    survivor = [outcome(1.0, 2), outcome(0.0, usable=False)]
    groups = [[outcome(1.0, 3), outcome(0.0, 1)], group_of(1, 1), survivor]
    # Centred: 1/2 (three tokens), -1/2; 0 of four more. Mean 1/8, squares' mean (4 * 1/4) / 8 = 1/8.
    deviation = math.sqrt(1 / 8 - 1 / 64)
    first, second, third = advantages(group_baseline(groups, ONCE))
    np.testing.assert_allclose(first[0], [(1 / 2 - 1 / 8) / deviation] * 3, rtol=1e-5)
    np.testing.assert_allclose(first[1], [(-1 / 2 - 1 / 8) / deviation], rtol=1e-5)
    assert second == [[0.0], [0.0]]
    assert third == [[0.0, 0.0], []]


def test_gae_by_hand():
    member = outcome(1.0, 2, kl=[0.1, 0.0], values=[0.5, 0.25])
    # gamma 0.9, lambda 0.5. delta_1 = 1 - 0.25 = 0.75 = A_1;
    # delta_0 = -0.1 + 0.9 * 0.25 - 0.5 = -0.375, A_0 = -0.375 + 0.45 * 0.75 = -0.0375.
    # Returns A + V: 0.4625, 1.0. Normalised: two values, so -1 and 1.
    ((estimate,),) = generalized_advantages([[member]], Discount(gamma=0.9, gae_lambda=0.5))
    np.testing.assert_allclose(estimate.advantages, [-1, 1], rtol=1e-6)
    np.testing.assert_allclose(estimate.returns, [0.4625, 1.0], rtol=1e-6)


def test_without_discount_the_return_is_the_reward_still_to_come():
    member = outcome(1.0, 3, kl=[0.2, 0.1, 0.0], shaping=-0.5, values=[9.0, -3.0, 0.4])
    ((estimate,),) = generalized_advantages([[member]], Discount(gamma=1.0, gae_lambda=1.0))
    np.testing.assert_allclose(estimate.returns, [0.2, 0.4, 0.5], rtol=1e-5)


def test_lambda_0_is_the_one_step_error():
    member = outcome(1.0, 2, values=[0.5, 0.25])
    ((estimate,),) = generalized_advantages([[member]], Discount(gamma=1.0, gae_lambda=0.0))
    # delta: 0.25 - 0.5 and 1 - 0.25; returns are the next value, and the reward.
    np.testing.assert_allclose(estimate.returns, [0.25, 1.0], rtol=1e-6)


@pytest.mark.parametrize("estimate", BATCH_WIDE)
def test_advantages_over_a_batch_have_mean_0_and_deviation_1(estimate):
    groups = [group_of(1, 0, 1), [outcome(1.0, 4), outcome(0.0, 2), outcome(0.0, 3, usable=False)]]
    tokens = np.concatenate([a for group in advantages(estimate(groups, ONCE)) for a in group])
    assert len(tokens) == 9
    assert tokens.mean() == pytest.approx(0, abs=1e-6)
    assert tokens.std() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("estimate", BATCH_WIDE)
@pytest.mark.parametrize(
    "groups", [[], [[]], [group_of(1, 1), group_of(1, 1)], [group_of(1)], [group_of(math.nan, math.nan)]]
)
def test_a_batch_without_signal_has_zero_advantages_and_never_nan(estimate, groups):
    """F26."""
    found = estimate(groups, ONCE)
    assert [len(group) for group in found] == [len(group) for group in groups]
    assert all(a == 0.0 for group in advantages(found) for member in group for a in member)


def test_a_group_of_one_teaches_where_nothing_is_compared():
    groups = [group_of(1), group_of(0)]
    for estimate in (returns_to_go, generalized_advantages):
        assert advantages(estimate(groups, ONCE)) == [[[1.0]], [[-1.0]]]


@pytest.mark.parametrize(("length", "expected"), [(2, 0.0), (6, 0.0), (8, -0.25), (10, -0.5), (11, -0.5)])
def test_the_overlong_penalty_grows_linearly_over_the_buffer(length, expected):
    # Free up to 6; 8 is half way; 10 pays all.
    assert overlong_penalty(length, max_new_tokens=10, buffer=4, penalty=0.5) == pytest.approx(expected)


def test_no_buffer_means_no_penalty():
    assert overlong_penalty(10, max_new_tokens=10, buffer=0, penalty=1.0) == 0.0
