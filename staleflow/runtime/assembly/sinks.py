"""The sinks that a config adds to those which every run has."""

from __future__ import annotations

from collections.abc import Callable

from staleflow.config.schema import Config
from staleflow.registry import make_named
from staleflow.telemetry.sinks import SINKS, GuardedSink


def build_sinks(config: Config, warn: Callable[[str], None]) -> list[GuardedSink]:
    """`telemetry.sinks`, in their order. `warn` takes a sentence when one fails. Raises ConfigError."""
    return [
        GuardedSink(
            sink.name,
            make_named(f"telemetry.sinks[{number}].name", sink.name, SINKS, sink.options, ["write", "close"]),
            warn,
        )
        for number, sink in enumerate(config.telemetry.sinks)
    ]
