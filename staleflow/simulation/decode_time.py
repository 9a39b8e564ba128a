"""Time of decode steps while only the lengths change: closed forms of the cost model.

With n trajectories running and kv tokens cached, the first step takes `first = k1 kv + max(k2, k3 n) + k4`
seconds, and each further step `growth = k1 n` more than the previous one. Building outstanding KV adds
`prefill` to the first step. So m steps take `prefill + m first + growth m (m - 1) / 2`.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Pace(NamedTuple):
    """Seconds; `first` > 0, the others >= 0."""

    first: float
    growth: float
    prefill: float

    def seconds(self, steps: int) -> float:
        """Time of `steps` steps."""
        if steps == 0:
            return 0.0
        return self.prefill + steps * self.first + self.growth * (steps * (steps - 1)) / 2

    def steps_until(self, seconds: float) -> int:
        """Smallest number of steps that takes at least `seconds`."""
        if seconds <= 0:
            return 0
        left = seconds - self.prefill
        if left <= 0:
            return 1
        # Solve growth/2 m^2 + (first - growth/2) m = left, in the form without cancellation.
        linear = self.first - self.growth / 2
        root = math.sqrt(linear * linear + 2 * self.growth * left)
        steps = max(1, math.ceil(2 * left / (linear + root)))
        while steps > 1 and self.seconds(steps - 1) >= seconds:  # rounding
            steps -= 1
        while self.seconds(steps) < seconds:
            steps += 1
        return steps

    def steps_within(self, seconds: float) -> int:
        """Largest number of steps that takes at most `seconds`."""
        steps = self.steps_until(seconds)
        return steps if self.seconds(steps) <= seconds else steps - 1
