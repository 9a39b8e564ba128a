"""Training mode without dropout."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def without_dropout(model: PreTrainedModel, *, gradient_checkpointing: bool = False) -> PreTrainedModel:
    """Make the model deterministic: the ratio must measure weights, not noise.

    transformers recomputes activations only in training mode. So with `gradient_checkpointing` the model is
    in training mode with all dropout rates set to 0.
    """
    if not gradient_checkpointing:
        model.train(False)
        return model
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and (
                "dropout" in name or (name == "p" and "Dropout" in type(module).__name__)
            ):
                setattr(module, name, 0.0)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train(True)
    return model
