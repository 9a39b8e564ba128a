"""Estimators of advantages: from the rewards of a whole training batch to an advantage for each token.

Invariants:

- every advantage is finite;
- estimators that compare members give zero to all members of a group without signal (F26); the raw reward
  alone decides that (F27); means and deviations are over usable members (F25);
- estimators that do not compare members give zero to a whole batch of equal A_t, shaping and KL penalties
  included;
- reward shaping changes only its own member: group means and deviations exclude it. They include a KL penalty
  in the reward, which is part of the objective.

In the formulas R is a member's raw reward minus the KL penalties of its tokens, s is its shaping; means and
deviations are over the usable members of its group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from staleflow.data.trajectory import FloatArray
from staleflow.training.filtering import EQUAL_REWARDS, is_uninformative
from staleflow.training.outcomes import Discount, Estimate, Estimator, Group

Floats = NDArray[np.float64]
GroupRule = Callable[[Group], FloatArray]
"""Group -> one advantage per member, shape (members,)."""


def group_normalised(group: Group) -> FloatArray:
    """`(R + s - mean(R)) / std(R)`, with the population deviation.

    GRPO, outcome supervision (arXiv 2402.03300, section 4.1.2); with shaping, DAPO (arXiv 2503.14476).
    """
    return _compared(group, lambda rewards, shaping: (rewards + shaping - rewards.mean()) / _spread(rewards))


def group_centred(group: Group) -> FloatArray:
    """`R + s - mean(R)`: Dr.GRPO, which omits the deviation (arXiv 2503.20783, section 3.2).

    Dividing by it would give more weight to questions that are nearly always or nearly never solved.
    """
    return _compared(group, lambda rewards, shaping: rewards + shaping - rewards.mean())


def leave_one_out(group: Group) -> FloatArray:
    """`R_i + s_i - mean(R_j, j != i)`: RLOO (arXiv 2402.14740)."""

    def rule(rewards: Floats, shaping: Floats) -> Floats:
        others: Floats = (rewards.sum() - rewards) / (len(rewards) - 1)
        return rewards + shaping - others

    return _compared(group, rule)


def by_group(groups: Sequence[Group], discount: Discount, *, rule: GroupRule) -> list[list[Estimate]]:
    """Every token of a member gets the advantage that `rule` gives the member."""
    return [
        [_constant(member.tokens, a) for member, a in zip(group, rule(group), strict=True)]
        for group in groups
    ]


def group_estimator(rule: GroupRule) -> Estimator:
    """An estimator that applies `rule` to each group."""
    return partial(by_group, rule=rule)


def returns_to_go(groups: Sequence[Group], discount: Discount) -> list[list[Estimate]]:
    """`A_t = raw + s - sum of the KL penalties from t on`, then `(A_t - mean) / std` over the batch's tokens.

    REINFORCE++ (arXiv 2501.03262, section 3): no critic and no comparison within a group. Zero if all A_t are
    equal.
    """
    rewards = [
        [_summed_from_each(member.token_rewards) + member.raw + member.shaping for member in group]
        for group in groups
    ]
    return _as_estimates(over_batch(rewards))


def group_baseline(groups: Sequence[Group], discount: Discount) -> list[list[Estimate]]:
    """`A = R + s - mean(R)` in each group, then `(A - mean) / std` over the batch's tokens.

    REINFORCE++ with baseline (arXiv 2501.03262, section 3): the group mean removes the prompt's difficulty,
    the whole batch sets the scale. Members of a group without signal count in the batch's mean and deviation,
    as in the paper, but get zero. The paper gives them -mean / std, which is not 0 when lengths differ. Zero
    if all A are equal.
    """
    centred = by_group(groups, discount, rule=group_centred)
    scaled = over_batch([[e.advantages.astype(np.float64) for e in group] for group in centred])
    return _as_estimates(
        [
            arrays if _has_signal(group) else [np.zeros(len(a)) for a in arrays]
            for group, arrays in zip(groups, scaled, strict=True)
        ]
    )


def over_batch(arrays: Sequence[Sequence[Floats]]) -> list[list[Floats]]:
    """`(x - mean) / std` over all entries of all arrays; zeros if they are all equal."""
    entries = np.concatenate([a for group in arrays for a in group] or [np.zeros(0)])
    if len(entries) == 0 or entries.max() - entries.min() <= EQUAL_REWARDS:
        return [[np.zeros(len(a)) for a in group] for group in arrays]
    mean, deviation = entries.mean(), entries.std()
    return [[(a - mean) / deviation for a in group] for group in arrays]


def overlong_penalty(response_len: int, *, max_new_tokens: int, buffer: int, penalty: float) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4), in [-penalty, 0].

    0 up to `max_new_tokens - buffer` tokens, then linear down to `-penalty` at `max_new_tokens`. `buffer` = 0
    turns it off.
    """
    if buffer <= 0:
        return 0.0
    excess = (response_len - (max_new_tokens - buffer)) / buffer
    return -penalty * min(max(excess, 0.0), 1.0)


def _compared(group: Group, rule: Callable[[Floats, Floats], Floats]) -> FloatArray:
    """`rule(R, s)` for the usable members, 0 for the others; 0 for all if the raw rewards are equal."""
    advantages = np.zeros(len(group), dtype=np.float32)
    usable = [i for i, member in enumerate(group) if member.usable]
    if _has_signal(group):
        rewards = np.array([group[i].raw + float(group[i].token_rewards.sum()) for i in usable])
        advantages[usable] = rule(rewards, np.array([group[i].shaping for i in usable]))
    return advantages


def _has_signal(group: Group) -> bool:
    """Whether the raw rewards of the usable members differ."""
    return not is_uninformative(member.raw for member in group if member.usable)


def _spread(rewards: Floats) -> float:
    """The deviation; infinite if a KL penalty has made different raw rewards equal up to rounding."""
    return float(rewards.std()) if rewards.max() - rewards.min() > EQUAL_REWARDS else np.inf


def _summed_from_each(rewards: FloatArray) -> Floats:
    return np.cumsum(rewards[::-1].astype(np.float64))[::-1]


def _constant(tokens: int, advantage: float) -> Estimate:
    return Estimate(advantages=np.full(tokens, advantage, dtype=np.float32))


def _as_estimates(arrays: Sequence[Sequence[Floats]]) -> list[list[Estimate]]:
    return [[Estimate(advantages=a.astype(np.float32)) for a in group] for group in arrays]
