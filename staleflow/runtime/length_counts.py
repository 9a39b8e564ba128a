"""Lengths of what was sampled beside those of what was trained on: dropping and cutting the long ones biases.

Invariant: a trajectory of which anything was generated is counted as sampled once, when its generation ends:
it finished, or it was cut off (aborted, expired, truncated or given up), then at the length that it had. As
trained it is counted when its batch is handed over, unless it is masked. What the end of the run cuts off is
not counted, for that says nothing about the choice.

Buckets are powers of two: bucket b holds lengths from b to 2 b - 1 (bucket 1 also those of 0).
"""

from __future__ import annotations

from collections import Counter

from staleflow.data.trajectory import TrainBatch, Trajectory
from staleflow.training.filtering import is_usable

KINDS = ("sampled", "trained")


class LengthCounts:
    """Counts since the last `take`, and those of the whole attempt."""

    def __init__(self, longest: int) -> None:
        """`longest`: tokens of the longest response; every row has all buckets up to its own."""
        self._buckets = [1 << k for k in range(max(1, longest).bit_length())]
        self._since = _Counts()
        self._total = _Counts()

    def sampled(self, trajectory: Trajectory, *, cut: bool = False) -> None:
        """The trajectory's generation has ended; `cut`: it had not finished by itself."""
        if trajectory.response_len == 0:
            return
        for counts in (self._since, self._total):
            counts.add("sampled", trajectory)
            counts.cut += cut

    def trained(self, batch: TrainBatch) -> None:
        """A batch was handed to the trainer."""
        for trajectory in [s.trajectory for group in batch.groups for s in group if is_usable(s)]:
            self._since.add("trained", trajectory)
            self._total.add("trained", trajectory)

    def take(self) -> dict[str, float]:
        """Metrics since the last call, of the same names each time.

        `lengths/{sampled,trained}/<bucket>`: trajectories by response length;
        `lengths/{sampled,trained}/mean`: in tokens; `lengths/cut`: those of the sampled that were cut off.
        """
        values, self._since = self._since.of_responses(self._buckets), _Counts()
        return values

    def totals(self) -> dict[str, float]:
        """The same for the whole attempt, and `prompt_lengths/...` by the length of their prompts."""
        return self._total.of_responses(self._buckets) | self._total.of_prompts()


class _Counts:
    def __init__(self) -> None:
        self.cut = 0
        self._responses: Counter[tuple[str, int]] = Counter()
        self._prompts: Counter[tuple[str, int]] = Counter()
        self._response_tokens: Counter[str] = Counter()
        self._prompt_tokens: Counter[str] = Counter()

    def add(self, kind: str, trajectory: Trajectory) -> None:
        response, prompt = trajectory.response_len, len(trajectory.prompt.tokens)
        self._responses[kind, bucket(response)] += 1
        self._prompts[kind, bucket(prompt)] += 1
        self._response_tokens[kind] += response
        self._prompt_tokens[kind] += prompt

    def of_responses(self, buckets: list[int]) -> dict[str, float]:
        values: dict[str, float] = {"lengths/cut": self.cut}
        for kind in KINDS:
            values |= {f"lengths/{kind}/{b}": self._responses[kind, b] for b in buckets}
            values[f"lengths/{kind}/mean"] = self._mean(self._response_tokens[kind], kind)
        return values

    def of_prompts(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for kind in KINDS:
            values |= {
                f"prompt_lengths/{k}/{b}": n for (k, b), n in sorted(self._prompts.items()) if k == kind
            }
            values[f"prompt_lengths/{kind}/mean"] = self._mean(self._prompt_tokens[kind], kind)
        return values

    def _mean(self, tokens: int, kind: str) -> float:
        number = sum(count for (k, _), count in self._responses.items() if k == kind)
        return tokens / number if number else 0.0


def bucket(length: int) -> int:
    """The largest power of two that is at most `length`, and 1 for 0."""
    return 1 << (max(1, length).bit_length() - 1)
