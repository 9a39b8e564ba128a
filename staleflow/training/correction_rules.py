"""Which off-policy correction goes with which staleness bound. No torch."""

from __future__ import annotations

from staleflow.errors import ConfigError

CORRECTION_NAMES = ("tis", "sequence_tis", "icepop", "decoupled", "sequence_mask", "behaviour", "none")


def check_correction(name: str, bound: int) -> None:
    """Refuse an unknown correction, and stale data without any.

    All but `none` go with any bound: each reads the behaviour log-probs, so that lag changes the update.
    Without a correction the ratio is taken to log-probs recomputed under the current weights, so it is 1
    at the first update however old the data are, and the clip never acts (F6).

    Raises ConfigError.
    """
    if name not in CORRECTION_NAMES:
        allowed = ", ".join(CORRECTION_NAMES)
        raise ConfigError(f"training.correction is {name!r}, but must be one of {allowed}.")
    if name == "none" and bound > 0:
        raise ConfigError(
            f"training.correction is 'none' with staleness.bound = {bound}, which would train on stale data "
            "as if it were fresh; use 'tis' or another correction, or set staleness.bound=0."
        )
