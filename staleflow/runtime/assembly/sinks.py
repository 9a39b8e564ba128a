"""The sinks that a config adds to those which every run has."""

from __future__ import annotations

from collections.abc import Callable

from staleflow.config.schema import Config
from staleflow.errors import ConfigError
from staleflow.registry import make_named
from staleflow.telemetry.sinks import SINK_METHODS, SINKS, GuardedSink


def build_sinks(config: Config, warn: Callable[[str], None]) -> list[GuardedSink]:
    """`telemetry.sinks`, in their order. `warn` takes a sentence for each that cannot be made or fails."""
    sinks = []
    for number, sink in enumerate(config.telemetry.sinks):
        try:
            made = make_named(sink_key(number), sink.name, SINKS, sink.options, SINK_METHODS)
        except ConfigError as error:
            warn(f"{error}; the run goes on without it")
            continue
        sinks.append(GuardedSink(sink.name, made, warn))
    return sinks


def sink_key(number: int) -> str:
    """The config key of a sink, counted from 0."""
    return f"telemetry.sinks.{number}.name"
