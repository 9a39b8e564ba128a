"""What must hold on a random cluster at every moment, checked against books of its own.

The books know what was ordered (each command as it is sent), what reports say once `Control` has them, and
what the engines really hold. They share nothing with `Control` but these messages. A `Violation` says which
property does not hold, and where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster_settings import ClusterSettings

from staleflow.coordination.actions import Abort, Command, Interrupt, Pull, Route
from staleflow.coordination.control import Control
from staleflow.coordination.events import InstanceJoined, InstanceLost, InstanceReport
from staleflow.coordination.migration import MOST_FRUITLESS
from staleflow.coordination.snapshot import PendingTrajectory
from staleflow.telemetry.events import CommandSent, Handlers, ReportReceived, RunFinished

ROOM_IS_CHECKED = ("waterfall", "naive")
"""Routing strategies that promise to stay within the KV cache."""


class Violation(AssertionError):
    """A property does not hold."""


@dataclass(slots=True)
class Book:
    """One incarnation of an instance, by what was ordered and reported."""

    incarnation: int
    version: int
    kv_capacity: int
    max_running: int
    kv_tokens: int = 0
    count: int = 0
    """Running and waiting, in the last report."""
    next_seq: int = 1
    outstanding: list[Command] = field(default_factory=list)
    here: dict[str, int] = field(default_factory=dict)
    """Ordered here and not left, with the length as last reported."""
    leaving: dict[str, str] = field(default_factory=dict)
    """Interrupt under way, and its reason."""


@dataclass(slots=True)
class Moves:
    """One trajectory's way."""

    length: int = 0
    """As `Control` knows it."""
    routed_at: float = 0.0
    routed_length: int = 0
    moved_length: int = -1
    """When it was moved last; -1: never."""
    fruitless: int = 0
    """Migrations in a row between which it gained nothing."""


