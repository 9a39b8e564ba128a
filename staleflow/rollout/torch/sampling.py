"""Draws tokens from logits, given one uniform number per row.

Invariants: the log-prob returned is that of the distribution sampled from (temperature, top-k and top-p
included); a masked token is never drawn; the token depends only on the row's logits and number, not on
other rows. Inverse transform: the first token whose cumulative mass exceeds u × total mass, accumulated in
float64 so that rounding does not matter with a large vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from staleflow.errors import EngineError
from staleflow.rollout.engine import SamplingParams


def sample(
    logits: torch.Tensor,
    uniforms: NDArray[np.float64],
    params: SamplingParams,
    greedy: Sequence[bool] = (),
) -> tuple[list[int], list[float]]:
    """Tokens and their log-probs (nats), one per row.

    `logits` has shape (rows, vocabulary), `uniforms` (rows,) in [0, 1). Temperature 0 takes the most
    likely token and gives log-probs at temperature 1; rows that are True in `greedy` (rows,; empty: none)
    do the same at any temperature. Raises EngineError for logits that are not finite.
    """
    scores = plain = logits.float()
    likeliest = [True] * len(plain) if params.temperature == 0 else greedy
    fixed = torch.tensor(likeliest, device=plain.device).unsqueeze(-1) if any(likeliest) else None
    if params.temperature > 0:
        scores = masked(plain / params.temperature, top_k=params.top_k, top_p=params.top_p)
    if fixed is not None:
        scores = torch.where(fixed, plain, scores)
    log_probs = torch.log_softmax(scores, dim=-1)
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    if not bool(torch.isfinite(total).all()):
        raise EngineError("the model returned logits that are not finite")
    draw = torch.from_numpy(uniforms).to(total.device).unsqueeze(-1) * total
    # Rounding may raise u × total to total itself, which no cumulative mass exceeds.
    draw = torch.minimum(draw, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, draw, right=True)
    if fixed is not None:
        tokens = torch.where(fixed, plain.argmax(dim=-1, keepdim=True), tokens)
    chosen = log_probs.gather(-1, tokens)
    return tokens.squeeze(-1).tolist(), chosen.squeeze(-1).tolist()


def masked(scores: torch.Tensor, *, top_k: int, top_p: float) -> torch.Tensor:
    """Scores with -inf outside the `top_k` best (0: all) and, of those, outside the nucleus.

    The nucleus is the smallest set of most likely tokens whose mass is at least `top_p`.
    """
    if 0 < top_k < scores.shape[-1]:
        threshold = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    if top_p < 1.0:
        ordered, index = scores.sort(dim=-1, descending=True, stable=True)
        mass = torch.softmax(ordered.double(), dim=-1)
        before = mass.cumsum(dim=-1) - mass
        # Always keep the most likely token.
        drop = before >= max(top_p, torch.finfo(torch.float64).tiny)
        scores = scores.masked_fill(torch.zeros_like(drop).scatter(-1, index, drop), -torch.inf)
    return scores
