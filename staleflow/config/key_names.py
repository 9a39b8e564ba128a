"""Known key paths, their names in other systems, and the one nearest to a mistyped key."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from staleflow.config.base import Section
from staleflow.config.yaml_text import Path
from staleflow.suggestions import LIKE_ENOUGH, likeness

ALIASES: dict[str, str] = {
    "eta": "staleness.bound",
    "max_staleness": "staleness.bound",
    "max_head_offpolicyness": "staleness.bound",
    "off_policy_steps": "staleness.bound",
    "max_async_level": "staleness.bound",
    "n_samples": "data.group_size",
    "num_generations": "data.group_size",
    "rollouts_per_example": "data.group_size",
    "dataset": "data.source",
    "train_batch_size": "data.batch_size",
    "num_epochs": "data.epochs",
    "lr": "training.learning_rate",
    "max_steps": "run.steps",
    "total_steps": "run.steps",
    "backend": "rollout.engine",
    "num_workers": "rollout.instances",
    "num_replicas": "rollout.instances",
    "max_tokens": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "kv_cache_size": "rollout.kv_capacity_tokens",
    "reward_fn": "reward.verifier",
    "reward_function": "reward.verifier",
    "loss": "training.algorithm",
    "grad_clip": "training.max_grad_norm",
    "mini_batches": "training.minibatches",
    "importance_sampling": "training.correction",
    "adv_estimator": "training.algorithm",
    "kl_coef": "training.kl.coefficient",
    "init_kl_coef": "training.kl.coefficient",
    "kl_loss_coef": "training.kl.coefficient",
    "ref_model": "training.kl.reference",
    "critic_lr": "training.critic.learning_rate",
    "lam": "training.critic.gae_lambda",
    "eval_interval": "evaluation.every",
    "save_interval": "checkpoint.every",
    "resume_dir": "run.output_dir",
    "model_path": "model.source",
    "tp": "rollout.vllm.tensor_parallel",
    "tensor_parallel_size": "rollout.vllm.tensor_parallel",
    "tensor_model_parallel_size": "rollout.vllm.tensor_parallel",
    "gpu_type": "simulation.gpu",
    "num_rollout_gpus": "simulation.rollout_gpus",
    "num_training_gpus": "simulation.training_gpus",
    "mfu": "simulation.efficiency.training_compute",
}
"""Names that other systems use -> our key. Used in suggestions only, never accepted as keys."""

_OTHER_SECTION = 0.1
"""Subtracted when only the last part of the key matches, not its section."""
_SHORTEST_PREFIX = 3
"""Letters from which on the beginning of a key suggests it, in its section."""
_MOST_SUGGESTIONS = 3
_TIE = 0.001


def key_paths(model: type[Section], prefix: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """Every section and key of a schema with its field, depth first, in the order of declaration."""
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        yield path, field
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from key_paths(field.annotation, path)


def suggestion(model: type[Section], unknown: Path) -> str:
    """`did you mean a.b?` for an unknown key path, or "" when no key is similar."""
    known = {path for path, _ in key_paths(model)}
    scored = [(_likeness(unknown, path), ".".join(path)) for path in known]
    for alias, target in ALIASES.items():
        path = tuple(target.split("."))
        sibling = (*unknown[:-1], path[-1])
        if sibling in known:  # `training.critic.lr` means that section's own learning_rate
            path, target = sibling, ".".join(sibling)
        if path in known:
            scored.append((_likeness(unknown, (*path[:-1], alias)), f"{target} (also called {alias})"))
    best = max(scored)[0]
    if best < LIKE_ENOUGH:
        return ""
    names = sorted({name for score, name in scored if best - score < _TIE})[:_MOST_SUGGESTIONS]
    return f"did you mean {' or '.join(names)}?"


def _likeness(unknown: Path, known: Path) -> float:
    """1 for the same key; high when all parts are similar, or only the last one, in another section."""
    last = likeness(unknown[-1], known[-1])
    if unknown[:-1] == known[:-1]:
        is_prefix = len(unknown[-1]) >= _SHORTEST_PREFIX and known[-1].startswith(unknown[-1])
        return max(last, LIKE_ENOUGH + _OTHER_SECTION) if is_prefix else last
    whole = min(map(likeness, unknown, known)) if len(unknown) == len(known) else 0.0
    return max(whole, last) - _OTHER_SECTION
