"""The composition root: every part is built here, from the config, and nowhere else.

Invariants: nothing else constructs a part or imports a backend. Heavy libraries are imported where a part
that needs them is built, so that each process loads only what it uses.
"""

from staleflow.runtime.assembly.control import (
    build_control,
    build_costs,
    build_policy,
    build_trajectory_server,
    kept_bound,
    opening_record,
)
from staleflow.runtime.assembly.data import (
    DEFAULT_CONTEXT,
    DataParts,
    build_held_out,
    build_source,
    build_tokenizer,
    held_out_prompts,
    max_model_len,
    read_data,
    scoring_request,
)
from staleflow.runtime.assembly.engines import (
    NO_WEIGHTS,
    build_engine,
    build_model,
    initial_weights,
    limit_threads,
)
from staleflow.runtime.assembly.inline import build_inline_loop, build_inline_session
from staleflow.runtime.assembly.loop import build_journal, build_loop, build_monitor
from staleflow.runtime.assembly.plugins import coordination_checks, part_checks
from staleflow.runtime.assembly.ray_run import (
    build_cluster,
    build_ray_session,
    check_local_gpus,
    part_builders,
)
from staleflow.runtime.assembly.scoring import (
    build_evaluator,
    build_inline_scorer,
    build_pool,
    evaluating,
    instance_names,
)
from staleflow.runtime.assembly.sinks import build_sinks
from staleflow.runtime.assembly.training import (
    build_critic,
    build_objective,
    build_reference,
    build_trainer,
    check_deepspeed,
)

__all__ = [
    "DEFAULT_CONTEXT",
    "NO_WEIGHTS",
    "DataParts",
    "build_cluster",
    "build_control",
    "build_costs",
    "build_critic",
    "build_engine",
    "build_evaluator",
    "build_held_out",
    "build_inline_loop",
    "build_inline_scorer",
    "build_inline_session",
    "build_journal",
    "build_loop",
    "build_model",
    "build_monitor",
    "build_objective",
    "build_policy",
    "build_pool",
    "build_ray_session",
    "build_reference",
    "build_sinks",
    "build_source",
    "build_tokenizer",
    "build_trainer",
    "build_trajectory_server",
    "check_deepspeed",
    "check_local_gpus",
    "coordination_checks",
    "evaluating",
    "held_out_prompts",
    "initial_weights",
    "instance_names",
    "kept_bound",
    "limit_threads",
    "max_model_len",
    "opening_record",
    "part_builders",
    "part_checks",
    "read_data",
    "scoring_request",
]
