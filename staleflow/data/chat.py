"""Formats a prompt for the model: as a chat, through the model's template, or as plain text.

Invariants: the text ends where the model's answer begins (`add_generation_prompt`); prompts are encoded here,
once; text from a template gets no further special tokens, since the template writes its own.

A prompt is a text, which counts as the user's message, or a list of messages `{"role", "content"}`. Without
a template the contents are joined by blank lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from staleflow.data.tokenizers import ChatTokenizer, Tokenizer
from staleflow.errors import ConfigError

PLACE = "{prompt}"
"""Stands for the prompt's own text in `ChatFormat.around`. Only this is replaced: braces of LaTeX stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """The user's settings for formatting prompts."""

    template: str = "auto"
    """auto: the tokenizer's own, if it has one; none: plain text; else the path of a Jinja file."""
    system: str | None = None
    """System message for prompts that do not begin with one."""
    around: str = PLACE
    """Text of the last message; PLACE stands for the prompt's own text."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Variables passed to the template, such as `enable_thinking`."""


PLAIN = ChatFormat()
"""The defaults: the tokenizer's template if it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A formatted prompt."""

    text: str
    tokens: tuple[int, ...]


class PromptWriter:
    """Formats the prompts of one data set."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat) -> None:
        """Raises ConfigError for a template file that cannot be read, or that the tokenizer cannot use."""
        self._tokenizer = tokenizer
        self._chat = chat
        self._chat_tokenizer = tokenizer if isinstance(tokenizer, ChatTokenizer) else None
        self._template: str | None = None
        if chat.template == "none" or (chat.template == "auto" and not has_template(tokenizer)):
            self._chat_tokenizer = None
        elif chat.template != "auto":
            self._template = self._read(chat.template)

    def write(self, prompt: str | Sequence[Mapping[str, str]]) -> Written:
        """Text and ids of a prompt. Raises DataError if the template or the vocabulary refuses it."""
        chat = self._chat
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        last = messages[-1]
        messages[-1] = {**last, "content": chat.around.replace(PLACE, last["content"])}
        if chat.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": chat.system})
        if self._chat_tokenizer is not None:
            text = self._chat_tokenizer.apply_chat(messages, template=self._template, options=chat.options)
            return Written(text=text, tokens=tuple(self._chat_tokenizer.encode_chat(text)))
        text = "\n\n".join(message["content"] for message in messages)
        return Written(text=text, tokens=tuple(self._tokenizer.encode(text)))

    def _read(self, path: str) -> str:
        if self._chat_tokenizer is None:
            raise ConfigError(
                f"data.chat_template is {path!r}, but this model's tokenizer does not support chats: "
                "set it to none"
            )
        try:
            return Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"data.chat_template is {path!r}, which cannot be read ({error}): "
                "give auto, none, or the path of a Jinja file"
            ) from error


def has_template(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer has its own chat template."""
    return isinstance(tokenizer, ChatTokenizer) and tokenizer.has_chat_template
