"""Prompt sources: the interface of a data set, and the registry of names.

Invariants: a source is finite and random-access, and `prompt(i)` returns the same prompt at any time in every
process. So a resumed run can identify used prompts by index. `prompt_id` is the index as text: it becomes
part of group ids, which allow only letters, digits, `_` and `.`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from staleflow.data.chat import PLAIN, ChatFormat
from staleflow.data.table import ANSWER_MARKER
from staleflow.data.tokenizers import Tokenizer
from staleflow.data.trajectory import Prompt
from staleflow.errors import ConfigError, DataError
from staleflow.registry import load_named
from staleflow.suggestions import did_you_mean

SOURCES: Mapping[str, str] = {
    "sums": "staleflow.data.sums.SumsSource",
    "jsonl": "staleflow.data.table.JsonlSource",
    "parquet": "staleflow.data.table.ParquetSource",
    "reasoning_gym": "staleflow.data.reasoning_gym.ReasoningGymSource",
}
"""Name -> class or function `(tokenizer, **options) -> PromptSource`; a dotted path names any other."""

TASK_PREFIX = "reasoning_gym:"
COLUMNS: Mapping[str, str | None] = {
    "prompt_column": None,
    "answer_column": None,
    "answer_marker": ANSWER_MARKER,
}
"""Settings of sources with columns, and their defaults."""
CHAT_KEYS = "data.system_prompt, prompt_template, chat_template or chat_options"

Split = Literal["train", "held_out"]


class PromptSource(Protocol):
    """A data set."""

    def __len__(self) -> int:
        """Number of prompts."""
        ...

    def prompt(self, index: int) -> Prompt:
        """The prompt at `index`, 0 <= index < len. Raises DataError if it cannot be built."""
        ...


def load_source(
    name: str,
    tokenizer: Tokenizer,
    *,
    split: Split = "train",
    seed: int = 0,
    size: int | None = None,
    path: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    answer_marker: str | None = ANSWER_MARKER,
    chat: ChatFormat = PLAIN,
    options: Mapping[str, Any] | None = None,
) -> PromptSource:
    """The source called `name`; `reasoning_gym:<task>` names a task of that library.

    The source's class gets those settings that it accepts; it must accept all of `options`. `size` None: all
    of a file, or the class's default. Raises ConfigError: unknown name or option (with the nearest one), a
    path or column for a source that reads none; DataError: the data is unusable or empty.
    """
    settings: dict[str, Any] = {"split": split, "seed": seed, "path": path, "size": size}
    settings |= {"prompt_column": prompt_column, "answer_column": answer_column}
    settings |= {"answer_marker": answer_marker, "chat": chat}
    options = dict(options or {})
    if name.startswith(TASK_PREFIX):
        settings["task"] = name.removeprefix(TASK_PREFIX)
        options = {"options": options}  # the task's own; the library checks them
    elif name == TASK_PREFIX.removesuffix(":"):
        raise ConfigError("The source 'reasoning_gym' needs a task, as in reasoning_gym:chain_sum.")
    registered = TASK_PREFIX.removesuffix(":") if "task" in settings else name
    build = load_named("data source", registered, SOURCES)
    taken = _accepted(name, build, settings, options)
    try:
        source: PromptSource = build(tokenizer, **taken)
    except TypeError as error:
        raise ConfigError(f"The data source {name!r} cannot be built: {error}.") from error
    if len(source) == 0:
        raise DataError(f"The data source {name!r} is empty; it needs at least one prompt.")
    return source


def _accepted(
    name: str, build: Any, settings: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments that `build` accepts, without settings that are None."""
    parameters = inspect.signature(build).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    own = [p for p in list(parameters)[1:] if p not in settings]
    for option in options:
        if option in settings or not (takes_any or option in own):
            allowed = ", ".join(own) or "none"
            meant = did_you_mean(option, own)
            raise ConfigError(
                f"data.options.{option} is not an option of the data source {name!r}"
                f" (options: {allowed}){f'; {meant}' if meant else '.'}"
            )
    if settings["path"] is not None and not takes_any and "path" not in parameters:
        raise ConfigError(
            f"data.path is set, but the data source {name!r} does not read a file; leave it out."
        )
    for column, default in COLUMNS.items():
        if settings[column] != default and not takes_any and column not in parameters:
            raise ConfigError(
                f"data.{column} is set, but the data source {name!r} does not use it; leave it out."
            )
    if settings["chat"] != PLAIN and not takes_any and "chat" not in parameters:
        raise ConfigError(
            f"{CHAT_KEYS} is set, but the data source {name!r} formats its own prompts; leave it out."
        )
    # None means "the source's default"; where the default is not None, None means "without".
    given = {k: v for k, v in settings.items() if v is not None or COLUMNS.get(k) is not None}
    kept = {k: v for k, v in given.items() if takes_any or k in parameters}
    return kept | dict(options)


def check_prompts(source: PromptSource, max_prompt_tokens: int, key: str = "rollout.max_new_tokens") -> None:
    """Build every prompt once and refuse the first that is empty or too long. Raises DataError.

    `max_prompt_tokens`: the model's context length minus the response budget, which `key` sets.
    """
    for index in range(len(source)):
        prompt = source.prompt(index)
        where = prompt.metadata.get("where") or f"prompt {prompt.prompt_id}"
        if not prompt.tokens:
            raise DataError(f"{where}: the prompt is empty; remove it.")
        if len(prompt.tokens) > max_prompt_tokens:
            raise DataError(
                f"{where}: the prompt has {len(prompt.tokens)} tokens, but the model leaves room for"
                f" {max_prompt_tokens}; shorten it, or lower {key}."
            )
