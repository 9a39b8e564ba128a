"""Packed rows give what padded rows give; rows are dealt out evenly."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from staleflow.training.batching import blank_micro_batch, cuts, row_of, shares
from staleflow.training.log_probs import token_log_probs

SHAPE = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.5,
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_packed_log_probs_and_gradients_equal_padded_ones(family, attention):
    torch.manual_seed(0)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation=attention))
    else:
        shape = SHAPE | {"num_key_value_heads": 1, "attn_implementation": attention}
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
    lengths = (7, 3, 5, 2)
    ids = torch.randint(1, 11, (4, 7))
    mask = torch.tensor([[1 <= t < length for t in range(7)] for length in lengths])
    found = []
    for packed in (None, lengths):
        theta, entropy = token_log_probs(model, ids, mask, 0.7, lengths=packed)
        gradients = torch.autograd.grad((theta * torch.arange(1, 8)).sum(), list(model.parameters()))
        found.append((theta.detach(), entropy, *gradients))
    for padded, packed in zip(*found, strict=True):
        torch.testing.assert_close(packed, padded, atol=2e-4, rtol=1e-4)
    assert (found[0][0] != 0).sum() == mask.sum()


def test_packing_counts_no_padding():
    lengths = [2, 9, 3, 4]
    assert cuts(lengths, 9) == [[0, 2], [3], [1]]
    assert cuts(lengths, 9, packing=True) == [[0, 2, 3], [1]]
    assert cuts([], 9, packing=True) == []
    assert cuts([20, 1], 9, packing=True) == [[1], [0]]


def test_rows_are_dealt_out_so_that_ranks_have_about_as_many_tokens():
    assert shares([5, 1, 4, 2], 2) == [[0, 1], [2, 3]]
    assert shares([5], 3) == [[0], [], []]
    assert shares([], 2) == [[], []]


def test_a_blank_micro_batch_carries_a_gradient_of_zero_and_no_record(member):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    like = replace(row_of(member("g", 0, [4], 1.0)), prox=np.zeros(4, dtype=np.float32))
    blank = blank_micro_batch(like)
    assert blank.trained(0) == []
    assert not blank.loss_mask.any()
    assert blank.prox is not None
    assert blank.reference is None
    for lengths in (None, blank.lengths):
        theta, _ = token_log_probs(model, blank.input_ids, blank.loss_mask, 1.0, lengths=lengths)
        gradients = torch.autograd.grad(theta.sum(), list(model.parameters()))
        assert all(not gradient.any() for gradient in gradients)
