"""The lives that are followed, changed by the journal's lines about instances and trajectories.

Invariant: a life is in `_on` under an instance exactly while its state is running there. `story` adds what
the journal says of attempts and steps, and what the ledger says of groups.
"""

from __future__ import annotations

from collections.abc import Callable

from staleflow.reporting.lives import RELEASED, GroupLife, Life, State
from staleflow.storage.journal import Line

Wanted = Callable[[str, tuple[str, ...]], bool]


class Followed:
    """Groups that are wanted, and their members while they are alive."""

    def __init__(self, wanted: Wanted) -> None:
        """`wanted(group, members)` says which groups to follow."""
        self.groups: dict[str, GroupLife] = {}
        self.bound = 0
        self.next_step = 0
        self.attempt = 0
        self._wanted = wanted
        self._lives: dict[str, Life] = {}
        self._versions: dict[str, int] = {}
        """Loaded version by instance."""
        self._on: dict[str, dict[str, Life]] = {}
        """By instance: whom it has."""

    # ------------------------------------------------------------------ instances

    def _on_join(self, t: float, line: Line) -> None:
        self._versions[line["i"]] = line["v"]

    def _on_lost(self, t: float, line: Line) -> None:
        lengths = dict(line["back"])
        for life in self._resident(line["i"]):
            length = lengths.get(life.trajectory_id)
            kept = f" with {length} tokens" if length is not None else ""
            life.tell(t, f"{line['i']} was lost ({line.get('why', '')}): back in the trajectory server{kept}")
            self._move(life, t, "pending")
        self._versions.pop(line["i"], None)

    def _on_report(self, t: float, line: Line) -> None:
        instance, version, acked = line["i"], line["v"], line["q"]
        pulled = version != self._versions.get(instance)
        self._versions[instance] = version
        for life in self._resident(instance):
            if not life.arrived and life.route_seq <= acked:
                life.arrived = True
                life.tell(t, f"{instance} has taken it in, at version {version}")
            elif pulled and life.arrived:
                seconds = f" in {line['s']:.2f} s" if "s" in line else ""
                life.tell(t, f"{instance} pulled version {version}{seconds}; it goes on there")
            if life.ordered_out and life.ordered_out <= acked:
                life.tell(t, f"{instance} did not have it any more: back in the trajectory server")
                self._move(life, t, "pending")

    def _resident(self, instance: str) -> list[Life]:
        return list(self._on.get(instance, {}).values())

    def _move(self, life: Life, t: float, state: State, instance: str = "") -> None:
        """Into another state, and off the instance it was on."""
        self._end(life, t)
        life.enter(t, state, instance)
        if instance:
            self._on.setdefault(instance, {})[life.trajectory_id] = life

    def _end(self, life: Life, t: float) -> None:
        """Out of the state it is in."""
        life.leave(t)
        if life.stays and life.now.instance:
            self._on[life.now.instance].pop(life.trajectory_id, None)

    # ------------------------------------------------------------------ trajectories

    def _on_draw(self, t: float, line: Line) -> None:
        if not self._wanted(line["g"], tuple(line["m"])):
            return
        group = GroupLife(group_id=line["g"], attempt=self.attempt, drawn_at=t)
        self.groups[line["g"]] = group
        for trajectory_id in line["m"]:
            life = self._lives[trajectory_id] = Life(trajectory_id=trajectory_id, group=group)
            group.members[trajectory_id] = life
            life.tell(t, f"drawn, a prompt of {line['l']} tokens, with a group of {len(line['m'])}")
            self._move(life, t, "pending")

    def _on_route(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is None:
            return
        instance, why = line["i"], f" ({line['why']})" if "why" in line else ""
        waited = t - life.now.since
        text = f"sent to {instance} at {line['l']} tokens, after {waited:.2f} s in the trajectory server{why}"
        text += self._admission(life, line)
        life.tell(t, text)
        self._move(life, t, "running", instance)
        life.route_seq, life.arrived, life.ordered_out = line["q"], False, 0

    def _admission(self, life: Life, line: Line) -> str:
        """What the route did for its group's reservation; of a first route, what it found."""
        version = life.group.version
        if line.get("ad") == "reserve":
            spare = " as a spare" if "sp" in line else ""
            return f"; reserves its group at V = {line['av']}{spare}, for {self._window(line['av'])}"
        if line.get("ad") == "lower":
            return f"; lowers its group to V = {line['av']}, for {self._window(line['av'])}"
        if life.route_seq == 0 and version is not None:
            return f"; its group is reserved at V = {version}, for {self._window(version)}"
        return ""

    def _window(self, version: int) -> str:
        """The steps that may still train a group of this version."""
        first, last = self.next_step, version + self.bound
        return f"step {last}" if first == last else f"a step from {first} to {last}"

    def _on_interrupt(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is not None:
            life.ordered_out = line["q"]
            life.tell(t, f"to be interrupted on {line['i']}: {line.get('why', 'no reason given')}")

    def _on_abort(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is not None:
            life.tell(t, f"aborted on {line['i']}: {line.get('why', 'no reason given')}")
            self._end(life, t)

    def _on_reject(self, t: float, line: Line) -> None:
        life = self._lives.get(line.get("id", ""))
        if life is not None and life.now.instance == line["i"] and life.route_seq == line["q"]:
            life.tell(t, f"{line['i']} refused it: {line.get('why', '')}; back in the trajectory server")
            self._move(life, t, "pending")

    def _on_back(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is not None and life.now.instance == line["i"]:
            text = f"back in the trajectory server with {line['l']} tokens{_runs(line)}"
            life.tell(t, text)
            self._move(life, t, "pending")

    def _on_done(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is not None and life.now.instance == line["i"]:
            life.tell(
                t, f"finished on {line['i']} at {line['l']} tokens ({line.get('end', '')}){_runs(line)}"
            )
            self._move(life, t, "scoring")

    def _on_external(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is not None:
            life.tell(t, f"waits for its environment, {line['s']:g} s at most")
            self._move(life, t, "external")

    def _on_given(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is not None:
            life.tell(t, f"its environment answered: goes on at {line['l']} tokens")
            self._move(life, t, "pending")

    def _on_gave_up(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is not None:
            life.tell(t, f"given up, and masked in training: {line.get('why', '')}")
            self._move(life, t, "scoring")

    def _on_score(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is not None:
            status = "" if line["st"] == "ok" else f" ({line['st']})"
            life.tell(t, f"scored {line['raw']:g}{status}, {t - life.now.since:.2f} s after it had finished")
            self._move(life, t, "rewarded")

    def _on_cut(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is not None:
            life.tell(t, f"cut off where it is: {line.get('why', 'no reason given')}")
            self._move(life, t, "scoring")

    def _on_resample(self, t: float, line: Line) -> None:
        life = self._lives.pop(line["id"], None)
        if life is None:
            return
        self._end(life, t)
        life.fate = f"dropped for {line['to']}"
        life.tell(t, f"{life.fate}, the same prompt sampled anew: {line.get('why', 'no reason given')}")
        anew = self._lives[line["to"]] = Life(trajectory_id=line["to"], group=life.group)
        life.group.members[line["to"]] = anew
        anew.tell(t, f"takes the place of {line['id']} in its group, from the prompt on")
        self._move(anew, t, "pending")

    def _on_release(self, t: float, line: Line) -> None:
        for trajectory_id in line["ids"]:
            life = self._lives.pop(trajectory_id, None)
            if life is not None:
                self._end(life, t)
                why = line.get("why", "")
                life.fate = f"released: {why}"
                life.tell(t, f"released: {RELEASED.get(why, why)}")

    # ------------------------------------------------------------------ groups

    def _alive(self, group: str) -> list[Life]:
        lives = self.groups[group].lives if group in self.groups else []
        return [life for life in lives if life.trajectory_id in self._lives]

    def _tell_group(self, t: float, group: str, text: str) -> None:
        for life in self._alive(group):
            life.tell(t, text)


def _runs(line: Line) -> str:
    """`: 12 by version 3, 4 given, 20 by version 4` of a line that has it."""
    if not line.get("runs"):
        return ""
    parts = [f"{n} given" if version < 0 else f"{n} by version {version}" for version, n in line["runs"]]
    return f": {', '.join(parts)}"
