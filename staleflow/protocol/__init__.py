"""The staleness protocol: pure state, no I/O, no clock, nothing but the standard library."""

from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.entry import BufferState, Consumed, Entry
from staleflow.protocol.placement import DeadlineCounts

__all__ = ["BufferState", "Consumed", "DeadlineCounts", "Entry", "StalenessBuffer"]
