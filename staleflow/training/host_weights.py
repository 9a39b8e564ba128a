"""A trainer's weights as host arrays, converted one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


class HostWeights(Mapping[str, NDArray[Any]]):
    """float32 arrays by state-dict name, each created on access.

    A float32 tensor on a CPU gives a view, any other tensor a copy.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> NDArray[Any]:
        return host_array(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class GatheredWeights(Mapping[str, NDArray[Any]]):
    """float32 arrays by name, sharded over processes.

    Iterating over the items gathers them one after the other, in order; access by name gathers only that one.
    """

    def __init__(
        self, names: Sequence[str], gather: Callable[[Sequence[str]], Iterator[tuple[str, Tensor]]]
    ) -> None:
        """`gather(names)` yields each of them, whole, in order."""
        self._names = tuple(names)
        self._gather = gather

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._names:
            raise KeyError(name)
        return next(host_array(tensor) for _, tensor in self._gather((name,)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def items(self) -> Any:
        """Pairs of name and array, gathered one by one."""
        return ((name, host_array(tensor)) for name, tensor in self._gather(self._names))

    def values(self) -> Any:
        """Arrays, gathered one by one."""
        return (array for _, array in self.items())


def host_array(tensor: Tensor) -> NDArray[Any]:
    """float32 on the CPU."""
    array: NDArray[Any] = tensor.detach().to(device="cpu", dtype=torch.float32).numpy()
    return array
