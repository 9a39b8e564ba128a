"""The settings of a rank as plain, picklable values, and the DeepSpeed config derived from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from staleflow.training.objective import Objective

NEVER = 1 << 40
"""Steps between DeepSpeed's own progress lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """The same on every rank. Picklable, so `make_model` must be picklable too."""

    make_model: Callable[[], PreTrainedModel]
    """Returns the model with its initial weights, whole and on the CPU."""
    objective: Objective
    zero_stage: Literal[0, 1, 2, 3]
    """0: every rank holds everything; 1: optimizer states are sharded; 2: gradients too; 3: weights too."""
    offload_optimizer: bool
    """Keep and update optimizer states in host memory; stages 1 to 3."""
    dtype: Literal["float32", "bfloat16"]
    """Number type of weights and passes. With bfloat16 the optimizer keeps its own float32 weights."""
    temperature: float
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    warmup_steps: int
    max_grad_norm: float
    """0: gradients are not scaled down."""
    micro_batch_tokens: int
    """Budget of one pass of one rank."""
    packing: bool
    gradient_checkpointing: bool
    attention: str | None = None
    """transformers' name of the attention implementation. None: the model's default."""
    threads: int = 1
    """CPU threads of a rank."""
    make_reference: Callable[[], PreTrainedModel] | None = None
    """Returns the reference model of a KL term, whole on every rank. None: the objective needs none."""

    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's own config. The caller decides when to update, with `step`."""
        zero: dict[str, Any] = {"stage": self.zero_stage, "overlap_comm": False}
        if self.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu"}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            # In stage 0 with float32 `GuardedAdamW` clips.
            "gradient_clipping": 0.0 if self.guards_itself else self.max_grad_norm,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": NEVER,
        }
        if self.dtype == "bfloat16":
            config["bf16"] = {"enabled": True, "check_grad_overflow": True}
            if self.zero_stage > 0:
                config["data_types"] = {"grad_accum_dtype": "fp32"}
        return config

    @property
    def guards_itself(self) -> bool:
        """Whether the optimizer must check gradients itself: DeepSpeed does not check for NaN here."""
        return self.zero_stage == 0 and self.dtype == "float32"
