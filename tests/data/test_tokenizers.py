"""Tokenizers, and that a response travels as the ids that were sampled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from staleflow.data.tokenizers import CharTokenizer, HFTokenizer, load_tokenizer
from staleflow.data.trajectory import Prompt, Segment, Trajectory, token_hash
from staleflow.errors import ConfigError, DataError


class MergingTokenizer:
    """Knows `a`, `b` and `ab`; encodes greedily, so that [a, b] decodes to what encodes as [ab]."""

    stop_token_ids = (3,)
    pad_token_id = 3
    vocab_size = 4

    def encode(self, text: str) -> list[int]:
        return [{"a": 0, "b": 1, "ab": 2}[piece] for piece in text.replace("ab", "AB,").split(",") if piece]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(("a", "b", "ab", "")[i] for i in ids)


def test_sampled_ids_survive_segments_and_turns_where_encoding_anew_would_change_them() -> None:
    """F14."""
    tokenizer = MergingTokenizer()
    sampled = [0, 1, 3]
    assert tokenizer.decode(sampled) == "ab"

    trajectory = Trajectory(
        trajectory_id="t",
        group_id="g",
        member=0,
        prompt=Prompt(prompt_id="0", tokens=(2,), text="ab", answer=""),
        max_new_tokens=9,
    )
    for token, version in zip(sampled, (4, 5, 5), strict=True):
        trajectory = trajectory.extended(
            Segment(
                generated=True,
                tokens=np.array([token], dtype=np.int32),
                log_probs=np.array([-1.0], dtype=np.float32),
                versions=np.array([version], dtype=np.int32),
            )
        )
    assert trajectory.tokens.tolist() == sampled
    assert token_hash(trajectory.tokens) != token_hash(np.array([2, 3], dtype=np.int32))


def test_characters_become_ids_after_padding_and_stop_and_come_back_without_them() -> None:
    tokenizer = CharTokenizer("abc")
    assert tokenizer.encode("cab") == [4, 2, 3]
    assert tokenizer.decode([0, 4, 2, 3, 1, 0, 99]) == "cab"
    assert (tokenizer.pad_token_id, tokenizer.stop_token_ids, tokenizer.vocab_size) == (0, (1,), 5)


def test_a_character_outside_the_alphabet_is_named() -> None:
    with pytest.raises(DataError, match="'7', which this model's"):
        CharTokenizer("abc").encode("a7")


def test_an_alphabet_with_a_repeated_character_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        CharTokenizer("aba")


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_an_unreadable_vocabulary_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "char_vocab.json").write_text(content)
    with pytest.raises(ConfigError, match=r"char_vocab\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_a_folder_without_any_tokenizer_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"The tokenizer in the folder .* is unusable"):
        load_tokenizer(tmp_path)


def make_hf_folder(folder: Path, *, template: str | None = None, eos: str | None = "<stop>") -> Path:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<stop>", "<end>", "a", "b", "[", "]"]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<end>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos)
    if template:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def test_a_hugging_face_folder_gives_its_ids_and_every_stop_token_it_names(tmp_path: Path) -> None:
    folder = make_hf_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, HFTokenizer)
    assert tokenizer.encode("ab") == [2, 3]
    assert tokenizer.decode([2, 3, 0]) == "ab"
    assert tokenizer.stop_token_ids == (0, 1)
    assert tokenizer.pad_token_id == 0
    assert tokenizer.vocab_size == 6
    assert not tokenizer.has_chat_template


def test_a_chat_template_writes_the_messages(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}b{% endif %}"
    )
    tokenizer = HFTokenizer(make_hf_folder(tmp_path, template=template))
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat([{"role": "user", "content": "a"}]) == "[a]b"


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no end token"):
        HFTokenizer(make_hf_folder(tmp_path, eos=None))


def test_a_folder_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere' does not exist"):
        load_tokenizer(tmp_path / "nowhere")
