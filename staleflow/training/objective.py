"""What a trainer optimises: from the groups of a step to the loss of one micro-batch.

Invariants:

- nothing here has weights, an optimizer or a backward pass: a trainer runs the model around it;
- all that is fixed by the whole batch (order, minibatches, advantages, scales) is a function of the batch, of
  what was measured on it, and of the seed. So each rank of a trainer can work it out by itself and then take
  any share of the rows: the sum of the shares' losses is the loss;
- the loss does not depend on how micro-batches are cut.

::

    lay_out(batch)                 the rows of each optimizer update, advantages not estimated yet
        |
        v   [the trainer runs its models over `micro_batches` of the rows, for what `needs` says]
    updates(batch, rows, measured) rows with advantages, and the scale of each
        |
        v   [the trainer cuts the rows, or a rank's share of them, with `micro_batches`, and runs the model]
    loss(micro, theta, entropy)    to be summed over micro-batches (and ranks, never averaged), then one step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from staleflow.data.trajectory import FloatArray, TrainBatch
from staleflow.training.algorithms.algorithm import Algorithm, Shaping
from staleflow.training.batching import MicroBatch, Row, row_of
from staleflow.training.correction_rules import check_correction
from staleflow.training.corrections import CORRECTIONS
from staleflow.training.losses import ClipRange
from staleflow.training.step_metrics import StepMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What has to be measured on the rows, without gradient, before the step's first update."""

    prox: bool
    """Log-probs under the weights at the step's start. With a single update nothing moves in between, so the
    update's own forward pass gives them."""
    reference: bool
    """Log-probs under the reference model."""
    values: bool
    """What the critic expects."""

    def __bool__(self) -> bool:
        """Whether anything does."""
        return self.prox or self.reference or self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured on one row; each of shape (prompt + response,), None where it is not needed."""

    prox: FloatArray | None = None
    reference: FloatArray | None = None
    values: FloatArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer update: all its rows."""

    rows: tuple[Row, ...]
    scales: NDArray[np.float64]
    """Factor of each token's loss, by row; shape (rows,)."""
    informative: bool
    """False: no token teaches anything, and the update must leave weights and optimizer as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroLoss:
    """The loss of one micro-batch, and its part in the step's metrics."""

    loss: Tensor
    """Scalar; carries the gradient."""
    tokens: Mapping[str, Tensor]
    """Keyword arguments of `StepMetrics.add_tokens`."""

    def record(self, metrics: StepMetrics) -> float:
        """Add to the step's metrics; returns the loss."""
        metrics.add_tokens(**self.tokens)
        return float(self.loss.detach())


class Objective:
    """See the module. Picklable. Raises ConfigError for a correction that does not go with `bound`."""

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
    ) -> None:
        check_correction(correction, bound)
        self._algorithm = algorithm
        self._correct = CORRECTIONS[correction]
        self._minibatches = minibatches
        self._clip = ClipRange(low=clip_low, high=clip_high)
        self._tis_cap = tis_cap
        self._shaping = Shaping(
            max_new_tokens=max_new_tokens, overlong_buffer=overlong_buffer, overlong_penalty=overlong_penalty
        )
        self._seed = seed

    @property
    def needs(self) -> Needs:
        """What `updates` has to be given."""
        return Needs(prox=self._minibatches > 1, reference=False, values=False)

    def lay_out(self, batch: TrainBatch) -> tuple[tuple[Row, ...], ...]:
        """Rows of each optimizer update; groups are kept whole, and their order is drawn when it matters."""
        groups = list(batch.groups)
        count = min(self._minibatches, len(groups))
        if count > 1:
            order = np.random.default_rng([self._seed, batch.step]).permutation(len(groups))
            groups = [groups[i] for i in order]
        chunks = np.array_split(np.arange(len(groups)), count) if count else []
        return tuple(tuple(row_of(member) for i in chunk for member in groups[i]) for chunk in chunks)

    def updates(
        self, batch: TrainBatch, rows: Sequence[Sequence[Row]], measured: Mapping[str, Measured]
    ) -> tuple[Update, ...]:
        """The rows of `lay_out` with advantages and scales.

        `measured`, by trajectory id, has every row of the batch if `needs` is true, and is empty otherwise.
        """
        advantages = {
            member.trajectory.trajectory_id: float(advantage)
            for group in batch.groups
            for member, advantage in zip(group, self._algorithm.advantages(group, self._shaping), strict=True)
        }

        def complete(row: Row) -> Row:
            seen = measured.get(row.trajectory_id, Measured())
            return replace(
                row,
                advantages=np.full(len(row.tokens), advantages[row.trajectory_id], dtype=np.float32),
                prox=seen.prox,
                reference=seen.reference,
                values=seen.values,
            )

        return tuple(self._update([complete(row) for row in chunk]) for chunk in rows)

    def _update(self, rows: Sequence[Row]) -> Update:
        loss_tokens = np.array([row.loss_tokens for row in rows], dtype=np.int64)
        return Update(
            rows=tuple(rows),
            scales=self._algorithm.token_scale(loss_tokens, self._shaping.max_new_tokens),
            informative=any(row.is_informative for row in rows),
        )

    def loss(self, micro: MicroBatch, theta: Tensor, entropy: Tensor) -> MicroLoss:
        """The loss of one micro-batch, ready to be summed.

        `theta` and `entropy`, shape (rows, length), are those of `token_log_probs` over the micro-batch's
        `loss_mask` under the weights being trained.
        """
        mask = micro.loss_mask
        prox = theta.detach() if micro.prox is None else micro.prox
        factors = self._correct(theta, prox, micro.behaviour, self._tis_cap)
        token_loss = self._algorithm.token_loss(factors.log_ratio, micro.advantages, mask, self._clip)
        weighted = token_loss.loss * factors.weight * micro.scale
        return MicroLoss(
            loss=weighted[mask].sum(),
            tokens={
                "mask": mask,
                "prox": prox,
                "behaviour": micro.behaviour,
                "entropy": entropy,
                "clipped": token_loss.clipped,
                "weight": factors.weight,
                "informative": micro.advantages != 0,
            },
        )
