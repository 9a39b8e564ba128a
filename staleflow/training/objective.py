"""The training objective: from the groups of a step to the loss of one micro-batch.

Invariants:

- the objective has no weights, optimizer or backward pass: the trainer runs the model;
- everything that depends on the whole batch (order, minibatches, advantages, scales) is a function of the
  batch, the measurements on it and the seed. So each rank of a trainer can compute it independently and take
  any share of the rows: the loss is the sum of the shares' losses;
- the loss does not depend on how micro-batches are cut.

::

    lay_out(batch)                 the rows of each optimizer update, before advantages are estimated
        |
        v   [the trainer runs its models over `micro_batches` of the rows, to measure what `needs` lists]
    updates(batch, rows, measured) rows with advantages, and the scale of each
        |
        v   [the trainer cuts the rows, or a rank's share of them, with `micro_batches`, and runs the model]
    loss(micro, theta, entropy)    summed over micro-batches (and ranks, never averaged), then one step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from staleflow.data.trajectory import FloatArray, ScoredTrajectory, TrainBatch
from staleflow.training.advantages import overlong_penalty
from staleflow.training.algorithms.algorithm import Algorithm
from staleflow.training.batching import MicroBatch, TrainingRow, row_of
from staleflow.training.correction_rules import check_correction
from staleflow.training.corrections import CORRECTIONS, Limits
from staleflow.training.filtering import is_usable
from staleflow.training.kl import KlPenalty, k3
from staleflow.training.losses import ClipRange, PolicyTerms
from staleflow.training.outcomes import Discount, MemberOutcome
from staleflow.training.train_metrics import TrainMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Measurements needed on the rows, without gradient, before the step's first update."""

    prox: bool
    """Log-probs under the weights at the step's start. Not needed with a single update: its own forward pass
    gives them."""
    reference: bool
    """Log-probs under the reference model."""
    values: bool
    """Values of the critic."""

    def __bool__(self) -> bool:
        """Whether any is needed."""
        return self.prox or self.reference or self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMeasurements:
    """Measurements of one row; each of shape (prompt + response,), None if not needed."""

    prox: FloatArray | None = None
    reference: FloatArray | None = None
    values: FloatArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The rows of one optimizer update."""

    rows: tuple[TrainingRow, ...]
    scales: NDArray[np.float64]
    """Factor of each token's loss, by row; shape (rows,)."""
    informative: bool
    """False: no token gives the policy a signal, or the critic is still warming up. The update must then
    leave weights and optimizer unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroLoss:
    """The loss of one micro-batch, and its contribution to the step's metrics."""

    loss: Tensor
    """Scalar; carries the gradient."""
    means: Mapping[str, Tensor]
    """Metric name -> its value for each token in the loss, shape (tokens,)."""
    tokens: int
    """Tokens in the loss."""

    def record(self, metrics: TrainMetrics) -> float:
        """Add to the step's metrics; returns the loss."""
        metrics.add_tokens(self.means, self.tokens)
        return float(self.loss.detach())


NO_KL = KlPenalty()
NO_DISCOUNT = Discount()
NOTHING = RowMeasurements()


