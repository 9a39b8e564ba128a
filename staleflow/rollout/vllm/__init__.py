"""The vLLM engine: vLLM's own scheduler, KV cache and kernels, in a process of their own."""

from staleflow.rollout.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
