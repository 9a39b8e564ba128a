"""The torch engine: continuous batching of a Hugging Face causal language model in this process.

Invariants:

- between steps the KV cache of a running trajectory covers all its tokens but the last; a decode step feeds
  the last one, whatever the length of each row, and draws the next;
- trajectories share no cache: every prefill after a pull uses the new weights. `recompute` rebuilds the KV of
  the running trajectories at once; `keep_kv` leaves it. A preempted trajectory has no KV to keep and is
  rebuilt under the weights loaded when it returns;
- a token's random number depends on (seed, trajectory id, position) alone. Up to rounding (about 1e-6) the
  logits do not depend on the rest of the batch. So tokens do not either, unless a draw falls within rounding
  of the border between two tokens.

The engine owns the model: it swaps weights in place, so no other code may train or read it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from staleflow.errors import EngineError
from staleflow.rollout.batching import BatchingEngine
from staleflow.rollout.engine import OnPull, SamplingParams
from staleflow.rollout.randomness import trajectory_key, uniforms
from staleflow.rollout.scheduler import Generation
from staleflow.rollout.torch.kv_cache import RowCache
from staleflow.rollout.torch.sampling import sample
from staleflow.rollout.torch.weights import copy_into

PREFILL_CHUNK_TOKENS = 2048
"""Tokens of one prefill pass, padding included: enough to keep a CPU or GPU busy, with bounded memory."""


class TorchEngine(BatchingEngine):
    """Engine around `model`, a transformers causal LM with full attention in every layer.

    `kv_capacity_tokens` limits the tokens of all running trajectories together, `max_running` their number,
    `prefill_chunk_tokens` the tokens of one prefill pass. `max_model_len` is lowered to the model's own
    `max_position_embeddings`. Raises EngineError for a model that it would decode incorrectly.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        sampling: SamplingParams,
        seed: int,
        kv_capacity_tokens: int,
        max_running: int,
        version: int = 0,
        prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    ) -> None:
        self._model: Any = model.eval()
        super().__init__(
            sampling=_checked(self._model, sampling),
            kv_capacity_tokens=kv_capacity_tokens,
            max_running=max_running,
            version=version,
        )
        self._seed = seed
        self._prefill_chunk = prefill_chunk_tokens
        parameter = next(model.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._cache = RowCache(self._device)
        self._keys: dict[str, int] = {}

    def load_weights(self, tensors: Mapping[str, NDArray[Any]], version: int, on_pull: OnPull) -> None:
        """Swap weights in place; running trajectories stay, their KV rebuilt or kept according to `on_pull`.

        Raises EngineError, keeping the old weights and version, if names, shapes or types do not match.
        """
        self._check_open()
        copy_into(self._model, tensors)
        self._version = version
        if on_pull == "recompute":
            with torch.inference_mode():
                self._prefill(self._scheduler.running)

    def close(self) -> None:
        """Free the model and the cache; may be called twice."""
        super().close()
        self._model = None
        self._cache = RowCache(self._device)

    def _enter(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            self._keys[generation.trajectory_id] = trajectory_key(self._seed, generation.trajectory_id)
        with torch.inference_mode():
            self._cache.join(g.trajectory_id for g in generations)
            self._prefill(generations)

    def _leave(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            del self._keys[generation.trajectory_id]
        with torch.inference_mode():
            self._cache.leave(g.trajectory_id for g in generations)

    def _decode(self, running: Sequence[Generation]) -> Iterable[tuple[Generation, int, float]]:
        by_row = sorted(running, key=lambda g: self._cache.row(g.trajectory_id))
        keys = np.array([self._keys[g.trajectory_id] for g in by_row], dtype=np.uint64)
        positions = np.array([g.position for g in by_row])
        with torch.inference_mode():
            inputs = torch.tensor([g.tokens[-1:] for g in by_row], device=self._device)
            columns = self._cache.aim(range(len(by_row)), [g.length - 1 for g in by_row], [1] * len(by_row))
            logits = self._forward(self._model, inputs, columns).logits
            greedy = [g.greedy for g in by_row]
            tokens, log_probs = sample(logits[:, -1], uniforms(keys, positions), self._sampling, greedy)
        return zip(by_row, tokens, log_probs, strict=True)

    def _prefill(self, generations: Sequence[Generation]) -> None:
        """Compute the KV of all tokens but the last, in passes of at most `prefill_chunk_tokens`."""
        for batch in self._batches([g for g in generations if g.length > 1]):
            rows = [self._cache.row(g.trajectory_id) for g in batch]
            longest = batch[-1].length - 1
            # Only a trajectory alone in its batch can be longer than one pass.
            for start in range(0, longest, self._prefill_chunk):
                ends = [min(g.length - 1, start + self._prefill_chunk) for g in batch]
                columns = self._cache.aim(rows, [start] * len(batch), [end - start for end in ends])
                inputs = np.zeros(tuple(columns.shape), dtype=np.int64)
                for i, (generation, end) in enumerate(zip(batch, ends, strict=True)):
                    inputs[i, : end - start] = generation.tokens[start:end]
                # Skip the head: the logits of a prompt are not needed.
                self._forward(self._model.base_model, torch.from_numpy(inputs).to(self._device), columns)

    def _batches(self, generations: Sequence[Generation]) -> Iterator[list[Generation]]:
        """Batches of similar length, each ascending, that fit one prefill pass padded to the longest."""
        batch: list[Generation] = []
        for generation in sorted(generations, key=lambda g: g.length):
            if batch and (len(batch) + 1) * (generation.length - 1) > self._prefill_chunk:
                yield batch
                batch = []
            batch.append(generation)
        if batch:
            yield batch

    def _forward(self, model: Any, inputs: torch.Tensor, columns: torch.Tensor) -> Any:
        """One pass over tokens, shape (rows, q), which the cache stores at `columns` (see `RowCache.aim`)."""
        hidden = torch.arange(self._cache.width, device=self._device) > columns.unsqueeze(-1)
        # Additive, because every attention implementation interprets that form in the same way.
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        mask = mask.masked_fill_(hidden, torch.finfo(self._dtype).min).unsqueeze(1)
        return model(
            input_ids=inputs,
            attention_mask=mask,
            position_ids=columns,  # a token's column is its position
            past_key_values=self._cache,
            use_cache=True,
            return_dict=True,
        )


def _checked(model: Any, sampling: SamplingParams) -> SamplingParams:
    """The sampling parameters with `max_model_len` lowered to the model's number of positions."""
    config = model.config
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise EngineError("the torch engine needs a model whose forward takes position_ids")
    positions = getattr(config, "max_position_embeddings", None) or sampling.max_model_len
    length = min(sampling.max_model_len, positions)
    # The explicit mask would silently give sliding-window layers full attention.
    window = getattr(config, "sliding_window", None)
    if window is not None and window < length:
        raise EngineError(f"the model attends to {window} tokens only; set max_model_len to {window} or less")
    unlike = sorted(set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"})
    if unlike:
        raise EngineError(f"the torch engine needs full attention only; this model has {', '.join(unlike)}")
    return replace(sampling, max_model_len=length)
