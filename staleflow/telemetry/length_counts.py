"""Lengths of what was sampled beside those of what was trained on: dropping and cutting the long ones biases.

Invariant: a trajectory of which anything was generated is counted as sampled once, when its generation ends:
it finished, or it was cut off (aborted, expired, truncated or given up), then at the length that it had. As
trained it is counted when its batch is handed over, unless it is masked. What the end of the run cuts off is
not counted, for that says nothing about the choice.

The last tokens of an aborted trajectory come with the report that acknowledges its Abort, so it is counted
then.

Buckets are powers of two: bucket b holds lengths from b to 2 b - 1 (bucket 1 also those of 0).
"""

from __future__ import annotations

from collections import Counter

from staleflow.coordination.actions import Abort
from staleflow.data.responses import Response
from staleflow.data.trajectory import FinishReason
from staleflow.telemetry.events import (
    BatchTaken,
    CommandSent,
    GenerationEnded,
    Handlers,
    InstanceDown,
    Released,
    ReportReceived,
    StragglerResampled,
    StragglerTruncated,
)
from staleflow.training.filtering import is_usable

KINDS = ("sampled", "trained")


class LengthCounts:
    """A listener that counts since the last `take`, and for the whole attempt."""

    def __init__(self, longest: int) -> None:
        """`longest`: tokens of the longest response; every row has all buckets up to its own."""
        self._buckets = [1 << k for k in range(max(1, longest).bit_length())]
        self._since = _Counts()
        self._total = _Counts()
        self._aborts: dict[str, Abort] = {}
        """Orders whose trajectories have not been dropped yet, by trajectory."""
        self._leaving: dict[str, dict[str, _Leaving]] = {}
        """Dropped ones that an instance still has tokens of, by instance and trajectory."""
        self._instance_of: dict[str, str] = {}
        self._cut: set[str] = set()
        """Stragglers cut off whose generation has not ended yet."""

    def handlers(self) -> Handlers:
        """See `Listener`."""
        return {
            CommandSent: self._sent,
            ReportReceived: self._reported,
            InstanceDown: self._down,
            GenerationEnded: self._ended,
            Released: self._released,
            StragglerResampled: self._resampled,
            StragglerTruncated: self._truncated,
            BatchTaken: self._batch,
        }

    def _sent(self, event: CommandSent) -> None:
        """The trajectory of an Abort is dropped next."""
        if isinstance(event.command, Abort):
            self._aborts[event.command.trajectory_id] = event.command

    def _reported(self, event: ReportReceived) -> None:
        for late in event.late:
            instance = self._instance_of.get(late.trajectory_id)
            if instance is not None:
                leaving = self._leaving[instance][late.trajectory_id]
                leaving.response += late.tokens
                leaving.finished = late.finished
        if self._leaving:
            self._left(event.report.instance, event.report.acked_seq)

    def _down(self, event: InstanceDown) -> None:
        self._left(event.instance)

    def _ended(self, event: GenerationEnded) -> None:
        trajectory = event.trajectory
        cut = trajectory.finish_reason is FinishReason.FAILED or trajectory.trajectory_id in self._cut
        self._cut.discard(trajectory.trajectory_id)
        self._sampled(trajectory.response_len, trajectory.prompt_len, cut)

    def _released(self, event: Released) -> None:
        for trajectory in event.trajectories:
            unfinished = trajectory.finish_reason is None  # the others were counted when they finished
            self._dropped(trajectory, counts=unfinished and event.reason != "discarded")

    def _resampled(self, event: StragglerResampled) -> None:
        self._dropped(event.dropped, counts=True)

    def _truncated(self, event: StragglerTruncated) -> None:
        self._cut.add(event.trajectory.trajectory_id)

    def _batch(self, event: BatchTaken) -> None:
        for trajectory in [s.trajectory for group in event.groups for s in group if is_usable(s)]:
            for counts in (self._since, self._total):
                counts.add("trained", trajectory.response_len, trajectory.prompt_len)

    def _dropped(self, trajectory: Response, *, counts: bool) -> None:
        """`counts`: it was unfinished, and the run is not over."""
        abort = self._aborts.pop(trajectory.trajectory_id, None)
        if not counts:
            return
        if abort is None:
            self._sampled(trajectory.response_len, trajectory.prompt_len, cut=True)
            return
        leaving = _Leaving(abort.seq, trajectory.response_len, trajectory.prompt_len)
        self._leaving.setdefault(abort.instance, {})[trajectory.trajectory_id] = leaving
        self._instance_of[trajectory.trajectory_id] = abort.instance

    def _left(self, instance: str, seq: int | None = None) -> None:
        """The instance has applied its commands up to `seq` and reported their tokens. None: it was lost."""
        there = self._leaving.get(instance, {})
        for trajectory_id in [t for t, leaving in there.items() if seq is None or leaving.seq <= seq]:
            leaving = there.pop(trajectory_id)
            del self._instance_of[trajectory_id]
            self._sampled(leaving.response, leaving.prompt, cut=not leaving.finished)

    def take(self) -> dict[str, float]:
        """Metrics since the last call, of the same names each time.

        `lengths/{sampled,trained}/<bucket>`: trajectories by response length;
        `lengths/{sampled,trained}/mean`: in tokens; `lengths/cut`: those of the sampled that were cut off.
        """
        values, self._since = self._since.of_responses(self._buckets), _Counts()
        return values

    def totals(self) -> dict[str, float]:
        """The same for the whole attempt, and `prompt_lengths/...` by the length of their prompts.

        At its end: what instances have not answered for is counted as far as it is known.
        """
        for instance in list(self._leaving):
            self._left(instance)
        return self._total.of_responses(self._buckets) | self._total.of_prompts()

    def _sampled(self, response: int, prompt: int, cut: bool) -> None:
        if response:
            for counts in (self._since, self._total):
                counts.add("sampled", response, prompt)
                counts.cut += cut


class _Leaving:
    """A dropped trajectory whose Abort is not acknowledged: tokens of it may still come."""

    __slots__ = ("finished", "prompt", "response", "seq")

    def __init__(self, seq: int, response: int, prompt: int) -> None:
        self.seq, self.response, self.prompt = seq, response, prompt
        self.finished = False


class _Counts:
    def __init__(self) -> None:
        self.cut = 0
        self._responses: Counter[tuple[str, int]] = Counter()
        self._prompts: Counter[tuple[str, int]] = Counter()
        self._response_tokens: Counter[str] = Counter()
        self._prompt_tokens: Counter[str] = Counter()

    def add(self, kind: str, response: int, prompt: int) -> None:
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
