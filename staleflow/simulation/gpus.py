"""GPUs as data: the peak values that a roofline needs.

Sources: NVIDIA's data sheets (H100 SXM5, H200 SXM, A100 SXM 80 GB). NVIDIA publishes none for the H20; its
numbers are the commonly quoted ones. FLOPs are dense bfloat16, without the factor 2 of sparsity. The data
sheets state NVLink for both directions together (900 GB/s, A100: 600); one direction is half of it. The
network does not belong to the GPU: 400 Gbit/s per GPU (A100: 200), as in the vendor's own DGX systems.
"""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.errors import UserError

NODE_GPUS = 8
"""GPUs connected by NVLink: the maximum for one instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Peak values of one GPU; 1 GB is 1e9 bytes."""

    name: str
    flops: float
    """bfloat16 operations per second, dense."""
    memory: float
    """Bytes."""
    memory_bandwidth: float
    """Bytes per second."""
    link: float
    """Bytes per second to the other GPUs of its node, in one direction."""
    network: float
    """Bytes per second to other nodes, in one direction."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="H20", flops=148e12, memory=96e9, memory_bandwidth=4.0e12, link=450e9, network=50e9),
        Gpu(name="H100", flops=989e12, memory=80e9, memory_bandwidth=3.35e12, link=450e9, network=50e9),
        Gpu(name="H200", flops=989e12, memory=141e9, memory_bandwidth=4.8e12, link=450e9, network=50e9),
        Gpu(name="A100", flops=312e12, memory=80e9, memory_bandwidth=2.04e12, link=300e9, network=25e9),
    )
}
"""By name."""


def find_gpu(name: str) -> Gpu:
    """A GPU by its name. Raises UserError."""
    if name not in GPUS:
        raise UserError(f"unknown GPU {name!r}: use one of {', '.join(GPUS)}")
    return GPUS[name]
