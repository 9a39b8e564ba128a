"""The built-in task: prompts, answers, and the model shipped for it."""

from __future__ import annotations

import json
import random
from importlib.resources import files
from pathlib import Path

import pytest

from staleflow.data import sums
from staleflow.data.sources import check_prompts, load_source
from staleflow.data.sums import SumsSource, draw_terms, question, solution
from staleflow.data.tokenizers import CharTokenizer, HFTokenizer, load_tokenizer
from staleflow.reward.verifiers import ScoreRequest, exact_match

TOKENIZER = CharTokenizer(sums.ALPHABET)
FOLDER = Path(str(files("staleflow.data"))) / "builtin" / "sums"


def score(source: SumsSource, index: int, response: str) -> float:
    prompt = source.prompt(index)
    return exact_match(
        ScoreRequest(
            trajectory_id="t",
            prompt=prompt.text,
            response=response,
            answer=prompt.answer,
            metadata=prompt.metadata,
        )
    )


def test_numbers_are_written_units_first_and_prompts_fill_forty_tokens() -> None:
    assert question([53, 79, 8]) == "350+970+800" + "." * 28 + "="
    assert solution([53, 79, 8]) == "231=041"
    assert len(question([0] * 10)) == len(question([1] * 3)) == 40
    assert len(solution([99] * 10)) + 1 == sums.MAX_RESPONSE_TOKENS


def test_the_written_solution_scores_one_whatever_its_steps_and_another_answer_zero() -> None:
    source = SumsSource(TOKENIZER, size=20)
    for index in range(20):
        answer = source.prompt(index).answer
        assert score(source, index, f"000={answer}") == 1.0
        assert score(source, index, answer) == 0.0, "an answer without a running sum"
        assert score(source, index, f"{answer}=999") == 0.0


@pytest.mark.slow
def test_held_out_and_training_prompts_are_disjoint_for_all_seeds() -> None:
    held_out = {SumsSource(TOKENIZER, size=512, split="held_out").prompt(i).text for i in range(512)}
    assert len(held_out) == 512
    for seed in range(3):
        train = SumsSource(TOKENIZER, size=1000, seed=seed)
        assert held_out.isdisjoint(train.prompt(i).text for i in range(1000))
    rng = random.Random(0)
    assert held_out.isdisjoint(question(draw_terms(rng, "train", uniform=True)) for _ in range(1000))


def test_a_prompt_depends_on_seed_split_and_index_alone() -> None:
    short, long = SumsSource(TOKENIZER, size=5, seed=2), SumsSource(TOKENIZER, size=50, seed=2)
    assert [short.prompt(i) for i in range(5)] == [long.prompt(i) for i in range(5)]
    assert short.prompt(0) != SumsSource(TOKENIZER, size=5, seed=3).prompt(0)


def test_correct_responses_are_long_tailed() -> None:
    source = SumsSource(TOKENIZER, size=2000)
    lengths = sorted(4 * (source.prompt(i).metadata["terms"] - 1) for i in range(2000))
    assert lengths[1000] in (12, 16)
    assert lengths[1980] == lengths[-1] == 36


def test_the_default_source_fits_the_shipped_model() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    source = load_source("sums", load_tokenizer(FOLDER))
    assert len(source) == sums.DEFAULT_SIZE
    check_prompts(source, config["max_position_embeddings"] - 48)
    assert config["vocab_size"] == TOKENIZER.vocab_size


def test_the_shipped_folder_is_small_and_its_two_tokenizers_agree() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 1_000_000
    own, hugging_face = load_tokenizer(FOLDER), HFTokenizer(FOLDER)
    assert isinstance(own, CharTokenizer)
    text = question([53, 79, 8]) + solution([53, 79, 8])
    assert own.encode(text) == hugging_face.encode(text)
    ids = [*own.encode(text), *own.stop_token_ids]
    assert own.decode(ids) == hugging_face.decode(ids) == text
    assert own.stop_token_ids == hugging_face.stop_token_ids


@pytest.mark.parametrize("term_count", [3, 5])
def test_the_shipped_model_is_half_taught(term_count: int) -> None:
    """Above chance (1 in 1,000), below perfect: there is something to learn and something to learn from."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True)
    rng = random.Random(5)
    right = total = 0
    while total < 64:
        terms = draw_terms(rng, "held_out", uniform=True)
        if len(terms) != term_count:
            continue
        start = len(TOKENIZER.encode(question(terms)))
        ids = torch.tensor([[*TOKENIZER.encode(question(terms) + solution(terms)), 1]])
        with torch.no_grad():
            log_probs = model(input_ids=ids).logits.log_softmax(-1)
        right += float(log_probs[0, start - 1 : -1].gather(1, ids[0, start:, None]).sum().exp())
        total += 1
    assert 0.05 < right / total < 0.9
