"""From the groups of a training step to padded tensors.

Invariants:

- the ids trained on are the ids sampled: nothing is decoded and encoded again (F14);
- entry t of every per-token tensor refers to token t of the row, so all have the shape of `input_ids`;
- the loss covers generated tokens of usable members only; given segments stay in the context;
- the ledger's `trained` records are read back from these tensors, never from the trajectories.

Rows are padded on the right: under causal attention no token sees the padding, so no attention mask and
no position ids are needed. Packing removes the padding from the model's input only (`log_probs`); losses
still see whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from staleflow.data.trajectory import (
    GIVEN_VERSION,
    BoolArray,
    FloatArray,
    IntArray,
    ScoredTrajectory,
    token_hash,
)
from staleflow.training.filtering import is_usable
from staleflow.training.trainer import TrainedTrajectory

BLANK = ""
"""Trajectory id of a filler row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One trajectory laid out over prompt and response; every array has shape (prompt + response,)."""

    trajectory_id: str
    tokens: IntArray
    response_mask: BoolArray
    """True on the response, generated and given."""
    loss_mask: BoolArray
    """True on generated tokens of a usable member."""
    behaviour: FloatArray
    """Behaviour log-probs; 0 where nothing was generated."""
    versions: IntArray
    """GIVEN_VERSION where nothing was generated."""
    advantages: FloatArray
    """0 for tokens without one, and before they are estimated."""
    prox: FloatArray | None = None
    """Log-probs under the weights at the step's start; None: those of the update's own forward pass."""
    reference: FloatArray | None = None
    """Log-probs under the reference model; None: not needed."""
    values: FloatArray | None = None
    """The critic's value before each token at the step's start; None: there is no critic."""
    returns: FloatArray | None = None
    """The critic's targets; None: there is no critic."""

    @property
    def loss_tokens(self) -> int:
        """Tokens in the loss."""
        return int(self.loss_mask.sum())

    @property
    def is_informative(self) -> bool:
        """Whether a token in the loss has an advantage."""
        return bool((self.loss_mask & (self.advantages != 0)).any())


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows of one pass through the model; tensors have shape (rows, length) unless stated otherwise."""

    trajectory_ids: tuple[str, ...]
    input_ids: Tensor
    response_mask: Tensor
    loss_mask: Tensor
    behaviour: Tensor
    versions: Tensor
    advantages: Tensor
    scale: Tensor
    """Factor of each token's loss, fixed by the whole optimizer batch; shape (rows, 1)."""
    lengths: tuple[int, ...]
    """Tokens of each row without its padding."""
    prox: Tensor | None
    reference: Tensor | None
    values: Tensor | None
    returns: Tensor | None

    def by_row(self, tensor: Tensor) -> dict[str, FloatArray]:
        """Trajectory id -> its row of a (rows, length) tensor, without the padding."""
        host = tensor.detach().float().cpu().numpy()
        return {
            name: host[i, :length].copy()
            for i, (name, length) in enumerate(zip(self.trajectory_ids, self.lengths, strict=True))
        }

    def trained(self, version: int) -> list[TrainedTrajectory]:
        """Records of the trajectories trained on at `version`, read back from the tensors.

        A row without generated tokens has no version of its own and reports `version`. Blank rows give no
        record.
        """
        records = []
        for row, trajectory_id in enumerate(self.trajectory_ids):
            if trajectory_id == BLANK:
                continue
            stamped = self.versions[row][self.versions[row] != GIVEN_VERSION]
            response = self.input_ids[row][self.response_mask[row]].cpu().numpy().astype(np.int32)
            records.append(
                TrainedTrajectory(
                    trajectory_id=trajectory_id,
                    min_version=int(stamped.min()) if len(stamped) else version,
                    max_version=int(stamped.max()) if len(stamped) else version,
                    tokens=int(self.loss_mask[row].sum()),
                    token_hash=token_hash(response),
                )
            )
        return records


def row_of(scored: ScoredTrajectory) -> TrainingRow:
    """Lay out one member, before its advantages are estimated.

    Raises ValueError for an empty prompt: the first token of a row has no log-prob.
    """
    trajectory = scored.trajectory
    prompt_len = len(trajectory.prompt.tokens)
    if prompt_len == 0:
        raise ValueError(f"trajectory {trajectory.trajectory_id} has an empty prompt")
    before = np.zeros(prompt_len, dtype=np.bool_)
    return TrainingRow(
        trajectory_id=trajectory.trajectory_id,
        tokens=np.concatenate([np.asarray(trajectory.prompt.tokens, dtype=np.int32), trajectory.tokens]),
        response_mask=np.concatenate([before, np.ones(trajectory.response_len, dtype=np.bool_)]),
        loss_mask=np.concatenate([before, trajectory.loss_mask & is_usable(scored)]),
        behaviour=np.concatenate([np.zeros(prompt_len, dtype=np.float32), trajectory.log_probs]),
        versions=np.concatenate([np.full(prompt_len, GIVEN_VERSION, dtype=np.int32), trajectory.versions]),
        advantages=np.zeros(prompt_len + trajectory.response_len, dtype=np.float32),
    )


