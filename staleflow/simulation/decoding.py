"""The batch of a simulated instance: running and waiting trajectories, KV cache, and time of steps.

Invariants:

- between two changes the set of n running trajectories is constant, so the time of m steps has a closed form
  (`decode_time`), and steps are not simulated one by one;
- admission and preemption follow `rollout.scheduler`: before each step there is room for one more token of
  each running trajectory; first come, first served; the youngest is preempted first and returns first.

Each change costs O(log n).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from staleflow.coordination.cost_model import CostModel
from staleflow.simulation.decode_time import Pace
from staleflow.simulation.trajectory import SimulatedTrajectory


class DecodingBatch:
    """The batch of one instance; counts are since its incarnation started."""

    def __init__(
        self,
        *,
        version: int,
        costs: CostModel,
        kv_capacity: int,
        max_running: int,
        began: float,
        slowness: float,
    ) -> None:
        self.version = version
        self.kv_capacity = kv_capacity
        self.max_running = max_running
        self.slowness = slowness
        """Factor by which all times are multiplied."""
        self.at = began
        """The last boundary: the end of a decode step."""
        self._costs = costs
        self._running: dict[str, SimulatedTrajectory] = {}  # oldest first
        self._waiting: OrderedDict[str, SimulatedTrajectory] = OrderedDict()
        self._ends: list[tuple[int, int, int, SimulatedTrajectory]] = []  # (step, tie, stay, who)
        self._ties = 0
        self._kv = 0
        self._due = 0  # tokens whose KV is built in the next step
        self.steps = 0
        self.preemptions = 0
        self.generated = 0
        self.running_steps = 0
        self.kv_token_steps = 0
        self.prefilled = 0
        self.busy_s = 0.0
        self.prefill_s = 0.0
        """Part of `busy_s`."""

    @property
    def running(self) -> int:
        """Trajectories in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Trajectories held without KV."""
        return len(self._waiting)

    @property
    def kv_tokens(self) -> int:
        """Tokens in the KV cache at the last boundary."""
        return self._kv

    def _pace(self) -> Pace:
        costs, n, slowness = self._costs, len(self._running), self.slowness
        k1, compute = costs.k1, costs.k3 * n
        floor = costs.k2 if costs.k2 > compute else compute
        first = (k1 * self._kv + floor + costs.k4) * slowness
        return Pace(first, k1 * n * slowness, costs.prefill * self._due * slowness)

    def _decode(self, steps: int, until: float) -> None:
        """Decode `steps` steps, the last of which ends at `until`."""
        if steps:
            n = len(self._running)
            tokens = n * steps
            self.kv_token_steps += steps * self._kv + n * (steps * (steps - 1) // 2)
            self.running_steps += tokens
            self.generated += tokens
            self._kv += tokens
            self.steps += steps
            self.busy_s += until - self.at
            if self._due:
                self.prefilled += self._due
                self.prefill_s += self._costs.prefill * self._due * self.slowness
                self._due = 0
        self.at = until

    def _first_end(self) -> int:
        """Step that completes the first of the running trajectories."""
        ends = self._ends
        while ends[0][2] != ends[0][3].stay:
            heapq.heappop(ends)
        return ends[0][0]

    def _take_finished(self) -> list[SimulatedTrajectory]:
        """Remove and return complete trajectories."""
        ends, step, finished = self._ends, self.steps, []
        while ends and (ends[0][0] <= step or ends[0][2] != ends[0][3].stay):
            _, _, stay, trajectory = heapq.heappop(ends)
            if stay == trajectory.stay:
                del self._running[trajectory.trajectory_id]
                self._drop_kv(trajectory)
                finished.append(trajectory)
        return finished

    def _remove(self, identity: str) -> SimulatedTrajectory | None:
        """Remove and return a trajectory, running or waiting; None if it is not held."""
        trajectory = self._running.pop(identity, None)
        if trajectory is not None:
            self._drop_kv(trajectory)
            return trajectory
        return self._waiting.pop(identity, None)

    def _drop_kv(self, trajectory: SimulatedTrajectory) -> None:
        """Account for a trajectory that leaves the batch."""
        if trajectory.entered == self.steps:
            self._due -= trajectory.base  # its KV was not built yet
        trajectory.fold(self.steps, self.version)
        trajectory.stay += 1
        self._kv -= trajectory.base

    def _make_room(self) -> None:
        """Preempt the youngest until there is room for one more token of each running trajectory."""
        running = self._running
        needed = self._kv + len(running)
        while needed > self.kv_capacity:
            identity, youngest = running.popitem()
            self._drop_kv(youngest)
            self._waiting[identity] = youngest
            self._waiting.move_to_end(identity, last=False)
            needed = self._kv + len(running)
            self.preemptions += 1

    def _fill(self) -> None:
        """Admit waiting trajectories while there is room."""
        running, waiting = self._running, self._waiting
        while waiting and len(running) < self.max_running:
            identity, trajectory = next(iter(waiting.items()))
            if self._kv + len(running) + trajectory.base + 1 > self.kv_capacity:
                break
            del waiting[identity]
            running[identity] = trajectory
            trajectory.since = trajectory.entered = self.steps
            trajectory.stay += 1
            self._kv += trajectory.base
            self._due += trajectory.base
            self._ties += 1
            end = self.steps + trajectory.target - trajectory.base
            heapq.heappush(self._ends, (end, self._ties, trajectory.stay, trajectory))