class Objective:
    """See the module. Picklable. Raises ConfigError for a correction that `bound` does not allow."""

    def __init__(
        self,
        *,
        algorithm: Algorithm,
        correction: str,
        minibatches: int,
        clip_low: float,
        clip_high: float,
        tis_cap: float,
        overlong_buffer: int,
        overlong_penalty: float,
        max_new_tokens: int,
        bound: int,
        seed: int,
        icepop_band: tuple[float, float] = (0.5, 5.0),
        sequence_band: tuple[float, float] = (0.8, 1.25),
        kl: KlPenalty = NO_KL,
        discount: Discount = NO_DISCOUNT,
        critic_warmup_steps: int = 0,
    ) -> None:
        check_correction(correction, bound)
        self._algorithm = algorithm
        self._correct = CORRECTIONS[correction]
        self._minibatches = minibatches
        self._clip = ClipRange(low=clip_low, high=clip_high)
        self._limits = Limits(cap=tis_cap, token_band=icepop_band, sequence_band=sequence_band)
        self._kl = kl
        self._discount = discount
        self._critic_warmup_steps = critic_warmup_steps if algorithm.critic else 0
        self._overlong_buffer = overlong_buffer
        self._overlong_penalty = overlong_penalty
        self._max_new_tokens = max_new_tokens
        self._seed = seed

    @property
    def needs(self) -> Needs:
        """The measurements that `updates` requires."""
        return Needs(
            prox=self._minibatches > 1 or self._kl.in_reward,
            reference=self._kl.coefficient > 0,
            values=self._algorithm.critic,
        )

    def lay_out(self, batch: TrainBatch) -> tuple[tuple[TrainingRow, ...], ...]:
        """Rows of each optimizer update. Groups stay whole; with several updates their order is random."""
        groups = list(batch.groups)
        count = min(self._minibatches, len(groups))
        if count > 1:
            order = np.random.default_rng([self._seed, batch.step]).permutation(len(groups))
            groups = [groups[i] for i in order]
        chunks = np.array_split(np.arange(len(groups)), count) if count else []
        return tuple(tuple(row_of(member) for i in chunk for member in groups[i]) for chunk in chunks)

    def updates(
        self,
        batch: TrainBatch,
        rows: Sequence[Sequence[TrainingRow]],
        measured: Mapping[str, RowMeasurements],
    ) -> tuple[Update, ...]:
        """The rows of `lay_out` with advantages and scales.

        `measured`, by trajectory id, covers every row of the batch if `needs` is true and is empty otherwise.
        """
        layout = {row.trajectory_id: row for chunk in rows for row in chunk}
        outcomes = [
            [self._outcome(member, layout[member.trajectory.trajectory_id], measured) for member in group]
            for group in batch.groups
        ]
        estimates = {
            member.trajectory.trajectory_id: estimate
            for group, found in zip(
                batch.groups, self._algorithm.advantages(outcomes, self._discount), strict=True
            )
            for member, estimate in zip(group, found, strict=True)
        }

        def complete(row: TrainingRow) -> TrainingRow:
            seen, estimate = measured.get(row.trajectory_id, NOTHING), estimates[row.trajectory_id]
            return replace(
                row,
                advantages=_spread_out(row, estimate.advantages),
                prox=seen.prox,
                reference=seen.reference,
                values=seen.values,
                returns=None if estimate.returns is None else _spread_out(row, estimate.returns),
            )

        learns = batch.step >= self._critic_warmup_steps
        return tuple(self._update([complete(row) for row in chunk], learns) for chunk in rows)

    def _outcome(
        self, scored: ScoredTrajectory, row: TrainingRow, measured: Mapping[str, RowMeasurements]
    ) -> MemberOutcome:
        """One member as the estimator's input."""
        seen, mask = measured.get(row.trajectory_id, NOTHING), row.loss_mask
        token_rewards = np.zeros(row.loss_tokens, dtype=np.float32)
        if self._kl.in_reward:
            if seen.prox is None or seen.reference is None:
                raise ValueError(f"row {row.trajectory_id} has no measurements")
            token_rewards = -self._kl(
                torch.from_numpy(seen.prox[mask]), torch.from_numpy(seen.reference[mask])
            ).numpy()
        return MemberOutcome(
            raw=scored.reward.raw,
            shaping=overlong_penalty(
                scored.trajectory.response_len,
                max_new_tokens=self._max_new_tokens,
                buffer=self._overlong_buffer,
                penalty=self._overlong_penalty,
            ),
            usable=is_usable(scored),
            token_rewards=token_rewards,
            values=None if seen.values is None else seen.values[mask],
        )

    def _update(self, rows: Sequence[TrainingRow], learns: bool) -> Update:
        loss_tokens = np.array([row.loss_tokens for row in rows], dtype=np.int64)
        has_kl = self._kl.in_loss and bool(loss_tokens.any())
        return Update(
            rows=tuple(rows),
            scales=self._algorithm.token_scale(loss_tokens, self._max_new_tokens),
            informative=learns and (has_kl or any(row.is_informative for row in rows)),
        )

    def loss(self, micro: MicroBatch, theta: Tensor, entropy: Tensor) -> MicroLoss:
        """The loss of one micro-batch, to be summed.

        `theta` and `entropy`, shape (rows, length), are the results of `token_log_probs` over the
        micro-batch's `loss_mask` under the weights being trained.
        """
        mask = micro.loss_mask
        prox = theta.detach() if micro.prox is None else micro.prox
        factors = self._correct(theta, prox, micro.behaviour, mask, self._limits)
        terms = PolicyTerms(log_ratio=factors.log_ratio, theta=theta, advantages=micro.advantages, mask=mask)
        policy = self._algorithm.token_loss(terms, self._clip)
        per_token = policy.loss
        if self._kl.in_loss and micro.reference is not None:
            per_token = per_token + self._kl(theta, micro.reference)
        weighted = per_token * factors.weight * micro.scale
        lag = (prox - micro.behaviour)[mask]
        means = {
            "kl": k3(micro.behaviour, prox)[mask],
            "entropy": entropy[mask],
            "clip_frac": policy.clipped[mask].float(),
            "logprob_abs_diff": lag.abs(),
            "correction_weight_mean": factors.weight[mask],
            "correction_masked_frac": (factors.weight[mask] == 0).float(),
            "informative_ratio": (micro.advantages[mask] != 0).float(),
        }
        if micro.reference is not None:
            means["reference_kl"] = k3(theta.detach(), micro.reference)[mask]
        return MicroLoss(loss=weighted[mask].sum(), means=means, tokens=int(mask.sum()))


def _spread_out(row: TrainingRow, of_tokens: FloatArray) -> FloatArray:
    """Values of the tokens in the loss at their places in the row; 0 elsewhere."""
    laid_out = np.zeros(len(row.tokens), dtype=np.float32)
    laid_out[row.loss_mask] = of_tokens
    return laid_out
