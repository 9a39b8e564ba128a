"""What the journal's lines say about one trajectory, as sentences."""

from __future__ import annotations

from collections.abc import Callable

from staleflow.reporting.history.lives import TrajectoryHistory
from staleflow.storage.journal import Line

RELEASED = {
    "filtered": "all rewards of its group were equal, so it would have taught nothing",
    "failed": "no member of its group could be scored",
    "aborted": "a surplus member",
    "expired": "its group was a spare that was not needed in time",
    "discarded": "the run ended",
}
"""Reasons of a release, as the ledger and the token balance name them, in words."""
IN_THE_SERVER = "returned to the trajectory server"

Sentence = Callable[[Line, TrajectoryHistory, float], str]
"""Of (line, its trajectory before the line, seconds since the trajectory's last change of state)."""


def _lost(line: Line, about: TrajectoryHistory, waited: float) -> str:
    length = dict(line["back"]).get(about.trajectory_id)
    tokens = f" with {length} tokens" if length is not None else ""
    return f"{line['i']} was lost ({line.get('why', '')}): {IN_THE_SERVER}{tokens}"


def _score(line: Line, about: TrajectoryHistory, waited: float) -> str:
    status = "" if line["st"] == "ok" else f" ({line['st']})"
    return f"scored {line['raw']:g}{status}, {waited:.2f} s after it finished"


def _release(line: Line, about: TrajectoryHistory, waited: float) -> str:
    reason = line.get("why", "")
    return f"released: {RELEASED.get(reason, reason)}"


SENTENCES: dict[str, Sentence] = {
    "lost": _lost,
    "score": _score,
    "release": _release,
    "draw": lambda line, *_: f"drawn: prompt of {line['l']} tokens, group of {len(line['m'])}",
    "interrupt": lambda line, *_: f"Interrupt sent to {line['i']}: {_why(line)}",
    "abort": lambda line, *_: f"aborted on {line['i']}: {_why(line)}",
    "reject": lambda line, *_: f"{line['i']} refused it: {line.get('why', '')}; {IN_THE_SERVER}",
    "report": lambda line, *_: f"{line['i']} no longer had it: {IN_THE_SERVER}",
    "back": lambda line, *_: f"{IN_THE_SERVER} with {line['l']} tokens{_runs(line)}",
    "done": lambda line, *_: (
        f"finished on {line['i']} with {line['l']} tokens ({line.get('end', '')}){_runs(line)}"
    ),
    "external": lambda line, *_: f"waits for its environment, at most {line['s']:g} s",
    "given": lambda line, *_: f"its environment answered: continues with {line['l']} tokens",
    "gave_up": lambda line, *_: f"given up, and masked in training: {line.get('why', '')}",
    "cut": lambda line, *_: f"truncated: {_why(line)}",
    "resample": lambda line, *_: f"dropped for {line['to']}, a new sample of the prompt: {_why(line)}",
}
"""By the kind of the line."""


def route_sentence(line: Line, about: TrajectoryHistory, waited: float, *, next_step: int, bound: int) -> str:
    """A Route, with what it did to the group's reservation; a first Route also tells of an earlier one."""
    why = f" ({line['why']})" if "why" in line else ""
    text = f"routed to {line['i']} with {line['l']} tokens after {waited:.2f} s in the trajectory server{why}"
    version = line["av"] if "ad" in line else about.group.version
    if version is None:
        return text
    if line.get("ad") == "reserve":
        text += f"; reserves its group at V = {version}{' as a spare' if 'sp' in line else ''}"
    elif line.get("ad") == "lower":
        text += f"; lowers its group to V = {version}"
    elif not about.routed:
        text += f"; its group is reserved at V = {version}"
    else:
        return text
    last = version + bound
    return f"{text}, for step {last}" if next_step == last else f"{text}, for steps {next_step} to {last}"


def arrival_sentence(line: Line) -> str:
    """An instance acknowledged the Route."""
    return f"accepted by {line['i']} at version {line['v']}"


def pull_sentence(line: Line) -> str:
    """The instance changed its weights under a running trajectory."""
    seconds = f" in {line['s']:.2f} s" if "s" in line else ""
    return f"{line['i']} pulled version {line['v']}{seconds}; generation continues there"


def _why(line: Line) -> str:
    return str(line.get("why", "no reason given"))


def _runs(line: Line) -> str:
    """`: 12 by version 3, 4 given, 20 by version 4` of a line that has it."""
    if not line.get("runs"):
        return ""
    parts = [f"{n} given" if version < 0 else f"{n} by version {version}" for version, n in line["runs"]]
    return f": {', '.join(parts)}"
