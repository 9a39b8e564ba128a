"""Log-probs and entropy of given tokens under a model.

Invariant: they are those of the distribution that the rollout sampled from, temperature included, so that
under equal weights the ratio to the behaviour log-probs is 1 (F13).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def token_log_probs(
    model: PreTrainedModel, input_ids: Tensor, mask: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-prob (with gradient) and entropy (without), in nats, of each token in `mask`; 0 elsewhere.

    `input_ids` and `mask` have shape (rows, length), and so have the results. The first token of a row
    has no log-prob: `mask[:, 0]` must be False. `temperature` 0, greedy, counts as 1.
    """
    logits = model(input_ids=input_ids, use_cache=False).logits
    # The logits at t - 1 predict token t. Only tokens in the mask get the float32 copy and the softmax.
    wanted = logits[:, :-1][mask[:, 1:]].float() / (temperature or 1.0)
    log_p = wanted.log_softmax(dim=-1)
    chosen = log_p.gather(-1, input_ids[mask][:, None]).squeeze(-1)
    with torch.no_grad():
        spread = torch.special.entr(log_p.exp()).sum(dim=-1)
    blank = torch.zeros(input_ids.shape, dtype=torch.float32, device=input_ids.device)
    return blank.masked_scatter(mask, chosen), blank.masked_scatter(mask, spread)
