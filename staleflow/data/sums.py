"""The built-in task: add up numbers, writing every running sum. No download, exact rewards, long tail.

    prompt    350+970+800+.............................=    53 + 79 + 8, shortened here
    response  231=041                                       53 + 79 = 132, 132 + 8 = 140
    answer    041                                           the text after the last `=`

All numbers have three digits, units first. A prompt has room for ten terms, padded with dots, so that the
next term is always at the same distance: a tiny model learns where to look within a minute on one core. Each
term adds four tokens to the response, and the number of terms is geometric, so that response lengths are
long-tailed and rollout instances finish unevenly, as with long reasoning.

Invariants: a prompt is a function of (seed, split, index) alone; training and held-out prompts are disjoint
for all seeds, because the hash of a prompt's text decides its split; held-out prompts are distinct.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Literal

from staleflow.data.tokenizers import Tokenizer
from staleflow.data.trajectory import Prompt

ALPHABET = "0123456789+=."
DIGITS = 3
MIN_TERMS = 3
MAX_TERMS = 10
LARGEST_TERM = 99
MORE_TERMS = 0.7
"""Probability of one more term, up to MAX_TERMS."""
HELD_OUT_SHARE = 4
"""One in this many prompts is held out."""
PROMPT_TOKENS = MAX_TERMS * (DIGITS + 1)
MAX_RESPONSE_TOKENS = (MAX_TERMS - 1) * (DIGITS + 1)
"""Length of the longest correct response, stop token included."""
DEFAULT_SIZE = 8192
"""Prompts if the config sets no number."""

Split = Literal["train", "held_out"]


class SumsSource:
    """`size` prompts of one split, for the verifier `exact_match`. `prompt_id` is the index."""

    def __init__(
        self, tokenizer: Tokenizer, *, size: int = DEFAULT_SIZE, seed: int = 0, split: Split = "train"
    ) -> None:
        self._tokenizer = tokenizer
        self._terms: list[list[int]] = []
        rng, seen = random.Random(f"{seed}-{split}"), set()
        while len(self._terms) < size:
            terms = draw_terms(rng, split)
            if question(terms) not in seen:
                seen.add(question(terms))
                self._terms.append(terms)

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
            answer=written(sum(terms)),
            metadata={"answer_after": "=", "terms": len(terms)},
        )


def question(terms: Sequence[int]) -> str:
    """The prompt for these terms."""
    return "+".join(map(written, terms)).ljust(PROMPT_TOKENS - 1, ".") + "="


def solution(terms: Sequence[int]) -> str:
    """The response that writes every running sum."""
    return "=".join(written(sum(terms[:n])) for n in range(2, len(terms) + 1))


def draw_terms(rng: random.Random, split: Split, *, uniform: bool = False) -> list[int]:
    """Terms of one random prompt of a split; `uniform` draws their number uniformly (for the warm start)."""
    while True:
        if uniform:
            count = rng.randint(MIN_TERMS, MAX_TERMS)
        else:
            count = MIN_TERMS
            while count < MAX_TERMS and rng.random() < MORE_TERMS:
                count += 1
        terms = [rng.randint(0, LARGEST_TERM) for _ in range(count)]
        if _split_of(question(terms)) == split:
            return terms


def _split_of(text: str) -> Split:
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return "held_out" if digest[0] % HELD_OUT_SHARE == 0 else "train"


def written(number: int) -> str:
    """A number as the task writes it: three digits, units first."""
    return f"{number:0{DIGITS}d}"[::-1]
