"""Files in the shapes of well-known data sets, as they are, with answers that math-verify judges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from staleflow.data.sources import load_source
from staleflow.data.tokenizers import CharTokenizer
from staleflow.errors import DataError
from staleflow.reward.verifiers import ScoreRequest, load_verifier

TOKENIZER = CharTokenizer("\n" + "".join(map(chr, range(32, 127))))

DAPO = [
    {
        "data_source": "math_dapo",
        "prompt": [
            {
                "role": "user",
                "content": "Solve the following math problem step by step. The last line of your response "
                "should be of the form Answer: $Answer (without quotes) where $Answer is the answer to the "
                f'problem.\n\n{problem}\n\nRemember to put your answer on its own line after "Answer:".',
            }
        ],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }
    for problem, answer, index in (
        ("What is $6 \\cdot 7 - 8$?", "34", "9a9b6eb4"),
        ("Find $x$ with $2x = 1026$.", "513", "b426d104"),
        ("What is $6 \\cdot 7 - 8$?", "34", "9a9b6eb4"),
    )
]
GSM8K = [
    {
        "question": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips "
        "in May. How many clips did Natalia sell altogether in April and May?",
        "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
        "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72",
    },
    {
        "question": "A house costs $80,000 and $50,000 are put into it. What is it worth at 150% more?",
        "answer": "It is worth 80000*2.5 = <<80000*2.5=200000>>200,000\n#### 200,000",
    },
]
MATH = [{"problem": "What is $\\frac{1}{2} + \\frac{1}{4}$?", "solution": "It is $\\boxed{\\frac{3}{4}}$."}]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def judged(prompt: Any, response: str) -> float:
    return load_verifier("math_verify")(
        ScoreRequest(trajectory_id="t", prompt=prompt.text, response=response, answer=prompt.answer)
    )


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("rows", "answers", "right", "wrong"),
    [
        (DAPO, ["34", "513", "34"], "Then\nAnswer: 34", "Answer: 35"),
        (GSM8K, ["72", "200,000"], "So it is \\boxed{72}.", "#### 24"),
        (MATH, ["It is $\\boxed{\\frac{3}{4}}$."], "It is $0.75$.", "$\\frac{1}{4}$"),
    ],
    ids=["DAPO-Math-17k", "GSM8K", "MATH"],
)
def test_a_file_of_that_shape_needs_no_settings(
    tmp_path: Path, kind: str, rows: list[dict[str, Any]], answers: list[str], right: str, wrong: str
) -> None:
    source = load_source(kind, TOKENIZER, path=write(tmp_path / f"d.{kind}", rows))
    assert [source.prompt(i).answer for i in range(len(source))] == answers
    first = rows[0]
    expected = first["prompt"][0]["content"] if "prompt" in first else first[next(iter(first))]
    assert source.prompt(0).text == expected
    assert judged(source.prompt(0), right) == 1.0
    assert judged(source.prompt(0), wrong) == 0.0


def test_thousands_with_a_comma_are_the_number(tmp_path: Path) -> None:
    source = load_source("jsonl", TOKENIZER, path=write(tmp_path / "d.jsonl", GSM8K))
    assert judged(source.prompt(1), "\\boxed{200000}") == 1.0


def test_an_answer_is_kept_whole_where_that_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", GSM8K)
    source = load_source("jsonl", TOKENIZER, path=path, answer_marker=None)
    assert source.prompt(0).answer == GSM8K[0]["answer"]
    other = load_source("jsonl", TOKENIZER, path=path, answer_marker="altogether in")
    assert other.prompt(0).answer == "April and May.\n#### 72"
    assert other.prompt(1).answer == GSM8K[1]["answer"], "without the marker it is whole"


def test_repeated_and_too_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "d.parquet", DAPO)
    source = load_source("parquet", TOKENIZER, path=path, options={"unique": True})
    assert [source.prompt(i).answer for i in range(len(source))] == ["34", "513"]
    assert [source.prompt(i).prompt_id for i in range(len(source))] == ["0", "1"]
    assert source.notes == ("1 prompts are left out because they repeat earlier ones",)  # type: ignore[attr-defined]
    longest = max(len(source.prompt(i).tokens) for i in range(2))
    few = load_source("parquet", TOKENIZER, path=path, options={"max_prompt_tokens": longest - 1})
    assert [few.prompt(i).answer for i in range(len(few))] == ["34", "34"]
    assert few.notes == (f"1 prompts are left out because they exceed {longest - 1} tokens",)  # type: ignore[attr-defined]


def test_a_file_of_another_shape_says_what_to_set(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"text": "1+1", "label": "2"}])
    with pytest.raises(
        DataError, match=r"d\.jsonl:1: there is no column 'prompt' or .*set data\.prompt_column"
    ):
        load_source("jsonl", TOKENIZER, path=path)
    with pytest.raises(DataError, match=r"columns: text, label\); set data\.answer_column"):
        load_source("jsonl", TOKENIZER, path=path, prompt_column="text")
    source = load_source("jsonl", TOKENIZER, path=path, prompt_column="text", answer_column="label")
    assert source.prompt(0).answer == "2"
