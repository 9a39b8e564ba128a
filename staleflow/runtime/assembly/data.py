"""Tokenizer, prompt sources, and what a verifier is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staleflow.config.schema import Config
from staleflow.data.chat import ChatFormat
from staleflow.data.schedule import check_batch_size
from staleflow.data.sources import PromptSource, check_prompts, load_source
from staleflow.data.tokenizers import Tokenizer, load_tokenizer
from staleflow.data.trajectory import Prompt, Trajectory
from staleflow.errors import ConfigError
from staleflow.reward.verifiers import ScoreRequest
from staleflow.training.models import context_length, model_folder

DEFAULT_CONTEXT = 1 << 20
"""Tokens, for a model whose config names no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParts:
    """What is read before anything starts."""

    tokenizer: Tokenizer
    train: PromptSource
    held_out: tuple[Prompt, ...]
    """Empty when nothing is evaluated."""
    notes: tuple[str, ...] = ()
    """What a person should know of the sources, such as rows that were left out."""


def read_data(config: Config) -> DataParts:
    """Build tokenizer and sources, and check that every prompt can be used. Raises UserError."""
    tokenizer = build_tokenizer(config)
    longest = _longest_prompt(config, "rollout", config.rollout.max_new_tokens)
    train = build_source(config, tokenizer)
    check_batch_size(config.data.batch_size, len(train), epochs=config.data.epochs)
    check_prompts(train, longest)
    held_out: tuple[Prompt, ...] = ()
    notes: tuple[str, ...] = getattr(train, "notes", ())
    if config.evaluation.every:
        if config.evaluation.max_new_tokens is not None:
            longest = _longest_prompt(config, "evaluation", config.evaluation.max_new_tokens)
        source = build_held_out(config, tokenizer)
        check_prompts(source, longest, "evaluation.max_new_tokens")
        held_out = held_out_prompts(config, source)
        notes += tuple(f"held out: {note}" for note in getattr(source, "notes", ()))
    return DataParts(tokenizer=tokenizer, train=train, held_out=held_out, notes=notes)


def build_tokenizer(config: Config) -> Tokenizer:
    """The model's tokenizer, or the one named."""
    if config.model.tokenizer is not None:
        return load_tokenizer(Path(config.model.tokenizer).expanduser())
    return load_tokenizer(model_folder(config.model.source))


def build_source(config: Config, tokenizer: Tokenizer) -> PromptSource:
    """The training prompts."""
    return load_source(config.data.source, tokenizer, **_source_settings(config, held_out=False))


def build_held_out(config: Config, tokenizer: Tokenizer) -> PromptSource:
    """The evaluation prompts: another split, seed or file of the same source."""
    return load_source(config.data.source, tokenizer, **_source_settings(config, held_out=True))


def held_out_prompts(config: Config, source: PromptSource) -> tuple[Prompt, ...]:
    """What is evaluated on: the first evaluation.prompts of a held-out source."""
    return tuple(source.prompt(i) for i in range(min(len(source), config.evaluation.prompts)))


def _source_settings(config: Config, *, held_out: bool) -> dict[str, Any]:
    data = config.data
    return {
        "split": "held_out" if held_out else "train",
        "size": config.evaluation.prompts if held_out else data.size,
        "seed": config.run.seed,
        "path": data.path,
        "prompt_column": data.prompt_column,
        "answer_column": data.answer_column,
        "answer_marker": data.answer_marker,
        "chat": ChatFormat(
            template=data.chat_template,
            system=data.system_prompt,
            around=data.prompt_template,
            options=data.chat_options,
        ),
        "options": data.options,
    }


def max_model_len(config: Config) -> int:
    """Tokens of prompt and response together: the config's own limit, or the model's. Raises ConfigError."""
    own, limit = context_length(model_folder(config.model.source)), config.rollout.max_model_len
    if own is not None and limit is not None and limit > own:
        raise ConfigError(
            f"rollout.max_model_len is {limit}, but the model reads at most {own} tokens: lower it"
        )
    return limit or own or DEFAULT_CONTEXT


def _longest_prompt(config: Config, section: str, max_new_tokens: int) -> int:
    """Tokens of a prompt that leave room for a whole response."""
    longest = max_model_len(config) - max_new_tokens
    if longest < 1:
        raise ConfigError(
            f"{section}.max_new_tokens is {max_new_tokens}, which leaves no room for a prompt "
            f"in the model's {max_model_len(config)} tokens: lower it"
        )
    return longest


def scoring_request(tokenizer: Tokenizer) -> Callable[[Trajectory], ScoreRequest]:
    """A function from a finished trajectory to what its verifier gets."""

    def request(trajectory: Trajectory) -> ScoreRequest:
        prompt = trajectory.prompt
        return ScoreRequest(
            trajectory_id=trajectory.trajectory_id,
            prompt=prompt.text,
            response=tokenizer.decode(trajectory.tokens.tolist()),
            answer=prompt.answer,
            metadata=dict(prompt.metadata),
        )

    return request
