"""The embedded engine: Hugging Face causal language models decoded in this process with PyTorch."""

from staleflow.rollout.torch.engine import TorchEngine

__all__ = ["TorchEngine"]
