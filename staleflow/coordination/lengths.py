"""How long trajectories turn out to be: what routing expects of those that have only begun."""

from __future__ import annotations


class LengthStatistics:
    """Means over finished trajectories, with a first guess that a few of them outweigh."""

    GUESS_WEIGHT = 16
    """So many finished trajectories weigh as much as the guess: the first to finish are the short ones."""

    def __init__(self, expected_response: int) -> None:
        """`expected_response`: the guess, in tokens."""
        self._count = float(self.GUESS_WEIGHT)
        self._responses = float(self.GUESS_WEIGHT * expected_response)
        self._held = float(self.GUESS_WEIGHT * expected_response * expected_response / 2)
        self._prompts = 0.0
        self._drawn = 0

    def drawn(self, prompt_length: int) -> None:
        """A trajectory was drawn."""
        self._prompts += prompt_length
        self._drawn += 1

    def finished(self, response_length: int) -> None:
        """A response is complete."""
        self._count += 1
        self._responses += response_length
        self._held += response_length * response_length / 2

    @property
    def expected_growth(self) -> int:
        """Mean response length, in tokens."""
        return max(1, round(self._responses / self._count))

    @property
    def expected_held(self) -> int:
        """Tokens that a running trajectory holds at a random moment: prompt + E[L²] / (2 E[L]).

        Long responses are met more often than they are drawn, for they stay longer; and each is met half
        way on average (renewal theory's mean age).
        """
        prompt = self._prompts / self._drawn if self._drawn else 0.0
        return max(1, round(prompt + self._held / max(1.0, self._responses)))
