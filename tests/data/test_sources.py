"""Prompt sources: names, files with bad lines, and the checks before a run starts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from staleflow.data.sources import check_prompts, load_source
from staleflow.data.table import JsonlSource, ParquetSource
from staleflow.data.tokenizers import CharTokenizer
from staleflow.data.trajectory import Prompt
from staleflow.errors import ConfigError, DataError

TOKENIZER = CharTokenizer("".join(map(chr, range(9, 127))))


class ChattyTokenizer(CharTokenizer):
    """Has a chat template."""

    has_chat_template = True

    def apply_chat(
        self, messages: Sequence[Mapping[str, str]], *, template: str | None = None, options: Any = None
    ) -> str:
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return text + (template or "<assistant>") + "".join(f"{k}={v}" for k, v in options.items())

    def encode_chat(self, text: str) -> list[int]:
        return self.encode(text)


class TwoPrompts:
    """A user's own source; `scale` is its option."""

    def __init__(self, tokenizer: CharTokenizer, *, seed: int, scale: int = 1) -> None:
        self.seed, self.scale = seed, scale

    def __len__(self) -> int:
        return 2

    def prompt(self, index: int) -> Prompt:
        return Prompt(prompt_id=str(index), tokens=(2,) * (index * self.scale), text="", answer=None)


def write_lines(path: Path, lines: Sequence[Any]) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_jsonl_rows_become_prompts_numbered_without_the_empty_lines(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "d.jsonl", [{"prompt": "1+1", "answer": "2"}, "", {"prompt": "a", "answer": 7}]
    )
    source = load_source("jsonl", TOKENIZER, path=path)
    assert len(source) == 2
    assert source.prompt(0).text == "1+1"
    assert list(source.prompt(0).tokens) == TOKENIZER.encode("1+1")
    assert (source.prompt(1).prompt_id, source.prompt(1).answer) == ("1", 7)
    assert len(load_source("jsonl", TOKENIZER, path=path, size=1)) == 1


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('{"prompt": "x"', "not valid JSON"),
        ("[1, 2]", "must be a JSON object"),
        ('{"answer": "2"}', r"no column 'prompt' \(columns: answer\)"),
        ('{"promt": "x", "answer": "2"}', "did you mean promt"),
        ('{"prompt": 5, "answer": "2"}', "is int 5; it must be a text"),
        ('{"prompt": [], "answer": "2"}', "it must be a text or a list of messages"),
        ('{"prompt": [{"role": "user"}], "answer": "2"}', "it must be a text or a list of messages"),
        ('{"prompt": "\\u00e9", "answer": "2"}', "which this model's"),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_reason(tmp_path: Path, bad: str, reason: str) -> None:
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "x", "answer": "1"}, "", bad])
    with pytest.raises(DataError, match=re.escape(f"{path}:3: ") + ".*" + reason):
        load_source("jsonl", TOKENIZER, path=path)


def test_a_line_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt": "x", "answer": "1"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"d\.jsonl:2: the line is not UTF-8"):
        load_source("jsonl", TOKENIZER, path=str(path))


def test_parquet_with_nested_columns_and_chat_messages(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {
            "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"q{i}"}],
            "reward_model": {"ground_truth": str(i), "style": "rule"},
            "data_source": "mine",
        }
        for i in range(3)
    ]
    path = tmp_path / "d.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    options = {"metadata_columns": ["data_source"]}
    plain, chat = (
        load_source(
            "parquet", tokenizer, path=str(path), answer_column="reward_model.ground_truth", options=options
        )
        for tokenizer in (TOKENIZER, ChattyTokenizer(TOKENIZER.alphabet))
    )
    assert plain.prompt(2).text == "be brief\n\nq2"
    assert chat.prompt(2).text == "<system>be brief<user>q2<assistant>"
    assert plain.prompt(2).answer == "2"
    assert plain.prompt(2).metadata["data_source"] == "mine"
    with pytest.raises(DataError, match=r"d\.parquet, row 1: there is no column 'reward_model\.truth'"):
        load_source("parquet", TOKENIZER, path=str(path), answer_column="reward_model.truth")


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    path.write_text("hello")
    with pytest.raises(DataError, match=r"d\.parquet: not a readable parquet file"):
        ParquetSource(TOKENIZER, path=str(path))


