"""How long trajectories turn out to be: what routing expects of those that have only begun."""

from __future__ import annotations

GUESS_WEIGHT = 16
"""So many finished trajectories weigh as much as the first guess: the first to finish are the short ones."""
MEMORY = 1024
"""So many finished trajectories are remembered, older ones (and the guess) ever less: lengths change as a
model learns, and a wrong guess must not last."""


class LengthStatistics:
    """Means over the trajectories that finished lately, with a first guess.

    They are rounded to three digits, so that what is worked out from them stays good for a while.
    """

    def __init__(self, expected_response: int) -> None:
        """`expected_response`: the guess, in tokens."""
        self._count = float(GUESS_WEIGHT)
        self._tokens = float(GUESS_WEIGHT * expected_response)
        self._squares = float(GUESS_WEIGHT * expected_response**2)
        self._prompts = 0.0
        self._drawn = 0.0

    def drawn(self, prompt_length: int) -> None:
        """A group was drawn."""
        keep = 1 - 1 / MEMORY
        self._prompts = keep * self._prompts + prompt_length
        self._drawn = keep * self._drawn + 1

    def finished(self, response_length: int) -> None:
        """A response is complete."""
        keep = 1 - 1 / MEMORY
        self._count = keep * self._count + 1
        self._tokens = keep * self._tokens + response_length
        self._squares = keep * self._squares + response_length**2

    @property
    def expected_growth(self) -> int:
        """Mean response length, in tokens."""
        return _rounded(self._tokens / self._count)

    @property
    def expected_held(self) -> int:
        """Tokens that a running trajectory holds at a random moment: prompt + E[L²] / (2 E[L]).

        Long responses are met more often than they are drawn, for they stay longer; and each is met half
        way on average (the mean age of renewal theory).
        """
        prompt = self._prompts / self._drawn if self._drawn else 0.0
        return _rounded(prompt + self._squares / (2 * max(1.0, self._tokens)))


def _rounded(tokens: float) -> int:
    """To two digits after the first one: 1,234 is 1,230."""
    return max(1, round(float(f"{tokens:.3g}")))
