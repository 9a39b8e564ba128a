"""The built-in task: add up single digits, writing every running sum. No download, exact rewards.

    prompt    7+5+9=
    response  +5=21+9=12      7 + 5 = 12, 12 + 9 = 21; sums have two digits, units first
    answer    12              what follows the last `=`

Each term adds five tokens to the response and their number is geometric, so that response lengths are
long-tailed and rollout instances finish unevenly, as with long reasoning.

Invariants: a prompt is a function of (seed, split, index) alone; training and held-out prompts are disjoint
for all seeds, because the hash of its text assigns every prompt to one of the two; held-out prompts are
distinct.
"""

from __future__ import annotations

import hashlib
import random
from typing import Literal

from staleflow.data.tokenizers import Tokenizer
from staleflow.data.trajectory import Prompt
from staleflow.errors import DataError

ALPHABET = "0123456789+="
MIN_TERMS = 3
MAX_TERMS = 10
MORE_TERMS = 0.7
"""Chance of one more term, up to MAX_TERMS."""
HELD_OUT_SHARE = 4
"""One prompt in so many is held out: the short ones are few (1,000 of three terms)."""
MAX_RESPONSE_TOKENS = 5 * (MAX_TERMS - 1) + 1
"""Of a correct response, stop token included."""

Split = Literal["train", "held_out"]


class SumsSource:
    """`size` prompts of one split. `prompt_id` is the index."""

    def __init__(self, tokenizer: Tokenizer, *, size: int, seed: int = 0, split: Split = "train") -> None:
        """Raises DataError when so many distinct held-out prompts do not exist."""
        self._tokenizer = tokenizer
        if split == "train":
            # Drawn one by one: training may see a prompt again, as with any small data set.
            self._terms = [_draw(random.Random(f"{seed}-{split}-{i}"), split) for i in range(size)]
        else:
            self._terms = _distinct(random.Random(f"{seed}-{split}"), size)

    def __len__(self) -> int:
        return len(self._terms)

    def prompt(self, index: int) -> Prompt:
        """The prompt at `index`."""
        terms = self._terms[index]
        text = question(terms)
        return Prompt(
            prompt_id=str(index),
            tokens=tuple(self._tokenizer.encode(text)),
            text=text,
            answer=_written(sum(terms)),
            metadata={"terms": len(terms)},
        )


def question(terms: list[int]) -> str:
    """The prompt for these terms."""
    return "+".join(map(str, terms)) + "="


def solution(terms: list[int]) -> str:
    """The response that writes every running sum."""
    total, steps = terms[0], []
    for term in terms[1:]:
        total += term
        steps.append(f"+{term}={_written(total)}")
    return "".join(steps)


def draw_terms(rng: random.Random, split: Split, *, uniform: bool = False) -> list[int]:
    """Terms of one random prompt of a split; `uniform` draws their number evenly (for the warm start)."""
    while True:
        if uniform:
            count = rng.randint(MIN_TERMS, MAX_TERMS)
        else:
            count = MIN_TERMS
            while count < MAX_TERMS and rng.random() < MORE_TERMS:
                count += 1
        terms = [rng.randrange(10) for _ in range(count)]
        if _split_of(question(terms)) == split:
            return terms


def _draw(rng: random.Random, split: Split) -> list[int]:
    return draw_terms(rng, split)


def _distinct(rng: random.Random, size: int) -> list[list[int]]:
    """`size` different held-out prompts; gives up when new ones have become too rare."""
    found: dict[str, list[int]] = {}
    tries = 0
    while len(found) < size:
        terms = draw_terms(rng, "held_out")
        found.setdefault(question(terms), terms)
        tries += 1
        if tries > 100 * size + 1000:
            raise DataError(f"The sums task has fewer than {size} distinct held-out prompts; ask for fewer.")
    return list(found.values())


def _split_of(text: str) -> Split:
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return "held_out" if digest[0] % HELD_OUT_SHARE == 0 else "train"


def _written(number: int) -> str:
    return f"{number:02d}"[::-1]