def test_a_missing_file_and_a_missing_path_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        JsonlSource(TOKENIZER, path=str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"data\.path is not set"):
        JsonlSource(TOKENIZER)
    with pytest.raises(ConfigError, match=r"held_out_path is not set.*evaluation\.every"):
        JsonlSource(TOKENIZER, path=str(tmp_path / "none.jsonl"), split="held_out")


def test_the_held_out_split_of_a_file_source_is_a_file_of_its_own(tmp_path: Path) -> None:
    train = write_lines(tmp_path / "train.jsonl", [{"prompt": "x", "answer": "1"}])
    other = write_lines(tmp_path / "eval.jsonl", [{"prompt": "y", "answer": "2"}])
    source = load_source(
        "jsonl", TOKENIZER, split="held_out", path=train, size=512, options={"held_out_path": other}
    )
    assert [source.prompt(i).text for i in range(len(source))] == ["y"]


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="The data source 'jsonl' is empty"):
        load_source("jsonl", TOKENIZER, path=write_lines(tmp_path / "d.jsonl", [""]))


def test_names_are_looked_up_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean parquet"):
        load_source("parqet", TOKENIZER)
    with pytest.raises(ConfigError, match="needs a task"):
        load_source("reasoning_gym", TOKENIZER)


def test_options_must_be_known_and_a_path_must_be_read_by_somebody() -> None:
    with pytest.raises(ConfigError, match=r"data\.options\.held_out_pth .* did you mean held_out_path"):
        load_source("jsonl", TOKENIZER, options={"held_out_pth": "x"})
    with pytest.raises(ConfigError, match=r"data\.options\.size is not an option"):
        load_source("sums", TOKENIZER, options={"size": 3})
    with pytest.raises(ConfigError, match="does not read a file"):
        load_source("sums", TOKENIZER, path="x.jsonl")


def test_a_dotted_path_names_a_source_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    source = load_source("test_sources.TwoPrompts", TOKENIZER, seed=4, options={"scale": 3})
    assert len(source) == 2
    with pytest.raises(DataError, match="prompt 0: the prompt is empty"):
        check_prompts(source, 10)


def test_the_first_prompt_too_long_for_the_model_is_named(tmp_path: Path) -> None:
    lines = [{"prompt": "x" * n, "answer": ""} for n in (3, 4, 5, 6)]
    source = load_source("jsonl", TOKENIZER, path=write_lines(tmp_path / "d.jsonl", lines))
    check_prompts(source, 6)
    with pytest.raises(DataError, match=r"d\.jsonl:3: the prompt has 5 tokens, .* room for 4"):
        check_prompts(source, 4)


def test_reasoning_gym_items_are_seeded_and_held_out_ones_differ() -> None:
    pytest.importorskip("reasoning_gym")
    name = "reasoning_gym:chain_sum"
    one, same, other, held_out = (
        load_source(name, TOKENIZER, size=5, **settings)
        for settings in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {"seed": 1, "split": "held_out"})
    )
    assert len(one) == 5
    assert one.prompt(3) == same.prompt(3)
    assert one.prompt(3).text not in {other.prompt(3).text, held_out.prompt(3).text}
    assert one.prompt(3).metadata["source_dataset"] == "chain_sum"
    chat = load_source(name, ChattyTokenizer(TOKENIZER.alphabet), size=1)
    assert TOKENIZER.decode(chat.prompt(0).tokens) == f"<user>{chat.prompt(0).text}<assistant>"


def test_an_unknown_reasoning_gym_task_or_option_is_refused() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match="did you mean chain_sum"):
        load_source("reasoning_gym:chain_sums", TOKENIZER)
    with pytest.raises(ConfigError, match="reasoning-gym's task chain_sum refuses its options"):
        load_source("reasoning_gym:chain_sum", TOKENIZER, options={"min_term": 3})
    sums = load_source("reasoning_gym:chain_sum", TOKENIZER, size=1, options={"min_terms": 5, "max_terms": 5})
    assert len(re.findall(r"\d+", sums.prompt(0).text)) == 5


def test_a_column_must_be_read_by_somebody() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.answer_column is set, but the data source 'sums' does not use it"
    ):
        load_source("sums", TOKENIZER, answer_column="solution")


def test_a_line_nested_too_deep_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "1", "answer": "1"}, "[" * 100_000])
    with pytest.raises(DataError, match=r"d\.jsonl:2: the line is JSON nested too deeply"):
        load_source("jsonl", TOKENIZER, path=path)
