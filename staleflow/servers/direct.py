"""Pieces of weights by Ray's direct transport (NIXL), from memory to memory, past Ray's object store.

NIXL is one-sided: the receiver reads the sender's registered memory, so what breaks on one side leaves the
other alone. That is why it is taken, and not the collective transports (NCCL, GLOO): Ray kills both ends of a
collective that breaks, and the sender serves all the other nodes.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

TRANSPORT = "nixl"


class Direct:
    """Whether, and how, the direct transport works here."""

    def installed(self) -> bool:
        """The library is there; without it nothing else is asked."""
        return importlib.util.find_spec(TRANSPORT) is not None

    def works(self) -> bool:
        """An agent starts in this process, which is an actor made with `enable_tensor_transport`."""
        from ray.experimental.rdt.nixl_tensor_transport import _nixl_transport_available_in_process

        return self.installed() and bool(_nixl_transport_available_in_process())


DIRECT = Direct()


def put_piece(piece: NDArray[np.uint8], *, direct: bool) -> Any:
    """A reference to a copy of a piece."""
    if not direct:
        return ray.put(piece)
    import torch

    # A copy: what NIXL reads must be memory that it may register, and must outlive the lease.
    return ray.put(torch.from_numpy(np.array(piece)), _tensor_transport=TRANSPORT)


def as_array(piece: Any) -> NDArray[np.uint8]:
    """What `ray.get` of such a reference gave."""
    array: NDArray[np.uint8] = piece if isinstance(piece, np.ndarray) else piece.numpy()
    return array
