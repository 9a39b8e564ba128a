"""The speculative state: the snapshot with every unacknowledged command applied, and those of this cycle.

Invariant: no decision rests on a state older than the last command, so no trajectory is ordered twice and no
capacity is given away twice. Only `InstanceState.apply` defines what a command does to an instance.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from itertools import compress
from operator import is_not
from typing import Generic, TypeVar

from staleflow.coordination.actions import Abort, Admission, Command, Interrupt, Pull, Route
from staleflow.coordination.snapshot import InstanceView, PendingTrajectory, Snapshot

Source = TypeVar("Source")
Value = TypeVar("Value")


@dataclass(slots=True, kw_only=True)
class InstanceState:
    """An instance as it will be once it has applied all its commands."""

    instance: str
    incarnation: int
    version: int
    resident: int
    """Trajectories on it: running, waiting in the engine, and ordered."""
    waiting: int
    kv_tokens: int
    """Tokens in the KV cache, those of ordered trajectories included."""
    kv_capacity: int
    max_running: int
    next_seq: int
    leaving: tuple[Interrupt, ...] = ()
    """Unacknowledged Interrupts, in order."""

    @property
    def running(self) -> int:
        """Trajectories that decode, or will once their Route is applied."""
        return self.resident - self.waiting if self.resident > self.waiting else 0

    def apply(self, command: Command) -> None:
        """Update to the state after `command`."""
        self.next_seq = command.seq + 1
        match command:
            case Route():
                self.resident += 1
                self.kv_tokens += command.length
            case Interrupt() | Abort():
                if isinstance(command, Interrupt):
                    self.leaving = (*self.leaving, command)
                self.resident = max(0, self.resident - 1)
                if command.length == 0:
                    self.waiting = max(0, self.waiting - 1)
                self.kv_tokens = max(0, self.kv_tokens - command.length)
            case Pull():
                self.version = max(self.version, command.version)

    def copy(self) -> InstanceState:
        """An independent copy."""
        return InstanceState(
            instance=self.instance,
            incarnation=self.incarnation,
            version=self.version,
            resident=self.resident,
            waiting=self.waiting,
            kv_tokens=self.kv_tokens,
            kv_capacity=self.kv_capacity,
            max_running=self.max_running,
            next_seq=self.next_seq,
            leaving=self.leaving,
        )


def speculate(view: InstanceView) -> InstanceState:
    """An instance's snapshot with its unacknowledged commands applied."""
    snapshot = view.snapshot
    state = InstanceState(
        instance=snapshot.instance,
        incarnation=snapshot.incarnation,
        version=snapshot.version,
        resident=snapshot.running + snapshot.waiting,
        waiting=snapshot.waiting,
        kv_tokens=snapshot.kv_tokens,
        kv_capacity=snapshot.kv_capacity,
        max_running=snapshot.max_running,
        next_seq=view.next_seq,
    )
    for command in view.outstanding:
        state.apply(command)
    state.next_seq = view.next_seq
    return state


