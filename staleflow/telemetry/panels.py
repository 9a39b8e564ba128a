"""What the live console draws: pure functions from a RunStatus to Rich renderables.

Every line is cut, never wrapped, so a picture has the same height whatever the width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from staleflow.telemetry.catalogue import CATALOGUE
from staleflow.telemetry.metric import SHORT_UNITS
from staleflow.telemetry.rows import BufferStatus, InstanceStatus, RunStatus

RATE_UNIT = SHORT_UNITS["tokens/s"]
MAX_INSTANCES = 12
"""Above this many instances, one summary line and the slowest few tell more than a table."""
SLOWEST_SHOWN = 4
SPARKS = "▁▂▃▄▅▆▇█"
STATE_STYLES = {
    "decoding": "green",
    "idle": "dim",
    "pulling": "cyan",
    "starting": "yellow",
    "lost": "bold red",
}
TOKEN_STYLES = {
    "trained": "green",
    "in_flight": "cyan",
    "filtered": "yellow",
    "aborted": "red",
    "discarded": "magenta",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One titled part of the picture."""

    title: str
    body: RenderableType
    corner: Text

    def panel(self, height: int | None = None) -> RenderableType:
        """Draw it in a frame, `height` lines high in all where given."""
        return Panel(
            self.body,
            title=Text(f" {self.title} ", "bold"),
            title_align="left",
            subtitle=self.corner,
            subtitle_align="right",
            border_style="bright_black",
            padding=(0, 1),
            height=height,
        )

    def ruled(self) -> RenderableType:
        """Draw it under a line only: one line shorter, for low terminals."""
        rule = Rule(Text(f"{self.title}", "bold"), align="left", style="bright_black", characters="─")
        return Group(rule, Padding(self.body, (0, 2)))


