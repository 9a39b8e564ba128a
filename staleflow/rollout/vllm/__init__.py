"""The vLLM engine: vLLM's scheduler, KV cache and kernels, in a separate process."""

from staleflow.rollout.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
