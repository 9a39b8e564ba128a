"""Which off-policy corrections a staleness bound allows. No torch."""

from __future__ import annotations

from staleflow.errors import ConfigError

CORRECTION_NAMES = ("tis", "sequence_tis", "icepop", "decoupled", "sequence_mask", "behaviour", "none")


def check_correction(name: str, bound: int) -> None:
    """Refuse an unknown correction, and stale data without a correction. Raises ConfigError.

    All but `none` work with any bound: each uses the behaviour log-probs, so that lag changes the update.
    Without a correction the ratio is relative to log-probs recomputed under the current weights, so it is 1
    at the first update however old the data are, and the clip never acts (F6).
    """
    if name not in CORRECTION_NAMES:
        allowed = ", ".join(CORRECTION_NAMES)
        raise ConfigError(f"training.correction is {name!r}, but must be one of {allowed}.")
    if name == "none" and bound > 0:
        raise ConfigError(
            f"training.correction is 'none' with staleness.bound = {bound}, which would train on stale data "
            "as if it were fresh; use 'tis' or another correction, or set staleness.bound=0."
        )
