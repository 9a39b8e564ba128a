"""Log-probs and entropy of given tokens under a model.

Invariant: they are those of the distribution that the rollout sampled from, temperature included, so that
under equal weights the ratio to the behaviour log-probs is 1 (F13).
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

    `input_ids` and `mask` have shape (rows, length), and so have the results. The first token of a row
    has no log-prob: `mask[:, 0]` must be False. `temperature` 0, greedy, counts as 1. `lengths`, the tokens
    of each row without its padding: run them packed, one behind the other; None: as they are.
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

    Positions begin anew with each row. By that transformers tells the rows apart, and keeps attention
    within them: block-diagonal masks in sdpa and eager, variable lengths in flash attention.
    """
    columns = torch.arange(input_ids.shape[1], device=input_ids.device)
    real = columns < torch.tensor(lengths, device=input_ids.device)[:, None]
    positions = columns.expand_as(input_ids)[real]
    logits = model(input_ids=input_ids[real][None], position_ids=positions[None], use_cache=False).logits
    wanted: Tensor = logits[0, :-1][mask[real][1:]]
    return wanted
