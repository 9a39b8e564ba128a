"""The roofline, worked out by hand on a small model and round numbers."""

from __future__ import annotations

import dataclasses

import pytest

from staleflow.errors import UserError
from staleflow.simulation.gpus import GPUS, Gpu
from staleflow.simulation.models import MODELS, ModelDescription
from staleflow.simulation.roofline import Roofline, Shares

SMALL = ModelDescription(
    name="small", layers=2, hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=16, vocab=32
)
"""A layer: 8 * (2*8 + 2*4) = 192 of attention, 16 of norms, 3 * 8 * 16 = 384 of the MLP: 592. Two of them,
the last norm of 8 and the output layer of 256: 1448 active parameters; with the input embedding 1704."""
GPU = Gpu(name="G", flops=1000.0, memory=10_000.0, memory_bandwidth=100.0, link=50.0, network=20.0)
WHOLE = Shares(
    memory_bandwidth=1.0,
    decode_compute=1.0,
    prefill_compute=1.0,
    training_compute=1.0,
    kv_memory=1.0,
    training_memory=1.0,
    network=1.0,
    step_overhead_s=0.25,
    all_reduce_s=0.5,
)
ROOFLINE = Roofline(model=SMALL, gpu=GPU, shares=WHOLE)


def test_the_small_model_by_hand() -> None:
    assert (SMALL.active_parameters, SMALL.parameters) == (1448, 1704)
    assert (SMALL.kv_bytes, SMALL.attention_flops) == (2 * 2 * 2 * 2 * 2, 4 * 2 * 4 * 2)


def test_one_gpu_by_hand() -> None:
    costs = ROOFLINE.costs(1, running=4, attended=10.0, pull_s=1.0)
    assert costs.k1 == pytest.approx(32 / 100)  # 64 FLOPs would take 0.064 s
    assert costs.k2 == pytest.approx(2 * 1448 / 100)
    assert costs.k3 == pytest.approx(2 * 1448 / 1000)
    assert costs.k4 == pytest.approx(0.25)
    assert costs.prefill == pytest.approx((2 * (1448 - 256) + 64 * 10) / 1000)
    assert costs.pull == pytest.approx(1.0 + 2 * 1704 / 20)


def test_two_gpus_share_the_work_and_reduce_their_results() -> None:
    """4 all-reduces of 8 numbers of 2 bytes, of which a ring of two sends all: 64 bytes a token at 50 a
    second."""
    costs = ROOFLINE.costs(2, running=4, attended=10.0)
    assert costs.k1 == pytest.approx(32 / 200)
    assert costs.k2 == pytest.approx(2 * 1448 / 200)
    assert costs.k3 == pytest.approx(2 * 1448 / 2000 + 64 / 50)
    assert costs.k4 == pytest.approx(0.25 + 4 * 0.5)
    assert costs.prefill == pytest.approx((2 * 1192 + 640) / 2000 + 64 / 50)
    assert costs.pull == pytest.approx(2 * 1704 / 40)


def test_four_gpus_keep_each_of_two_kv_heads_twice() -> None:
    assert ROOFLINE.costs(4, running=4, attended=0.0).k1 == pytest.approx(2 * 32 / 400)
    assert ROOFLINE.kv_capacity(4) == (40_000 - 3408) // 64


def test_attention_may_be_bound_by_arithmetic() -> None:
    slow = dataclasses.replace(ROOFLINE, gpu=dataclasses.replace(GPU, flops=100.0))
    assert slow.costs(1, running=1, attended=0.0).k1 == pytest.approx(64 / 100)


def test_kv_capacity_by_hand() -> None:
    """10,000 bytes less 3,408 of weights, at 32 a token."""
    assert ROOFLINE.kv_capacity(1) == 206
    assert dataclasses.replace(ROOFLINE, shares=dataclasses.replace(WHOLE, kv_memory=0.3)).kv_capacity(1) < 0


def test_the_floor_of_a_mixture_is_that_of_its_mean_load() -> None:
    """4 experts, 1 a token: loads of 1, 2 and 3 read 1/4, 7/16 and 37/64 of them."""
    mixture = dataclasses.replace(SMALL, experts=4, experts_per_token=1)
    read = dataclasses.replace(ROOFLINE, model=mixture).bytes_read(3)
    experts = 2 * 4 * 384
    shared = 2 * (192 + 16 + 8 * 4) + 8 + 256
    assert read == pytest.approx(2 * (shared + experts * (1 / 4 + 7 / 16 + 37 / 64) / 3))


def test_training_by_hand() -> None:
    """(3 + 1) * (2 * 1448 + 64 * 5) FLOPs a token on four GPUs of 1,000 a second."""
    costs = ROOFLINE.trainer_costs(4, attended=5.0, updates=3, logprob_passes=1, overhead_s=2.0, push_s=1.0)
    assert costs.token_s == pytest.approx(4 * (2 * 1448 + 64 * 5) / 4000)
    assert costs.fixed_s == pytest.approx(2.0 + 3 * (30 * 1704 / 400 + 4 * 1704 / 20))
    assert costs.push_s == pytest.approx(1.0 + 3408 / 80)


def test_a_model_that_cannot_be_trained_on_so_few_gpus_is_refused_with_the_sum() -> None:
    """1,704 * 16 = 27,264 bytes on GPUs of 10,000: three."""
    assert ROOFLINE.least_training_gpus() == 3
    with pytest.raises(UserError, match=r"training_gpus must be at least 3$"):
        ROOFLINE.check_training(2)
    big = Roofline(model=MODELS["qwen2.5-32b"], gpu=GPUS["H20"])
    with pytest.raises(UserError) as caught:
        big.check_training(4)
    assert "32.8 billion parameters x 16 bytes = 524 GB" in str(caught.value)
    assert "on GPUs of 96 GB x 0.8 (training_memory)): simulation.training_gpus must be at least 7" in str(
        caught.value
    )


def test_an_instance_may_have_as_many_gpus_as_divide_its_heads() -> None:
    assert Roofline(model=MODELS["qwen2.5-7b"], gpu=GPUS["H20"]).parallels() == (1, 2, 4)  # 28 heads
    assert Roofline(model=MODELS["qwen3-30b-a3b"], gpu=GPUS["H20"]).parallels() == (1, 2, 4, 8)
    with pytest.raises(UserError, match=r"has 28 heads and 4 KV heads, and a node 8 GPUs: use 1 or 2 or 4"):
        Roofline(model=MODELS["qwen2.5-7b"], gpu=GPUS["H20"]).kv_capacity(8)


def test_qwen_14b_on_one_h20_is_of_the_known_order() -> None:
    """28 GB at 3.2 TB/s, and 56.9 GB free for KV of 196,608 bytes a token."""
    roofline = Roofline(model=MODELS["qwen2.5-14b"], gpu=GPUS["H20"])
    costs = roofline.costs(1, running=48, attended=2000.0)
    assert costs.k2 == pytest.approx(27.983e9 / 3.2e12, rel=1e-4)
    assert costs.k1 == pytest.approx(196_608 / 3.2e12)
    assert costs.k3 == pytest.approx(27.983e9 / 88.8e12, rel=1e-4)
    assert roofline.kv_capacity(1) == 289_204
