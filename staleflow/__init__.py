"""Staleflow: asynchronous RL post-training under a hard, per-trajectory staleness bound."""

__version__ = "0.1.0"
