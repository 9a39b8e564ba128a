"""Prompts as text or messages, through a model's chat template or none."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_tokenizers import make_hf_folder

from staleflow.data.chat import PLAIN, ChatFormat, PromptWriter
from staleflow.data.tokenizers import CharTokenizer, HFTokenizer
from staleflow.errors import ConfigError

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}[{{ m.content }}]{% endfor %}"
    "{% if add_generation_prompt %}b{% endif %}{% if shout %}!{% endif %}"
)
SYSTEM, USER = {"role": "system", "content": "x"}, {"role": "user", "content": "a"}
PLAIN_TEXT = CharTokenizer("".join(map(chr, range(9, 127))))


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return HFTokenizer(make_hf_folder(tmp_path_factory.mktemp("chatty"), template=TEMPLATE))


@pytest.mark.parametrize(
    ("chat", "prompt", "text"),
    [
        (PLAIN, "a", "u[a]b"),
        (PLAIN, [SYSTEM, USER], "s[x]u[a]b"),
        (ChatFormat(system="y"), "a", "s[y]u[a]b"),
        (ChatFormat(system="y"), [SYSTEM, USER], "s[x]u[a]b"),
        (ChatFormat(around=r"Solve {prompt} in \boxed{}."), "a", r"u[Solve a in \boxed{}.]b"),
        (ChatFormat(around="({prompt})"), [USER, USER], "u[a]u[(a)]b"),
        (ChatFormat(options={"shout": True}), "a", "u[a]b!"),
        (ChatFormat(template="none"), "a", "a"),
        (ChatFormat(template="none", system="y"), [USER, USER], "y\n\na\n\na"),
    ],
)
def test_text_and_messages_are_written_as_the_format_says(
    chat: ChatFormat, prompt: str | list[dict[str, str]], text: str, chatty: HFTokenizer
) -> None:
    written = PromptWriter(chatty, chat).write(prompt)
    assert written.text == text
    assert list(written.tokens) == chatty.encode(text)


def test_without_a_template_a_prompt_is_plain_text() -> None:
    assert PromptWriter(PLAIN_TEXT, PLAIN).write("a").text == "a"
    assert PromptWriter(PLAIN_TEXT, ChatFormat(system="x")).write([USER]).text == "x\n\na"


def test_a_template_of_ones_own_takes_the_place_of_the_tokenizers(
    tmp_path: Path, chatty: HFTokenizer
) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}]")
    assert PromptWriter(chatty, ChatFormat(template=str(own))).write("a").text == "a]"
    with pytest.raises(ConfigError, match=r"data\.chat_template is '/nowhere', which cannot be read"):
        PromptWriter(chatty, ChatFormat(template="/nowhere"))
    with pytest.raises(ConfigError, match="this model's tokenizer does not support chats"):
        PromptWriter(PLAIN_TEXT, ChatFormat(template=str(own)))


def test_a_template_that_writes_the_first_special_token_gets_no_second(tmp_path: Path) -> None:
    """Nor does one that does not want it: what the template wrote is all there is."""
    from tokenizers import processors

    folder = make_hf_folder(tmp_path, template="{{ messages[0].content }}")
    tokenizer = HFTokenizer(folder)
    inner = tokenizer._tokenizer.backend_tokenizer
    inner.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 1)])
    assert tokenizer.encode("ab") == [1, 2, 3]
    assert PromptWriter(tokenizer, PLAIN).write("ab").tokens == (2, 3)
    assert PromptWriter(tokenizer, ChatFormat(template="none")).write("ab").tokens == (1, 2, 3)
