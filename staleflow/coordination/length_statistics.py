"""How long trajectories turn out to be: what routing expects of those that have only begun."""

from __future__ import annotations

GUESS_WEIGHT = 16
"""So many finished trajectories weigh as much as the first guess: the first to finish are the short ones."""
MEMORY = 1024
"""So many finished trajectories are remembered, older ones (and the guess) ever less: lengths change as a
model learns, and a wrong guess must not last."""
TOLERANCE = 0.02
"""What is told stays as it is while the mean is not further from it: a mean over so few responses is known no
better, and what is worked out from it, for every instance, stays good for a while."""


class LengthStatistics:
    """Means over the trajectories that finished lately, with a first guess."""

    def __init__(self, expected_response: int) -> None:
        """`expected_response`: the guess, in tokens."""
        self._count = float(GUESS_WEIGHT)
        self._tokens = float(GUESS_WEIGHT * expected_response)
        self._squares = float(GUESS_WEIGHT * expected_response**2)
        self._prompts = 0.0
        self._drawn = 0.0
        self.expected_growth = 0
        """Mean response length, in tokens."""
        self.expected_held = 0
        """Tokens that a running trajectory holds at a random moment: prompt + E[L²] / (2 E[L]).

        Long responses are met more often than they are drawn, for they stay longer; and each is met half
        way on average (the mean age of renewal theory).
        """
        self._tell()

    def drawn(self, prompt_length: int) -> None:
        """A group was drawn."""
        keep = 1 - 1 / MEMORY
        self._prompts = keep * self._prompts + prompt_length
        self._drawn = keep * self._drawn + 1
        self._tell()

    def finished(self, response_length: int) -> None:
        """A response is complete."""
        keep = 1 - 1 / MEMORY
        self._count = keep * self._count + 1
        self._tokens = keep * self._tokens + response_length
        self._squares = keep * self._squares + response_length**2
        self._tell()

    def _tell(self) -> None:
        growth = self._tokens / self._count
        if _is_off(self.expected_growth, growth):
            self.expected_growth = max(1, round(growth))
        prompt = self._prompts / self._drawn if self._drawn else 0.0
        held = prompt + self._squares / (2 * max(1.0, self._tokens))
        if _is_off(self.expected_held, held):
            self.expected_held = max(1, round(held))


def _is_off(told: int, mean: float) -> bool:
    return abs(mean - told) > TOLERANCE * told