class Watch:
    """A listener of the run, which hears of everything just before `Control` does."""

    def __init__(self, settings: ClusterSettings, now: Callable[[], float], *, idle_is_checked: bool) -> None:
        """`idle_is_checked`: the policy promises to leave no instance idle that might run something."""
        self._settings = settings
        self._now = now
        self._idle_is_checked = idle_is_checked
        self._books: dict[str, Book] = {}
        self._holder: dict[str, str] = {}
        self._moves: dict[str, Moves] = {}
        self._left_alone: set[tuple[str, str]] = set()
        """(idle instance, waiting trajectory that it might run) after the last cycle."""
        self.rejected: dict[str, int] = {}
        """Rejections by kind."""
        routing = settings.strategies.routing or ("waterfall" if settings.policy == "staleflow" else "")
        self._room_is_checked = routing in ROOM_IS_CHECKED
        self.migrations = 0
        self.preemptions: dict[tuple[str, int], int] = {}
        self.routes: Counter[str] = Counter()
        """Routes by trajectory."""

    def handlers(self) -> Handlers:
        """See `Listener`."""
        return {
            CommandSent: lambda event: self.ordered(event.command),
            InstanceJoined: self.joined,
            InstanceLost: self.lost,
            ReportReceived: lambda event: self.reported(event.report),
            RunFinished: self._finished,
        }

    def _finished(self, event: RunFinished) -> None:
        """All payload is dropped, so instances refuse what was routed last."""
        self._books.clear()

    def _fail(self, message: str) -> None:
        raise Violation(f"seed {self._settings.seed}, at {self._now():.3f} s: {message}")

    # ------------------------------------------------------------------ engines

    def entered(self, instance: str, trajectory_id: str) -> None:
        """An engine has taken a trajectory in."""
        other = self._holder.get(trajectory_id)
        if other is not None:
            self._fail(f"{trajectory_id} is in the engines of {other} and {instance} at once")
        self._holder[trajectory_id] = instance

    def left(self, instance: str, trajectory_id: str) -> None:
        """An engine has let a trajectory go."""
        del self._holder[trajectory_id]

    # ------------------------------------------------------------------ commands

    def ordered(self, command: Command) -> None:
        """`Control` sends a command."""
        book = self._books.get(command.instance)
        if book is None or book.incarnation != command.incarnation:
            self._fail(f"{command} goes to an incarnation that is not up")
        assert book is not None
        if command.seq != book.next_seq:
            self._fail(f"{command} should have number {book.next_seq}")
        match command:
            case Route():
                self._check_route(book, command)
                book.here[command.trajectory_id] = command.length
            case Interrupt(trajectory_id=trajectory_id):
                if trajectory_id not in book.here:
                    self._fail(f"{command}: it was not ordered there, or has left")
                if trajectory_id in book.leaving:
                    self._fail(f"{command}: an Interrupt to it is under way")
                book.leaving[trajectory_id] = command.reason
                if command.reason.startswith("migration"):
                    self._check_move(command)
            case Abort(trajectory_id=trajectory_id):
                if trajectory_id not in book.here:
                    self._fail(f"{command}: it was not ordered there, or has left")
                del book.here[trajectory_id]
                book.leaving.pop(trajectory_id, None)
        book.next_seq += 1
        book.outstanding.append(command)

    def _check_route(self, book: Book, route: Route) -> None:
        self.routes[route.trajectory_id] += 1
        for name, other in self._books.items():
            if route.trajectory_id in other.here:
                self._fail(f"{route}: it is on {name}, as far as was reported")
        expected = self.version(route.instance)
        if expected < route.min_version:
            self._fail(f"{route}: the instance will be at version {expected}")
        moves = self._moves.setdefault(route.trajectory_id, Moves())
        moves.length = moves.routed_length = route.length
        moves.routed_at = self._now()
        if not self._room_is_checked:
            return
        count, tokens = self.load(book)
        if count and tokens + route.length + count + 1 > book.kv_capacity:
            self._fail(
                f"{route}: {count} trajectories hold {tokens} tokens there; with it, and one token more for "
                f"each, that exceeds {book.kv_capacity}"
            )
        if count >= book.max_running:
            self._fail(f"{route}: {count} are there, and it runs {book.max_running}")

    def load(self, book: Book) -> tuple[int, int]:
        """(trajectories, KV tokens) once all that was ordered has been applied, by the last report."""
        count, tokens = book.count, book.kv_tokens
        for command in book.outstanding:
            match command:
                case Route():
                    count, tokens = count + 1, tokens + command.length
                case Interrupt(trajectory_id=trajectory_id):
                    if trajectory_id in book.here:  # it has not finished meanwhile
                        count, tokens = count - 1, tokens - book.here[trajectory_id]
                case Abort():
                    count, tokens = count - (command.length >= 0), tokens - max(0, command.length)
        return count, tokens

    def version(self, instance: str) -> int:
        """Version there once all that was ordered has been applied."""
        book = self._books[instance]
        pulls = [c.version for c in book.outstanding if isinstance(c, Pull)]
        return max([book.version, *pulls])

    def _check_move(self, interrupt: Interrupt) -> None:
        self.migrations += 1
        rest_s = self._settings.strategies.moves.rest_s
        moves = self._moves[interrupt.trajectory_id]
        if moves.length > moves.moved_length >= 0 or moves.moved_length < 0:
            moves.fruitless = 0
        else:
            moves.fruitless += 1
        if moves.fruitless >= MOST_FRUITLESS:
            self._fail(f"{interrupt}: the {moves.fruitless + 1}th move in a row without a token gained")
        if interrupt.length > 0:  # running, as far as is known
            if moves.length <= moves.routed_length:
                self._fail(f"{interrupt}: it is running and has gained nothing there")
            if self._now() < moves.routed_at + rest_s - 1e-9:
                self._fail(f"{interrupt}: it was routed at {moves.routed_at:.3f} s and rests for {rest_s} s")
        moves.moved_length = moves.length

    # ------------------------------------------------------------------ reports

    def joined(self, event: InstanceJoined) -> None:
        """An incarnation is up."""
        self._books[event.instance] = Book(
            event.incarnation, event.version, event.kv_capacity, event.max_running
        )

    def lost(self, event: InstanceLost) -> None:
        """An incarnation is gone."""
        if self._books.pop(event.instance, None) is None:
            return  # the run is over
        self._left_alone = {pair for pair in self._left_alone if pair[0] != event.instance}
        for trajectory_id, length in event.lengths:
            moves = self._moves[trajectory_id]
            moves.length = length  # what was not reported is gone
            moves.moved_length = min(moves.moved_length, length)

    def reported(self, report: InstanceReport) -> None:
        """`Control` gets a report."""
        book = self._books.get(report.instance)
        if book is None or book.incarnation != report.incarnation:
            return
        book.version, book.kv_tokens = report.version, report.kv_tokens
        book.count = report.running + report.waiting
        self.preemptions[report.instance, report.incarnation] = report.preemptions
        for trajectory_id, length in report.lengths:
            if trajectory_id in book.here:
                book.here[trajectory_id] = self._moves[trajectory_id].length = length
        for one in (*report.finished, *report.interrupted):
            self._leaves(book, one.trajectory_id)
            self._moves[one.trajectory_id].length = one.length
        acked = [c for c in book.outstanding if c.seq <= report.acked_seq]
        book.outstanding = [c for c in book.outstanding if c.seq > report.acked_seq]
        for rejection in report.rejections:
            kind = (
                "pull" if rejection.trajectory_id is None else "stale" if rejection.stale_version else "other"
            )
            if kind == "other" and rejection.trajectory_id not in book.here:
                kind = "aborted"  # in the turn of its Route: the payload was gone before both were sent
            self.rejected[kind] = self.rejected.get(kind, 0) + 1
            if rejection.trajectory_id is not None and rejection.trajectory_id in book.here:
                self._leaves(book, rejection.trajectory_id)
                if kind == "other":
                    self._fail(f"{report.instance} refused {rejection}")
        for command in acked:  # one that finds nothing: the engine had lost it
            if isinstance(command, Interrupt) and command.trajectory_id in book.leaving:
                self._leaves(book, command.trajectory_id)

    def _leaves(self, book: Book, trajectory_id: str) -> None:
        book.here.pop(trajectory_id, None)
        book.leaving.pop(trajectory_id, None)
        for n, command in enumerate(book.outstanding):
            if isinstance(command, Abort) and command.trajectory_id == trajectory_id:
                # It has left by itself, so this Abort will take nothing away.
                book.outstanding[n] = Abort(
                    instance=command.instance,
                    incarnation=command.incarnation,
                    seq=command.seq,
                    trajectory_id=trajectory_id,
                    length=-1,
                )

    # ------------------------------------------------------------------ after each cycle

    def cycled(self, control: Control) -> None:
        """`Control` has gone through a cycle, and its commands are sent."""
        if control.view.finished is None and self._idle_is_checked:
            self._check_idle(control)

    def _check_idle(self, control: Control) -> None:
        """An instance and a trajectory that it might run are not both left alone in two cycles in a row.

        Unless as many instances as trajectories are pulling, with nothing to do, to take those.
        """
        waiting = {item.trajectory_id: item for item in control._trajectories.pending}
        pulling = sum(
            not book.here and any(isinstance(c, Pull) for c in book.outstanding)
            for book in self._books.values()
        )
        left: set[tuple[str, str]] = set()
        for name, book in self._books.items():
            if not waiting or book.here or book.outstanding or book.count:
                continue
            versions = {book.version, max(book.version, control.view.newest_version)}
            left |= {
                (name, trajectory_id)
                for trajectory_id, item in waiting.items()
                if any(_admits(control, item, v) for v in versions)
            }
        for name in {name for name, _ in left & self._left_alone}:
            still = [t for n, t in left & self._left_alone if n == name]
            if len(still) > pulling:
                self._fail(f"{name} stands idle for the second cycle, and might run {waiting[still[0]]}")
        self._left_alone = left


def _admits(control: Control, item: PendingTrajectory, version: int) -> bool:
    """Whether the protocol lets it run under weights of this version, as a firm entry or one there is."""
    if item.group_version is None:
        return control.view.reservable > 0 and control._buffer.can_reserve(version)
    return version >= item.group_version or control._buffer.can_lower(item.group_id, version)