def blank_row(like: TrainingRow) -> TrainingRow:
    """A row without a trajectory and without tokens in the loss, for a rank that has fewer rows than others.

    It has the same estimates and measurements as `like`.
    """
    no_tokens = np.zeros(2, dtype=np.bool_)
    zeros = np.zeros(2, dtype=np.float32)
    return TrainingRow(
        trajectory_id=BLANK,
        tokens=np.zeros(2, dtype=np.int32),
        response_mask=no_tokens,
        loss_mask=no_tokens,
        behaviour=zeros,
        versions=np.full(2, GIVEN_VERSION, dtype=np.int32),
        advantages=zeros,
        prox=None if like.prox is None else zeros,
        reference=None if like.reference is None else zeros,
        values=None if like.values is None else zeros,
        returns=None if like.returns is None else zeros,
    )


def shares(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign rows to ranks, the longest first, each to the rank with the fewest tokens so far.

    Returns row numbers by rank, ascending within a rank.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = min(range(ranks), key=lambda r: tokens[r])
        dealt[rank].append(row)
        tokens[rank] += lengths[row]
    return [sorted(rows) for rows in dealt]


def cuts(lengths: Sequence[int], token_budget: int, *, packing: bool = False) -> list[list[int]]:
    """Cut rows into micro-batches of at most `token_budget` tokens; returns row numbers by micro-batch.

    Rows are sorted by length (ties in the given order) to keep padding small. Padding counts, unless
    `packing` removes it. A row longer than the budget gets its own micro-batch.
    """
    made: list[list[int]] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        # Sorted by length, so this row is the longest of its micro-batch.
        grown = tokens + lengths[row] if packing else (len(made[-1]) + 1 if made else 1) * lengths[row]
        if made and grown <= token_budget:
            made[-1].append(row)
            tokens = grown
        else:
            made.append([row])
            tokens = lengths[row]
    return made


def micro_batches(
    rows: Sequence[TrainingRow],
    scales: NDArray[np.float64],
    token_budget: int,
    device: torch.device | str = "cpu",
    *,
    packing: bool = False,
) -> list[MicroBatch]:
    """The `cuts` of rows as tensors. `scales`, shape (rows,): the factor of each row's token losses."""
    lengths = [len(row.tokens) for row in rows]
    return [
        _padded([rows[i] for i in cut], scales[cut], device)
        for cut in cuts(lengths, token_budget, packing=packing)
    ]


def blank_micro_batch(like: TrainingRow, device: torch.device | str = "cpu") -> MicroBatch:
    """A micro-batch of one `blank_row`."""
    return _padded([blank_row(like)], np.zeros(1), device)


def _padded(
    rows: Sequence[TrainingRow], scales: NDArray[np.float64], device: torch.device | str
) -> MicroBatch:
    shape = (len(rows), max(len(row.tokens) for row in rows))

    def padded(arrays: Sequence[NDArray[np.generic]], fill: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.full(shape, fill, dtype=dtype)
        for index, array in enumerate(arrays):
            tensor[index, : len(array)] = torch.from_numpy(array)
        return tensor.to(device)

    def optional(arrays: Sequence[FloatArray | None]) -> Tensor | None:
        present = [array for array in arrays if array is not None]
        return padded(present, 0, torch.float32) if len(present) == len(arrays) else None

    return MicroBatch(
        trajectory_ids=tuple(row.trajectory_id for row in rows),
        input_ids=padded([row.tokens for row in rows], 0, torch.int64),
        response_mask=padded([row.response_mask for row in rows], 0, torch.bool),
        loss_mask=padded([row.loss_mask for row in rows], 0, torch.bool),
        behaviour=padded([row.behaviour for row in rows], 0, torch.float32),
        versions=padded([row.versions for row in rows], GIVEN_VERSION, torch.int32),
        advantages=padded([row.advantages for row in rows], 0, torch.float32),
        scale=torch.tensor(scales, dtype=torch.float32, device=device)[:, None],
        lengths=tuple(len(row.tokens) for row in rows),
        prox=optional([row.prox for row in rows]),
        reference=optional([row.reference for row in rows]),
        values=optional([row.values for row in rows]),
        returns=optional([row.returns for row in rows]),
    )
