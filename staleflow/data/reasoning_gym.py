"""Prompts of the reasoning-gym library: over 100 seeded families of puzzles with their own graders.

Invariant: the item at an index depends on (task, seed, index) alone; training and held-out sets differ by
their seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staleflow.data.chat import PLAIN, ChatFormat, PromptWriter
from staleflow.data.tokenizers import Tokenizer
from staleflow.data.trajectory import Prompt
from staleflow.errors import ConfigError
from staleflow.suggestions import did_you_mean

HELD_OUT_SEED = 1_000_003
"""Added to the seed for the held-out split: far above any seed that users choose."""


DEFAULT_SIZE = 8192
"""Prompts if the config sets no number; each is created on access."""


class ReasoningGymSource:
    """`size` items of one task. `text` is the bare question, which some of the library's graders read."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        task: str,
        size: int = DEFAULT_SIZE,
        seed: int = 0,
        split: str = "train",
        chat: ChatFormat = PLAIN,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`options` are the task's own parameters. Raises ConfigError."""
        from reasoning_gym.factory import DATASETS, create_dataset

        if task not in DATASETS:
            meant = did_you_mean(task, DATASETS)
            raise ConfigError(f"reasoning-gym has no task {task!r}{meant and f'; {meant}'}")
        shift = HELD_OUT_SEED if split == "held_out" else 0
        try:
            self._items = create_dataset(task, size=size, seed=seed + shift, **(options or {}))
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(f"reasoning-gym's task {task} refuses its options: {error}.") from error
        self._size = size
        self._writer = PromptWriter(tokenizer, chat)

    def __len__(self) -> int:
        return self._size

    def prompt(self, index: int) -> Prompt:
        """The item at `index`."""
        item = self._items[index]
        question = str(item["question"])
        return Prompt(
            prompt_id=str(index),
            tokens=self._writer.write(question).tokens,
            text=question,
            answer=item["answer"],
            metadata=dict(item["metadata"]),
        )
