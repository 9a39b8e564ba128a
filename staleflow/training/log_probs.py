"""Log-probs and entropy of given tokens under a model.

Invariant: they are for the distribution that the rollout sampled from, temperature included, so that with
equal weights the ratio to the behaviour log-probs is 1 (F13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def token_log_probs(
    model: Callable[..., Any],
    input_ids: Tensor,
    mask: Tensor,
    temperature: float,
    *,
    lengths: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob (with gradient) and entropy (without), in nats, of each token in `mask`; 0 elsewhere.

    `input_ids`, `mask` and the results have shape (rows, length). The first token of a row has no log-prob:
    `mask[:, 0]` must be False. `temperature` 0 (greedy) counts as 1. `lengths`: tokens of each row without
    padding, to run the rows packed; None: run them padded.
    """
    if lengths is None:
        logits = model(input_ids=input_ids, use_cache=False).logits
        # The logits at t - 1 predict token t. Only tokens in the mask get the float32 copy and the softmax.
        wanted = logits[:, :-1][mask[:, 1:]]
    else:
        wanted = _packed_logits(model, input_ids, mask, lengths)
    log_p = (wanted.float() / (temperature or 1.0)).log_softmax(dim=-1)
    chosen = log_p.gather(-1, input_ids[mask][:, None]).squeeze(-1)
    with torch.no_grad():
        spread = torch.special.entr(log_p.exp()).sum(dim=-1)
    blank = torch.zeros(input_ids.shape, dtype=torch.float32, device=input_ids.device)
    return blank.masked_scatter(mask, chosen), blank.masked_scatter(mask, spread)


def _packed_logits(
    model: Callable[..., Any], input_ids: Tensor, mask: Tensor, lengths: Sequence[int]
) -> Tensor:
    """The logits that predict the tokens in `mask`, row by row, from one row without padding.

    Positions restart with each row. From that transformers recognises the rows and keeps attention within
    them: block-diagonal masks in sdpa and eager, variable lengths in flash attention.
    """
    columns = torch.arange(input_ids.shape[1], device=input_ids.device)
    real = columns < torch.tensor(lengths, device=input_ids.device)[:, None]
    positions = columns.expand_as(input_ids)[real]
    logits = model(input_ids=input_ids[real][None], position_ids=positions[None], use_cache=False).logits
    wanted: Tensor = logits[0, :-1][mask[real][1:]]
    return wanted
