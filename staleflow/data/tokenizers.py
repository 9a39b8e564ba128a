"""Text to token ids and back, once at each end of the system.

Invariant: token ids are authoritative. A prompt is encoded once, when it is drawn; a response is decoded
once, for its verifier and for people to read. Decoded text is never encoded again: for most tokenizers decode
and encode are not inverse, and training would see tokens that were never sampled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from staleflow.errors import ConfigError, DataError

CHAR_VOCABULARY = "char_vocab.json"
"""A model folder with this file has a tokenizer of single characters."""


class Tokenizer(Protocol):
    """The required interface of a tokenizer."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response and belong to it."""
        ...

    @property
    def pad_token_id(self) -> int:
        """Id for padding batches; models never read it."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt's text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without special tokens (stop, padding)."""
        ...


@runtime_checkable
class ChatTokenizer(Protocol):
    """A tokenizer that may have a chat template."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has its own template."""
        ...

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        template: str | None = None,
        options: Mapping[str, Any] = ...,
    ) -> str:
        """Text of the conversation, up to the start of the model's answer.

        `template`: Jinja text that replaces the tokenizer's own. Raises DataError.
        """
        ...

    def encode_chat(self, text: str) -> list[int]:
        """Ids of text from `apply_chat`, with no special tokens beyond those in the text."""
        ...


class CharTokenizer:
    """One token per character, for tiny models. Id 0 is padding, 1 the stop token, then the alphabet."""

    pad_token_id = 0
    stop_token_ids = (1,)

    def __init__(self, alphabet: str) -> None:
        if len(set(alphabet)) != len(alphabet):
            raise ConfigError(f"The alphabet {alphabet!r} contains a character twice; list each once.")
        self.alphabet = alphabet
        self._ids = {character: 2 + i for i, character in enumerate(alphabet)}

    @classmethod
    def from_folder(cls, folder: Path) -> CharTokenizer:
        """Read `char_vocab.json`: `{"alphabet": "..."}`. Raises ConfigError."""
        path = folder / CHAR_VOCABULARY
        try:
            return cls(str(json.loads(path.read_text(encoding="utf-8"))["alphabet"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f'The vocabulary {path} cannot be read ({error}); it must be {{"alphabet": "..."}}.'
            ) from error

    @property
    def vocab_size(self) -> int:
        """Characters, padding and the stop token."""
        return 2 + len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """Ids of the characters. Raises DataError for one that is not in the alphabet."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise DataError(
                f"The text {_shortened(text)!r} has the character {error.args[0]!r}, which this model's"
                f" vocabulary lacks; it has only {self.alphabet!r}."
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """The characters, without padding, stop tokens and ids outside the vocabulary."""
        return "".join(self.alphabet[i - 2] for i in ids if 2 <= i < self.vocab_size)


class HFTokenizer:
    """A Hugging Face tokenizer in a local folder; no network access."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            # transformers passes on any error of its parsers; all mean that the tokenizer is unusable.
            reason = " ".join(str(error).split())[:200]
            reason = reason.rstrip(".")
            raise ConfigError(f"The tokenizer in the folder {folder} is unusable: {reason}.") from error
        self.stop_token_ids = _stop_token_ids(self._tokenizer, folder)
        pad = self._tokenizer.pad_token_id
        self.pad_token_id = int(self.stop_token_ids[0] if pad is None else pad)
        self.vocab_size = len(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder has a chat template."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Ids, with the special tokens that the tokenizer adds, unless the text begins with them."""
        bos = self._tokenizer.bos_token
        has_bos = bool(bos) and text.startswith(bos)
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=not has_bos)]

    def encode_chat(self, text: str) -> list[int]:
        """Ids of text from a chat template, which contains its special tokens."""
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(map(int, ids)), skip_special_tokens=True))

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        template: str | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The template's text, up to the start of the model's answer. Raises DataError."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=True,
                    **options,
                )
            )
        except Exception as error:  # the template is code of the model's author
            raise DataError(f"The chat template refuses the messages of a prompt: {error}.") from error


def load_tokenizer(folder: Path) -> CharTokenizer | HFTokenizer:
    """The tokenizer of a model folder, shipped with the package or a user's own. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(
            f"The tokenizer folder '{folder}' does not exist; give a local Hugging Face folder."
        )
    if (folder / CHAR_VOCABULARY).is_file():
        return CharTokenizer.from_folder(folder)
    return HFTokenizer(folder)


def _stop_token_ids(tokenizer: Any, folder: Path) -> tuple[int, ...]:
    """The tokenizer's end token and those of generation_config.json, where chat models name a second one."""
    ids = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    path = folder / "generation_config.json"
    if path.is_file():
        named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        ids += named if isinstance(named, list) else [] if named is None else [named]
    if not ids:
        raise ConfigError(f"The tokenizer in {folder} has no end token; set eos_token in its config.")
    return tuple(dict.fromkeys(ids))


def _shortened(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
