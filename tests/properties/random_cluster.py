"""A random cluster of real parts: the run loop, `Control` with a policy, rollout instances with fake engines
that share the scheduler of the real ones, and the trajectory server; on a virtual clock, all by one seed.

What the parts do beside that, `cluster_backend` makes up; what must hold at every moment is checked by
`cluster_watch` (commands and reports), `watched_control` (the state of `Control`) and here (batches, tokens).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from cluster_backend import RandomBackend
from cluster_settings import ClusterSettings
from cluster_watch import Violation, Watch
from kept_ledger import KeptLedger
from watched_control import WatchedControl
from watched_coordinator import WatchedCoordinator

from staleflow.coordination.coordinator import Coordinator
from staleflow.data.trajectory import Prompt, TrainBatch, Trajectory
from staleflow.protocol.records import Consume, Start
from staleflow.rollout.scripted_lengths import Lengths
from staleflow.runtime.loop import RunLoop
from staleflow.runtime.loop_settings import LoopSettings
from staleflow.servers.trajectory_server import TrajectoryServer, generated_tokens
from staleflow.simulation.event_queue import EventQueue
from staleflow.telemetry.events import (
    BatchTaken,
    EventStream,
    GivenUp,
    Handlers,
    Listener,
    StragglerResampled,
    StragglerTruncated,
    TurnEnded,
)

IDLE_S = 0.5
"""How soon the loop notices that it is asked to stop."""


class RandomCluster:
    """One run. `run` plays it to the end, and returns the reason that it ended for."""

    def __init__(
        self,
        settings: ClusterSettings,
        tell: Callable[[str], None] | None = None,
        *,
        coordinator: Coordinator | None = None,
        lengths: Lengths | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        """`tell` takes lines that say what happens, for one who reads a seed. `coordinator` and `lengths`
        take the place of those of the settings.
        """
        self.settings = settings
        self.drawn: list[str] = []
        self.trained: list[str] = []
        """Groups in the order in which they were handed to the trainer."""
        self.given_up: set[str] = set()
        self.straggled: list[str] = []
        """Trajectories sampled anew, or cut."""
        self.clock = EventQueue()
        self.ledger = KeptLedger()
        self.lines, self.records = self.ledger.lines, self.ledger.records
        self.finish: str | None = None
        idle_is_checked = coordinator is None and settings.policy == "staleflow"
        self.watch = Watch(settings, self.clock.now, idle_is_checked=idle_is_checked)
        self.backend = RandomBackend(
            settings, watch=self.watch, clock=self.clock, ledger=self.ledger, lengths=lengths
        )
        self.nodes = self.backend.instances.nodes
        self.server = TrajectoryServer(
            prompts=self._prompts(0, settings.prompts),
            padding=self._prompts(1, None),
            members=settings.group_size + settings.surplus,
            max_new_tokens=settings.max_new_tokens,
        )
        watched = WatchedCoordinator(settings, coordinator)
        self.control = WatchedControl(settings, watched, self.server, tell=tell)
        self.loop = RunLoop[Trajectory, TrainBatch](
            control=self.control,
            store=self.server,
            backend=self.backend,
            ledger=self.ledger,
            opening=Start(
                bound=settings.kept_bound,
                batch_size=settings.batch_size,
                group_size=settings.group_size,
                last_batch=settings.last_batch,
                spare_limit=settings.spare_groups,
            ),
            stream=EventStream([self.watch, self, *listeners]),
            clock=self.clock,
            settings=LoopSettings(
                steps=settings.steps,
                interval_s=settings.interval_s,
                # Without a stop from outside the loop must wake for all it has to do, and nothing else.
                idle_s=math.inf if settings.stop_at is None else IDLE_S,
                evaluate_every=settings.evaluate_every,
                evaluation_backlog=1,
                checkpoint_every=settings.checkpoint_every,
                start_timeout_s=math.inf,
                multi_turn=settings.turns > 1,
            ),
        )
        if settings.stop_at is not None:
            self.clock.schedule(settings.stop_at, self.loop.request_stop)

    def _prompts(self, epoch: int, count: int | None) -> Iterator[tuple[int, int, Prompt]]:
        lengths, index = self.settings.prompt_lengths, 0
        while count is None or index < count:
            tokens = (1,) * lengths[index % len(lengths)]
            self.drawn.append(f"e{epoch}-p{index}")
            yield epoch, index, Prompt(prompt_id=str(index), tokens=tokens, text="", answer=None)
            index += 1

    def run(self) -> str:
        """To the end. Raises Violation, or whatever a part raises."""
        self.finish = self.loop.run()
        return self.finish

    def _fail(self, message: str) -> None:
        raise Violation(
            f"seed {self.settings.seed}, at {self.clock.time:.3f} s: {message}; {self.control.describe()}"
        )

    # ------------------------------------------------------------------ as a listener

    def handlers(self) -> Handlers:
        """See `Listener`."""
        return {
            BatchTaken: self._on_batch,
            GivenUp: lambda event: self.given_up.add(event.trajectory_id),
            StragglerResampled: lambda event: self.straggled.append(event.dropped.trajectory_id),
            StragglerTruncated: lambda event: self.straggled.append(event.trajectory.trajectory_id),
            TurnEnded: self._on_turn,
        }

    def _on_turn(self, event: TurnEnded) -> None:
        if event.cycled:
            self.watch.cycled(self.control)
        server = self.server
        if server._trajectories.keys() != self.control.living:
            self._fail(f"payload and table differ in {server._trajectories.keys() ^ self.control.living}")
        kept = sum(map(generated_tokens, server._trajectories.values())) + sum(server._training.values())
        if server.balance.in_flight != kept:
            self._fail(f"{server.balance.as_dict()}, and {kept} tokens are kept")

    def _on_batch(self, event: BatchTaken) -> None:
        """The bound, by the versions that the engines stamped on the tokens; records that a crash leaves."""
        consumed = [r for r in self.ledger.flushed if isinstance(r, Consume) and r.buffer == event.step]
        if len(consumed) != 1:
            self._fail(f"step {event.step} is trained, and {len(consumed)} records in the file say so")
        for reserved, group in zip(consumed[0].groups, event.groups, strict=True):
            self.trained.append(reserved.group)
            for trajectory in (scored.trajectory for scored in group):
                oldest, least = trajectory.min_version, event.step - self.settings.kept_bound
                if oldest is not None and not least <= reserved.version <= oldest:
                    self._fail(
                        f"step {event.step} trains {trajectory.trajectory_id}, tokens of version {oldest}, "
                        f"reserved at {reserved.version}"
                    )