def duration(seconds: float) -> str:
    """Return `0:07`, `12:34` or `1:02:03`."""
    whole = max(0, int(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def count(number: float) -> str:
    """Return at most four digits and a unit: `950`, `12.3k`, `4.56M`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= limit:
            scaled = number / (1e3 if unit == "k" else limit)
            return f"{scaled:.2f}{unit}" if scaled < 10 else f"{scaled:.1f}{unit}"
    return f"{number:,.0f}"


def eta_seconds(first: RunStatus, status: RunStatus) -> float | None:
    """Seconds left at the mean pace since `first` (a resumed run starts late); None before a step is done."""
    done = status.step - first.step
    if done <= 0:
        return None
    return (status.seconds - first.seconds) / done * max(0, status.steps - status.step)


def bar(width: int, *parts: tuple[float, str, str]) -> Text:
    """Draw `(share, character, style)` parts one after the other; the rest is a dim dotted line.

    A part above zero is at least one character wide, so that little is never shown as nothing.
    """
    text = Text(no_wrap=True)
    for share, char, style in parts:
        cells = min(width - len(text), max(round(share * width), 1 if share > 0 else 0))
        text.append(char * max(0, cells), style)
    return text.append("·" * (width - len(text)), "bright_black")


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the last values as bars; more values than columns are averaged in equal spans."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite or width <= 0:
        return ""
    if len(finite) > width:
        edges = [round(i * len(finite) / width) for i in range(width + 1)]
        finite = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    return "".join(SPARKS[min(7, int((v - low) / span * 8))] for v in finite)


def header(status: RunStatus, width: int, left: float | None) -> RenderableType:
    """Three lines: who runs and in what phase; how far it is and when it ends; what it waits for."""
    first = Table.grid(expand=True, padding=(0, 1))
    first.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    first.add_column(justify="right", no_wrap=True)
    name = Text.assemble(("staleflow ", "bold magenta"), (status.run_name, "bold"))
    facts = Text.assemble(
        (status.policy, "cyan"),
        ("  η ", "dim"),
        (str(status.bound), "bold"),
        ("  weights ", "dim"),
        (f"v{status.version}", "bold"),
        ("  ", ""),
        (f" {status.phase} ", "black on green" if status.phase == "running" else "black on yellow"),
    )
    first.add_row(name, facts)
    done = status.step / status.steps if status.steps else 0.0
    label = Text.assemble(("step ", "dim"), (f"{status.step}/{status.steps}", "bold"), (" ", ""))
    times = Text.assemble(
        (f" {done:4.0%}", "bold"),
        ("  elapsed ", "dim"),
        duration(status.seconds),
        ("  left ", "dim"),
        "?" if left is None else duration(left),
    )
    progress = Text()
    room = max(4, width - len(label) - len(times))
    cells = round(done * room)
    progress.append("━" * cells, "magenta").append("━" * (room - cells), "bright_black")
    reason = Text(no_wrap=True, overflow="ellipsis")
    if status.waiting_for:
        reason.append("waiting ", "dim").append(status.waiting_for, "yellow")
    return Group(first, Text.assemble(label, progress, times), reason or Text(" "))


def buffers(status: RunStatus, width: int) -> Block:
    """One bar a staleness buffer: occupied solid, reserved shaded, free dotted."""
    table = Table.grid(padding=(0, 1))
    room = max(6, width - 32)
    for offset, buffer in enumerate(status.buffers):
        table.add_row(
            Text(f"+{offset}", "dim"),
            Text(f"step {buffer.step}", "bold" if offset == 0 else ""),
            _buffer_bar(buffer, room),
            Text.assemble((str(buffer.occupied), "green"), ("+", "dim"), (str(buffer.reserved), "yellow")),
            Text(f"of {buffer.capacity}", "dim"),
        )
    legend = Text.assemble(("█ ready ", "green"), ("▒ generating", "yellow"))
    body: RenderableType = table if status.buffers else Text("nothing reserved yet", "dim")
    return Block(title="staleness buffers", body=body, corner=legend)


def _buffer_bar(buffer: BufferStatus, width: int) -> Text:
    capacity = max(1, buffer.capacity)
    return bar(width, (buffer.occupied / capacity, "█", "green"), (buffer.reserved / capacity, "▒", "yellow"))


def instances(status: RunStatus, width: int) -> Block:
    """A row an instance; with many, a row for all of them and the slowest ones."""
    shown: Sequence[InstanceStatus] = status.instances
    many = len(shown) > MAX_INSTANCES
    if many:
        busy = [i for i in shown if i.running or i.state != "idle"] or list(shown)
        shown = sorted(busy, key=lambda i: i.tokens_per_s)[:SLOWEST_SHOWN]
    table = Table.grid(padding=(0, 1), expand=True)
    kv, running, waiting, rate = (
        CATALOGUE[f"instance/<i>/{name}"].label for name in ("kv_usage", "running", "waiting", "tokens_per_s")
    )
    for name in ("instance", "", kv, "", running, waiting, rate):
        table.add_column(
            Text(name, "dim"), justify="left" if name in ("instance", kv) else "right", no_wrap=True
        )
    table.add_column(ratio=1, no_wrap=True)
    table.show_header = True
    kv_width = max(5, min(24, width - 48))
    if many:
        table.add_row(*_all_instances(status.instances, kv_width))
    for item in shown:
        table.add_row(
            Text(item.instance, "bold"),
            Text(f"v{item.version}", "magenta" if item.version == status.version else "yellow"),
            bar(kv_width, (min(1.0, item.kv_usage), "━", "red" if item.kv_usage > 0.95 else "cyan")),
            f"{item.kv_usage:.0%}",
            str(item.running),
            Text(str(item.waiting), "yellow" if item.waiting else "dim"),
            count(item.tokens_per_s),
            Text(item.state, STATE_STYLES.get(item.state, "")),
        )
    body: RenderableType = table if status.instances else Text("none has joined yet", "dim")
    title = (
        f"rollout instances · slowest {len(shown)} of {len(status.instances)}"
        if many
        else "rollout instances"
    )
    corner = Text.assemble((count(status.tokens_per_s), "bold"), (f" {RATE_UNIT}", "dim"))
    if many:
        corner = Text(_tally(status.instances) + "  ", "dim").append_text(corner)
    return Block(title=title, body=body, corner=corner)


def _all_instances(instances: Sequence[InstanceStatus], kv_width: int) -> list[RenderableType]:
    n = len(instances)
    versions = [i.version for i in instances]
    kv = sum(i.kv_usage for i in instances) / n
    spread = f"v{min(versions)}" if min(versions) == max(versions) else f"v{min(versions)}-{max(versions)}"
    return [
        Text(f"all {n}", "bold"),
        Text(spread, "magenta"),
        bar(kv_width, (kv, "━", "cyan")),
        f"{kv:.0%}",
        str(sum(i.running for i in instances)),
        str(sum(i.waiting for i in instances)),
        count(sum(i.tokens_per_s for i in instances)),
        "",
    ]


def _tally(instances: Sequence[InstanceStatus]) -> str:
    states = [i.state for i in instances]
    return "  ".join(f"{states.count(s)} {s}" for s in STATE_STYLES if s in states)


def learning(status: RunStatus, width: int) -> Block:
    """Staleness against its bound, the reward so far and the evaluations."""
    table = Table.grid(padding=(0, 1))
    room = max(8, width - 30)
    reward, accuracy = CATALOGUE["rollout/reward_mean"], CATALOGUE["eval/<set>/avg@<k>"]
    table.add_row(Text(CATALOGUE["staleness/max"].label, "dim"), *_staleness(status, room))
    if status.reward_mean:
        low, high = min(status.reward_mean), max(status.reward_mean)
        table.add_row(
            Text(reward.label, "dim"),
            Text(sparkline(status.reward_mean, room), "green"),
            Text.assemble((reward.text(status.reward_mean[-1]), "bold"), (f" {low:.2f}..{high:.2f}", "dim")),
        )
    else:
        table.add_row(Text(reward.label, "dim"), Text("after the first step", "dim"), "")
    if status.evals:
        (_, first), (version, last) = status.evals[0], status.evals[-1]
        table.add_row(
            Text(accuracy.label, "dim"),
            Text(sparkline([value for _, value in status.evals], room), "magenta"),
            Text.assemble((accuracy.text(last), "bold"), (f" v{version} {last - first:+.3f}", "dim")),
        )
    return Block(title="learning", body=table, corner=Text())


def _staleness(status: RunStatus, room: int) -> tuple[Text, Text]:
    if status.staleness_max is None or status.staleness_mean is None:
        return Text("after the first step", "dim"), Text(f"η {status.bound}", "dim")
    style = "red" if status.staleness_max > status.bound else "cyan"
    # η = 0 has no scale: its bar stays empty as long as the bound holds.
    scale = max(1, status.bound)
    reach = bar(
        room,
        (min(1.0, status.staleness_mean / scale), "█", style),
        (max(0.0, min(1.0, status.staleness_max / scale) - status.staleness_mean / scale), "░", style),
    )
    value = Text.assemble(
        (CATALOGUE["staleness/mean"].text(status.staleness_mean), "bold"),
        (f" max {status.staleness_max} η {status.bound}", "dim"),
    )
    return reach, value


def flow(status: RunStatus, width: int) -> Block:
    """What the trainer does, where the trajectories are and where the tokens went."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, min_width=7)
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_row(Text("trainer", "dim"), Text(status.trainer))
    table.add_row(
        Text("now", "dim"),
        Text.assemble(
            (str(status.pending), "bold"), (" pending  ", "dim"),
            (str(status.in_flight), "bold"), (" in flight  ", "dim"),
            (str(status.scoring), "bold"), (" being scored", "dim"),
        ),
    )  # fmt: skip
    generated = status.tokens.get("generated", 0)
    if generated:
        parts = [(name, status.tokens.get(name, 0)) for name in TOKEN_STYLES]
        shares = [(value / generated, "█", TOKEN_STYLES[name]) for name, value in parts if value]
        table.add_row(
            Text("tokens", "dim"),
            Text.assemble((count(generated), "bold"), " ", bar(max(8, width - 22), *shares)),
        )
        legend = _token_legend(parts, generated, width - 9)
        table.add_row("", legend)
    return Block(title="flow", body=table, corner=Text())


def _token_legend(parts: Sequence[tuple[str, int]], generated: int, width: int) -> Text:
    """Name the parts with their shares, the largest first, as many as fit whole."""
    legend = Text(no_wrap=True)
    for name, value in sorted(parts, key=lambda part: -part[1]):
        share = f"{value / generated:.0%}" if value / generated >= 0.01 else "<1%"
        label = name.replace("_", " ")
        if value and len(legend) + len(label) + len(share) + 3 <= width:
            legend.append("  " if legend else "").append(f"{label} ", TOKEN_STYLES[name]).append(share, "dim")
    return legend
