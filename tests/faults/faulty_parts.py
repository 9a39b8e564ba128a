"""Verifiers, an engine and a trainer with one fault each, named by dotted path in a test's config."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from staleflow.config.schema import Config
from staleflow.reward.verifiers import ScoreRequest
from staleflow.rollout.engine import SamplingParams
from staleflow.rollout.fake import FakeEngine, FakeScript


def nan_for_a_fifth(request: ScoreRequest) -> float:
    """NaN for about a fifth of all responses, else 0 or 1."""
    code = sum(map(ord, request.response))
    return math.nan if code % 5 == 0 else float(code % 3 == 0)


def always_wrong(request: ScoreRequest) -> float:
    """The same for everything."""
    return 0.0


def dying_engine(
    *,
    config: Config,
    sampling: SamplingParams,
    spend: Callable[[float], object] | None = None,
    **options: Any,
) -> FakeEngine:
    """Fails in its third step, whatever instance it is in."""
    return FakeEngine(sampling=sampling, script=FakeScript(fail_at_step=3), **options)


SAVE_S = 2.0


def slowly_saving_trainer(*, config: Config) -> Any:
    """The torch trainer, with a save that takes SAVE_S between its first and its last byte."""
    from toy import opening

    from staleflow.runtime.assembly import build_trainer
    from staleflow.runtime.start import first_start

    training = config.training.model_copy(update={"trainer": "torch"})
    trainer: Any = build_trainer(
        config.model_copy(update={"training": training}), first_start(opening(config))
    )
    save = trainer.save

    def slowly(folder: Path) -> None:
        (folder / "begun").touch()
        time.sleep(SAVE_S)
        save(folder)

    trainer.save = slowly
    return trainer