class SpeculativeState:
    """The working copy of one cycle. Strategies read it and order commands through it."""

    def __init__(
        self, snapshot: Snapshot, instances: dict[str, InstanceState], fresh_groups: int | None = None
    ) -> None:
        """The mapping `instances` belongs to this cycle, its values do not: each is copied before it changes.

        `fresh_groups`: most groups to reserve now; None: limited only by the protocol and the run's end.
        """
        self.snapshot = snapshot
        self.instances = instances
        self._copied: set[str] = set()
        self.commands: list[Command] = []
        self._counts = snapshot.counts.copy()
        limit = snapshot.reservable
        self._reservable = limit if fresh_groups is None else min(limit, fresh_groups)
        self._spares_free = snapshot.spares_free
        self._group_versions: dict[str, int] = {}
        self._spares: set[str] = set()

    @property
    def pulled(self) -> bool:
        """Whether this cycle has ordered a Pull."""
        return any(isinstance(command, Pull) for command in self.commands)

    def group_version(self, item: PendingTrajectory) -> int | None:
        """V_group after the commands so far."""
        return self._group_versions.get(item.group_id, item.group_version)

    def admits(self, item: PendingTrajectory, version: int) -> bool:
        """Whether the protocol lets the trajectory start or continue under weights of `version`."""
        group_version = self.group_version(item)
        if group_version is None:
            return self.admits_fresh(version)
        return self.admits_reserved(group_version, version)

    def admits_fresh(self, version: int) -> bool:
        """Whether a group without a reservation may start on weights of `version`."""
        return self._reservable > 0 and self._counts.can_add(version)

    def admits_reserved(self, group_version: int, version: int) -> bool:
        """Whether a member of a group reserved at `group_version` may run on weights of `version`."""
        return version >= group_version or self._counts.can_move(group_version, version)

    def admits_spare(self, version: int) -> bool:
        """Whether a group without a reservation may start as a spare: only if all firm places are taken.

        While a firm place is left for the newest version, an instance with an older one should pull instead.
        """
        counts = self._counts
        in_time = version + counts.bound >= counts.next_buffer and version >= 0
        return self._spares_free > 0 and in_time and not self.admits_fresh(self.snapshot.newest_version)

    def room(self, version: int) -> int:
        """Groups that may still be reserved at `version`."""
        return min(self._reservable, self._counts.room(version))

    def route(
        self, item: PendingTrajectory, instance: str, reason: str, *, spare: bool = False
    ) -> Admission | None:
        """Order a Route; `admits` (or `admits_spare`) must hold for the instance's version.

        Returns what the Route requires of the buffer; the counts here include it from now on.
        """
        state = self.instances[instance]
        group_version = self._group_versions.get(item.group_id, item.group_version)
        admission: Admission | None = None
        if group_version is None:
            admission = self._reserve(item.group_id, state.version, spare)
            group_version = state.version
        elif state.version < group_version:
            admission = self._lower(item.group_id, group_version, state.version)
            group_version = state.version
        self._order(
            Route(
                instance,
                state.incarnation,
                state.next_seq,
                item.trajectory_id,
                item.group_id,
                group_version,
                admission,
                item.length,
                reason,
            )
        )
        return admission

    def pull(self, instance: str, reason: str) -> None:
        """Order a Pull of the newest version."""
        state = self.instances[instance]
        self._order(
            Pull(
                instance=instance,
                incarnation=state.incarnation,
                seq=state.next_seq,
                version=self.snapshot.newest_version,
                reason=reason,
            )
        )

    def hold(self, instance: str, length: int) -> None:
        """Reserve room for a trajectory that will go to the instance but cannot be routed yet."""
        state = self._own(instance)
        state.resident += 1
        state.kv_tokens += length

    def interrupt(
        self, trajectory_id: str, length: int, instance: str, reason: str, *, target: str = ""
    ) -> None:
        """Order an Interrupt of a trajectory on the instance; `target` keeps room for it."""
        state = self.instances[instance]
        self._order(
            Interrupt(
                instance=instance,
                incarnation=state.incarnation,
                seq=state.next_seq,
                trajectory_id=trajectory_id,
                length=length,
                target=target,
                reason=reason,
            )
        )

    def _reserve(self, group_id: str, version: int, spare: bool) -> Admission:
        if spare:
            self._spares_free -= 1
            self._spares.add(group_id)
        else:
            self._counts.add(version)
            self._reservable -= 1
        self._group_versions[group_id] = version
        return Admission(kind="reserve", version=version, spare=spare)

    def _lower(self, group_id: str, old: int, version: int) -> Admission:
        if group_id not in self._spares:
            self._counts.move(old, version)
        self._group_versions[group_id] = version
        return Admission(kind="lower", version=version)

    def _order(self, command: Command) -> None:
        self._own(command.instance).apply(command)
        self.commands.append(command)

    def _own(self, name: str) -> InstanceState:
        """The instance's state, copied if this cycle has not changed it yet."""
        if name not in self._copied:
            self._copied.add(name)
            self.instances[name] = self.instances[name].copy()
        return self.instances[name]


class IdentityCache(Generic[Source, Value]):
    """One value per instance, by name, recomputed only when its source is another object.

    Sound where a changed instance is a new object: views, and speculative states, which only the cycle that
    copied them changes. Detecting changes takes one comparison per object, so a cycle costs what changed.
    Values are in the order of the sources.
    """

    def __init__(self) -> None:
        self._basis: Hashable = None
        self._sources: dict[str, Source] = {}
        self._values: dict[str, Value] = {}

    def of(
        self, sources: Mapping[str, Source], compute: Callable[[Source], Value], basis: Hashable = None
    ) -> dict[str, Value]:
        """The values of all instances; read-only, and valid until the next call.

        `basis`: everything that `compute` depends on beside the source.
        """
        known, values = self._sources, self._values
        changed = list(compress(sources, map(is_not, sources.values(), known.values())))
        if basis != self._basis or len(sources) != len(known) or (changed and [*sources] != [*known]):
            self._basis = basis
            known.clear()
            values.clear()
            changed = list(sources)
        for name in changed:
            known[name] = source = sources[name]
            values[name] = compute(source)
        return values
