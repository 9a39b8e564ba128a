"""How long decode steps take when nothing but the lengths changes: closed forms of the cost model.

With n trajectories running and kv tokens cached, the first step takes `first = k1 kv + max(k2, k3 n) + k4`
seconds, each further one `growth = k1 n` more than the one before, and the KV that is still to be built comes
on top of the first. So m steps take `prefill + m first + growth m (m - 1) / 2`.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Pace(NamedTuple):
    """Seconds; `first` above 0, the others not below."""

    first: float
    growth: float
    prefill: float

    def seconds(self, steps: int) -> float:
        """Time of so many steps."""
        if steps == 0:
            return 0.0
        return self.prefill + steps * self.first + self.growth * (steps * (steps - 1)) / 2

    def steps_until(self, seconds: float) -> int:
        """Fewest steps that take at least so long."""
        if seconds <= 0:
            return 0
        left = seconds - self.prefill
        if left <= 0:
            return 1
        # growth/2 m^2 + (first - growth/2) m = left, in the form that does not cancel.
        linear = self.first - self.growth / 2
        root = math.sqrt(linear * linear + 2 * self.growth * left)
        steps = max(1, math.ceil(2 * left / (linear + root)))
        while steps > 1 and self.seconds(steps - 1) >= seconds:  # rounding
            steps -= 1
        while self.seconds(steps) < seconds:
            steps += 1
        return steps

    def steps_within(self, seconds: float) -> int:
        """Most steps that take at most so long."""
        steps = self.steps_until(seconds)
        return steps if self.seconds(steps) <= seconds else steps - 1
