"""`Control` driven one fact at a time: one instance, routes as told, and what came of it kept by kind."""

from __future__ import annotations

from typing import Any, TypeVar

from staleflow.coordination.actions import Action, Admission, Append, Command, Interrupt, Pull, Route, Send
from staleflow.coordination.batches import BatchSettings
from staleflow.coordination.control import Control
from staleflow.coordination.coordinator import Coordinator, Decision
from staleflow.coordination.events import (
    DrawnGroup,
    Event,
    GroupsDrawn,
    InstanceJoined,
    InstanceReport,
    Pushed,
    Reported,
    Rewarded,
    SourceExhausted,
    TrajectoryReport,
)
from staleflow.coordination.snapshot import Snapshot
from staleflow.coordination.stragglers import StragglerRule
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.records import LastBatch, Record

PROMPT = 4
MEAN = 10
"""Expected response length, in tokens, of a `Control` that has seen none."""

T = TypeVar("T")


class Scripted(Coordinator):
    """Orders what it was told, once."""

    def __init__(self) -> None:
        self.script: tuple[Command, ...] = ()

    def step(self, snapshot: Snapshot) -> Decision:
        commands, self.script = self.script, ()
        return Decision(commands=commands)


class Hand:
    """Weights of version 0 and one instance of that version; nothing is drawn yet."""

    def __init__(
        self,
        *,
        bound: int = 0,
        batch_size: int = 2,
        group_size: int = 1,
        spares: int = 0,
        steps: int = 10,
        rule: StragglerRule | None = None,
        last_batch: LastBatch = "train",
        **options: Any,
    ) -> None:
        self._coordinator = Scripted()
        self.actions: list[Action] = []
        self.control = Control(
            buffer=StalenessBuffer(bound=bound, batch_size=batch_size, spare_limit=spares),
            coordinator=self._coordinator,
            batches=BatchSettings(steps=steps, group_size=group_size, last_batch=last_batch),
            stragglers=rule,
            expected_response=MEAN,
            **options,
        )
        self._revision = 0
        self._version = 0
        self._now = 0.0
        self.tell(Pushed(version=0))
        self.tell(InstanceJoined(instance="i0", incarnation=1, version=0, kv_capacity=1000, max_running=64))

    # ------------------------------------------------------------------ facts

    def tell(self, event: Event) -> None:
        self.actions += self.control.handle(event)

    def draw(self, *groups: str, members: int = 1, redrawn: bool = False) -> None:
        """Group `a` has the members a0, a1, ..."""
        self.tell(
            GroupsDrawn(
                groups=tuple(
                    DrawnGroup(
                        group_id=g,
                        members=tuple(f"{g}{m}" for m in range(members)),
                        prompt_length=PROMPT,
                        redrawn=redrawn,
                    )
                    for g in groups
                )
            )
        )

    def exhaust(self) -> None:
        self.tell(SourceExhausted())

    def start(self, *groups: str, spare: bool = False) -> None:
        """Reserve groups at the instance's version, and route all their members there."""
        commands: list[Route] = []
        for group in groups:
            admission = Admission(kind="reserve", version=self._version, spare=spare)
            for member in self.control._trajectories.group(group).members:
                commands.append(self._route(member, group, admission, len(commands)))
                admission = None  # type: ignore[assignment]
        self._order(*commands)

    def route(self, trajectory: str) -> None:
        """Route a waiting member of a reserved group."""
        self._order(self._route(trajectory, self.control._trajectories.member(trajectory).group_id, None, 0))

    def pull(self, version: int) -> None:
        """The instance has loaded these weights."""
        seq = self.control._fleet.next_seq("i0")
        self._order(Pull(instance="i0", incarnation=1, seq=seq, version=version))
        self._version = version
        self.report()

    def push(self, version: int) -> None:
        """A step is trained; the instance takes its weights at once."""
        self.tell(Pushed(version=version))
        self.pull(version)

    def cycle(self) -> None:
        self._now += 1
        self.actions += self.control.cycle(self._now)

    def report(self, *, finished: dict[str, int] | None = None, grown: dict[str, int] | None = None) -> None:
        """`finished`, `grown`: response tokens by trajectory. Interrupts sent so far are answered."""
        self._revision += 1
        out = self.control._fleet.views()["i0"].outstanding
        interrupted = [c.trajectory_id for c in out if isinstance(c, Interrupt)]
        lengths = grown or {}
        self.tell(
            Reported(
                report=InstanceReport(
                    instance="i0",
                    incarnation=1,
                    revision=self._revision,
                    version=self._version,
                    acked_seq=self.control._fleet.next_seq("i0") - 1,
                    finished=tuple(self._left(t, n, "stop") for t, n in (finished or {}).items()),
                    interrupted=tuple(
                        self._left(t, self.control._trajectories.member(t).length - PROMPT, None)
                        for t in interrupted
                    ),
                    lengths=tuple((t, PROMPT + n) for t, n in lengths.items()),
                )
            )
        )

    def reward(self, *trajectories: str, raw: float = 1.0, usable: bool = True) -> None:
        """The trajectories finish with MEAN tokens, unless they have, and are scored."""
        for trajectory in trajectories:
            if self.control._trajectories.member(trajectory).instance is not None:
                self.report(finished={trajectory: MEAN})
            self.tell(Rewarded(trajectory_id=trajectory, raw=raw, usable=usable, token_hash="h"))

    def _left(self, trajectory: str, tokens: int, reason: str | None) -> TrajectoryReport:
        version = self.control._trajectories.group(
            self.control._trajectories.member(trajectory).group_id
        ).version
        return TrajectoryReport(
            trajectory_id=trajectory,
            length=PROMPT + tokens,
            min_version=version if tokens else None,
            finish_reason=reason,
        )

    def _route(self, trajectory: str, group: str, admission: Admission | None, offset: int) -> Route:
        reserved = self.control._trajectories.group(group).version
        return Route(
            instance="i0",
            incarnation=1,
            seq=self.control._fleet.next_seq("i0") + offset,
            trajectory_id=trajectory,
            group_id=group,
            min_version=self._version if reserved is None else reserved,
            admission=admission,
        )

    def _order(self, *commands: Command) -> None:
        self._coordinator.script = commands
        self.cycle()

    # ------------------------------------------------------------------ what came of it

    def take(self, kind: type[T]) -> list[T]:
        """Effects, records or commands of one kind since the last `take` of it, in order."""
        found: list[T] = []
        rest: list[Action] = []
        for action in self.actions:
            inner: Action | Record | Command = action
            if isinstance(action, Append):
                inner = action.record
            elif isinstance(action, Send):
                inner = action.command
            if isinstance(inner, kind):
                found.append(inner)
            else:
                rest.append(action)
        self.actions = rest
        return found
