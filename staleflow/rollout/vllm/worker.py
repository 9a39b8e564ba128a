"""Extension of vLLM's workers: each loads new weights itself, from the parameter server's storage.

Invariant: all workers first lease a version, which may fail without harm, and then load it, which must not
fail. vLLM shards the weights: every worker reads all tensors and keeps its part.

Tied embeddings are passed under both names: vLLM's CPU kernels keep a packed copy of the head, which would
stay old after an update under one name alone (log-probs off by 0.5).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from staleflow.errors import TransportError
from staleflow.rollout.vllm.heads import Widening
from staleflow.rollout.vllm.messages import WeightsAt
from staleflow.servers.transport import Handle, Lease, Subscriber

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class WeightLoading:
    """Mixed into vLLM's worker class (`worker_extension_cls`); called through its `collective_rpc`."""

    reload_weights: Callable[..., None]  # the worker's own, which sets vLLM's current config around it
    _staleflow_leased: Lease | Mapping[str, NDArray[Any]] | None
    _staleflow_subscriber: tuple[Handle, Subscriber] | None

    def staleflow_lease(self, at: WeightsAt) -> str:
        """Pin the version; returns the reason if that fails, else an empty string."""
        try:
            if at.handle is None:
                from safetensors.numpy import load_file

                self._staleflow_leased = load_file(str(at.file))
                return ""
            known = getattr(self, "_staleflow_subscriber", None)
            if known is None or known[0] != at.handle:
                known = self._staleflow_subscriber = (at.handle, at.handle.subscriber())
            self._staleflow_leased = known[1].lease(at.version)
        except (TransportError, OSError) as failure:
            self._staleflow_leased = None
            return str(failure)
        return ""

    def staleflow_load(self, widen: Widening | None, tied: bool) -> None:
        """Load the leased weights and release the lease."""
        leased = self._staleflow_leased
        assert leased is not None
        tensors = leased if isinstance(leased, Mapping) else leased.tensors
        try:
            self.reload_weights(weights_iterator=_weights(tensors, widen, tied))
        finally:
            del tensors
            self.staleflow_release()

    def staleflow_release(self) -> None:
        """Release the lease, if any."""
        leased, self._staleflow_leased = self._staleflow_leased, None
        if leased is not None and not isinstance(leased, Mapping):
            leased.release()


def _weights(
    tensors: Mapping[str, NDArray[Any]], widen: Widening | None, tied: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, array in tensors.items():
        yield name, _as_tensor(array if widen is None else widen(name, array))
    if tied and HEAD not in tensors and EMBEDDING in tensors:
        yield HEAD, _as_tensor(tensors[EMBEDDING])


def _as_tensor(array: NDArray[Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # leases are read-only, and this code does not write
        tensor = torch.from_numpy(array)
    # numpy has no bfloat16: it is passed as an integer type of the same size.
    return tensor.view(torch.bfloat16) if array.dtype.kind in "iu" and array.itemsize == 2 else tensor
