"""One segment file: a header, a manifest and the payload of one weight version.

Invariants:

- whoever writes holds the exclusive lock, whoever reads holds a shared one (`file_lock`);
- the header's version is INCOMPLETE from before the first byte of payload changes until after the last one
  has, so that a writer killed in between leaves a segment that no reader takes;
- a segment's size and manifest never change once it has its final name.

::

    0        8         16         24              32
    | magic  | version | sequence | manifest size | manifest (JSON) ... | padding to a page | payload ...

The payload holds each tensor at its own aligned offset, in the order of the manifest.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.errors import TransportError

INCOMPLETE = -1
"""Header version of a segment whose payload is not whole."""

_MAGIC = b"SFWEIGH1"
_HEADER = struct.Struct("<8sqQQ")
_VERSION_OFFSET = 8
_TENSOR_ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every element size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Where one tensor lies."""

    name: str
    dtype: str
    """numpy's name with byte order, e.g. `<f4`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the payload."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The manifest: all tensors of a model."""

    specs: tuple[TensorSpec, ...]
    payload_bytes: int

    @staticmethod
    def of(tensors: Mapping[str, NDArray[Any]]) -> Layout:
        """Lay tensors out one after the other. Raises TransportError for types that have no plain bytes."""
        specs, end = [], 0
        for name, tensor in tensors.items():
            if tensor.dtype.kind not in "biufc":
                raise TransportError(
                    f"tensor {name!r} has type {tensor.dtype}, which cannot be pushed; push a view of it as a"
                    " plain number type of the same size"
                )
            offset = _round_up(end, _TENSOR_ALIGNMENT)
            specs.append(TensorSpec(name=name, dtype=tensor.dtype.str, shape=tensor.shape, offset=offset))
            end = offset + tensor.nbytes
        return Layout(tuple(specs), end)

    @property
    def manifest(self) -> bytes:
        """As stored in the segment."""
        return json.dumps(
            {"payload_bytes": self.payload_bytes, "specs": [asdict(s) for s in self.specs]}
        ).encode()

    @staticmethod
    def from_manifest(manifest: bytes) -> Layout:
        """Inverse of `manifest`."""
        data = json.loads(manifest)
        specs = (TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in data["specs"])
        return Layout(tuple(specs), data["payload_bytes"])

    @property
    def payload_offset(self) -> int:
        """Bytes from the start of the file to the payload; a whole number of pages."""
        return _round_up(_HEADER.size + len(self.manifest), mmap.PAGESIZE)

    @property
    def file_bytes(self) -> int:
        """Size of a segment file."""
        return self.payload_offset + self.payload_bytes

    def difference(self, other: Layout) -> str:
        """A tensor in which `other` is not like this layout, for a message; empty if all are alike.

        The order does not matter: a segment is written by name, in the order of its own layout.
        """
        mine = {spec.name: (spec.dtype, spec.shape) for spec in self.specs}
        theirs = {spec.name: (spec.dtype, spec.shape) for spec in other.specs}
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                return f"tensor {name!r} was {mine.get(name, 'absent')} and is {theirs.get(name, 'absent')}"
        return ""


def allocate(path: Path, layout: Layout) -> None:
    """Create a segment file with all its memory. Raises OSError (ENOSPC) instead of a bus error later."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, layout.file_bytes)
        manifest = layout.manifest
        os.pwrite(descriptor, _HEADER.pack(_MAGIC, INCOMPLETE, 0, len(manifest)) + manifest, 0)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


class Segment:
    """A mapped segment file. The caller holds the lock that its use needs."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        """Map an existing segment. Raises OSError, or TransportError when it is no segment."""
        self.path = path
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            # Page tables are filled here once, so that no copy pays for first touches.
            self._map = mmap.mmap(
                descriptor,
                0,
                flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
                prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
            )
        finally:
            os.close(descriptor)
        magic, _, _, manifest_bytes = _HEADER.unpack_from(self._map)
        if magic != _MAGIC:
            raise TransportError(f"{path} is not a weight segment of this version of staleflow")
        self.layout = Layout.from_manifest(self._map[_HEADER.size : _HEADER.size + manifest_bytes])
        start = self.layout.payload_offset
        self.views: dict[str, NDArray[Any]] = {
            spec.name: np.ndarray(spec.shape, np.dtype(spec.dtype), self._map, start + spec.offset)
            for spec in self.layout.specs
        }

    @property
    def version(self) -> int:
        """Version in the header, INCOMPLETE while being written."""
        return int(_HEADER.unpack_from(self._map)[1])

    @property
    def sequence(self) -> int:
        """How many pushes the run had seen with this one."""
        return int(_HEADER.unpack_from(self._map)[2])

    def write(self, version: int, sequence: int, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Replace the payload. The exclusive lock must be held."""
        struct.pack_into("<qQ", self._map, _VERSION_OFFSET, INCOMPLETE, sequence)
        for name, view in self.views.items():
            np.copyto(view, tensors[name], casting="no")
        struct.pack_into("<q", self._map, _VERSION_OFFSET, version)

    def close(self) -> None:
        """Unmap as soon as no view is used any more."""
        self.views = {}
        with contextlib.suppress(BufferError):  # a lease shows views; the mapping goes with the last of them
            self._map.close()


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
