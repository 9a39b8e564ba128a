"""Sends pieces of weights by Ray's direct transport (NIXL): from memory to memory, without the object store.

NIXL is one-sided: the receiver reads the sender's registered memory, so a failure on one side does not affect
the other. The collective transports (NCCL, GLOO) are not used because Ray kills both ends of a collective
that breaks, and the sender serves all the other nodes.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

TRANSPORT = "nixl"


class Direct:
    """Availability of the direct transport."""

    def installed(self) -> bool:
        """Whether the library is installed."""
        return importlib.util.find_spec(TRANSPORT) is not None

    def works(self) -> bool:
        """Whether an agent starts in this process, an actor made with `enable_tensor_transport`."""
        from ray.experimental.rdt.nixl_tensor_transport import _nixl_transport_available_in_process

        return self.installed() and bool(_nixl_transport_available_in_process())


DIRECT = Direct()


def put_piece(piece: NDArray[np.uint8], *, direct: bool) -> Any:
    """Ray reference to a copy of a piece."""
    if not direct:
        return ray.put(piece)
    import torch

    # Copy: NIXL must be able to register the memory it reads, and the memory must outlive the lease.
    return ray.put(torch.from_numpy(np.array(piece)), _tensor_transport=TRANSPORT)


def as_array(piece: Any) -> NDArray[np.uint8]:
    """The result of `ray.get` on such a reference, as an array."""
    array: NDArray[np.uint8] = piece if isinstance(piece, np.ndarray) else piece.numpy()
    return array
