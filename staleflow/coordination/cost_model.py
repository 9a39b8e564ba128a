"""What decoding costs: the time of one step of a rollout instance, and what one trajectory more changes.

    step time (s)      t(n, kv) = k1 * kv + max(k2, k3 * n) + k4
    throughput         T(n, kv) = n / t(n, kv)   tokens per second

with n trajectories running and kv tokens in the KV cache: k1 reads one cached token, k2 is the floor of
loading the weights, k3 the arithmetic of one trajectory, k4 what a step costs whatever it does (StaleFlow
paper, cost model). `staleflow profile` measures an engine and fits the constants (`cost_fit`); `online_costs`
refines them during a run.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Constants of one kind of instance, in seconds, none negative.

    Those that decisions rest on have k4 + max(k2, k3) above 0 (`cost_fit` and the file's loader see to it);
    all zero is for engines that take no time.
    """

    k1: float
    """Per cached token and step."""
    k2: float
    """Per step, at least."""
    k3: float
    """Per running trajectory and step."""
    k4: float
    """Per step."""
    prefill: float
    """Per token whose KV is built."""
    pull: float = 0.0
    """Per pull, without the rebuilding of KV."""

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value >= 0 for value in astuple(self)):
            raise ValueError(f"every constant of a cost model is a finite number of at least 0: {self}")

    def step_s(self, running: float, kv_tokens: float) -> float:
        """Seconds of one decode step."""
        return self.k1 * kv_tokens + max(self.k2, self.k3 * running) + self.k4

    def throughput(self, running: float, kv_tokens: float) -> float:
        """Tokens per second of an instance; 0 when nothing runs. The step must take time."""
        return running / self.step_s(running, kv_tokens) if running > 0 else 0.0

    def gain(self, running: int, kv_tokens: float, length: float) -> float:
        """ΔT of one trajectory more, which holds `length` tokens, in tokens per second. May be negative."""
        # throughput(running + 1, kv_tokens + length) - throughput(running, kv_tokens), without the calls:
        # routing asks this twice for every trajectory.
        k1, k2, k3, k4 = self.k1, self.k2, self.k3, self.k4
        more = running + 1
        after = more / (k1 * (kv_tokens + length) + (k3 * more if k3 * more > k2 else k2) + k4)
        if running <= 0:
            return after
        return after - running / (k1 * kv_tokens + (k3 * running if k3 * running > k2 else k2) + k4)

    def ideal_gain(self, length: float) -> float:
        """ΔT_ideal: the gain on an empty instance."""
        return self.gain(0, 0.0, length)

    def prefill_s(self, tokens: float) -> float:
        """Seconds to build the KV of so many tokens, in which the instance decodes nothing."""
        return self.prefill * tokens


START_VALUES = CostModel(k1=2e-8, k2=4e-3, k3=1e-4, k4=1e-3, prefill=5e-5, pull=0.1)
"""Where a run without a profile starts: the order of magnitude of a small model, until reports refine it."""
