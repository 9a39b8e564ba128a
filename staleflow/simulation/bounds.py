"""What no policy can exceed on a cluster: the numbers that a result is held against.

- *rollout*: all instances decode at their best batch size all the time, and build each prompt's KV once;
- *trainer*: it never waits for a batch. A push runs beside the next step, whose update waits for it;
- *latency*: a group may be under way for at most η + 1 step periods, less the update that makes its weights
  and their push, so (η + 1) periods are not shorter than the longest response of a batch at its fastest
  (alone on an instance), its reward, one update and one push. Taken of the mean of the longest responses of
  several batches.

With η = 0 nothing is generated during an update and its push, so that the period of *rollout* has both in it.

In generated tokens trained on per second. Means of the lengths are those of the prompts that are drawn first.
Of a group with redundant members the shortest responses count, and the others cost nothing: with them the
bounds are further away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from staleflow.simulation.decode_time import Pace
from staleflow.simulation.settings import ClusterSettings

SIDES = ("rollout", "trainer", "latency")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Tokens per second."""

    rollout: float
    trainer: float
    latency: float
    best_running: int
    """Trajectories on an instance at which `rollout` is reached."""
    step_tokens: float
    """Generated tokens that one step trains on, on average."""

    @property
    def least(self) -> float:
        """The one that binds."""
        return min(self.rollout, self.trainer, self.latency)

    @property
    def binding(self) -> str:
        """Its name."""
        return min(SIDES, key=self.rate)

    def rate(self, side: str) -> float:
        """One of the three by name."""
        return float(getattr(self, side))

    def seconds(self, side: str | None = None) -> float:
        """Shortest period of a step that a side allows; None: that all of them allow."""
        return self.step_tokens / (self.least if side is None else self.rate(side))


def find_bounds(
    cluster: ClusterSettings,
    *,
    bound: int,
    batch_size: int,
    batches: int = 8,
    drawn: Sequence[Sequence[int]] | None = None,
) -> Bounds:
    """The bounds of a cluster under η = `bound`, its lengths sampled from so many batches.

    `drawn`: what `draw_batches` gave for a cluster of the same lengths, to save the time of drawing them.
    """
    drawn = drawn or draw_batches(cluster, batch_size=batch_size, batches=batches)
    lengths = [tokens for batch in drawn for tokens in batch]
    mean = sum(lengths) / len(lengths)
    # A trajectory of R tokens is there for R steps, with R / 2 response tokens on average.
    held = cluster.prompt_length + sum(r * r for r in lengths) / sum(lengths) / 2
    running = _best_running(cluster, held)
    costs, trainer = cluster.costs, cluster.trainer
    decoding = mean / costs.throughput(running, running * held)
    rollout = cluster.instances * mean / (decoding + costs.prefill_s(cluster.prompt_length))
    step_tokens = mean * cluster.group_size * batch_size
    trained = step_tokens + cluster.prompt_length * cluster.group_size * batch_size
    update = trainer.fixed_s + trainer.token_s * trained
    longest = sum(_alone_s(cluster, max(batch)) for batch in drawn) / len(drawn)
    period = (longest + cluster.reward_s + update + trainer.push_s) / (bound + 1)
    if bound == 0:
        rollout = step_tokens / (step_tokens / rollout + update + trainer.push_s)
    busy = max(update, trainer.push_s)
    return Bounds(
        rollout=rollout,
        trainer=step_tokens / busy if busy > 0 else float("inf"),
        latency=step_tokens / period,
        best_running=running,
        step_tokens=step_tokens,
    )


def draw_batches(cluster: ClusterSettings, *, batch_size: int, batches: int) -> list[list[int]]:
    """Response lengths of the first batches; the shortest of each group, where it has redundant members."""
    return [_batch(cluster, number, batch_size) for number in range(batches)]


def _batch(cluster: ClusterSettings, number: int, batch_size: int) -> list[int]:
    lengths: list[int] = []
    for prompt in range(number * batch_size, (number + 1) * batch_size):
        name = f"e0-p{prompt}"
        members = [f"{name}-a0-m{m}" for m in range(cluster.group_size + cluster.surplus)]
        group = [max(1, min(t, cluster.max_new_tokens)) for t in cluster.lengths(name, members)]
        lengths += sorted(group)[: cluster.group_size] if cluster.surplus else group
    return lengths


def _best_running(cluster: ClusterSettings, held: float) -> int:
    """Where an instance decodes most, `held` tokens in the KV cache for each trajectory.

    n / (k1 held n + max(k2, k3 n) + k4) grows with n throughout: more is always better, as far as it fits.
    """
    return max(1, min(cluster.max_running, int(cluster.kv_capacity / (held + 1))))


def _alone_s(cluster: ClusterSettings, tokens: int) -> float:
    """Seconds of one response alone on an instance."""
    costs, prompt = cluster.costs, cluster.prompt_length
    return Pace(costs.step_s(1, prompt), costs.k1, costs.prefill_s(prompt)).seconds(tokens)
