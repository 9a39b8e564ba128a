"""One segment file: a header, the payload of one weight version, and a manifest of it.

Invariants:

- a writer holds the exclusive lock, a reader a shared one (`file_lock`);
- the header's version is INCOMPLETE from before the first payload byte changes until after the last one has
  changed, so no reader accepts a segment whose writer was killed in between;
- a segment's size and manifest never change once it has its final name;
- a write iterates over the tensors once, in their own order, and keeps none of them, so they may be produced
  one by one.

::

    0        8         16         24                32              40     a page
    | magic  | version | sequence | manifest offset | manifest size | ...  | payload ... | manifest (JSON)

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
"""Header version of a segment whose payload is incomplete."""

_MAGIC = b"SFWEIGH2"
_HEADER = struct.Struct("<8sqQQQ")
_VERSION_OFFSET = 8
PAYLOAD_OFFSET = mmap.PAGESIZE
"""Bytes from the start of the file."""
_TENSOR_ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every element size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Location and type of one tensor."""

    name: str
    dtype: str
    """numpy's name with byte order, e.g. `<f4`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the payload."""


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """The manifest: all tensors of a model."""

    specs: tuple[TensorSpec, ...]
    payload_bytes: int

    @staticmethod
    def of(tensors: Mapping[str, NDArray[Any]]) -> SegmentLayout:
        """Lay tensors out one after the other. Raises TransportError for types without plain bytes."""
        layout = SegmentLayout((), 0)
        for name, tensor in tensors.items():
            layout = layout.with_tensor(name, tensor)
        return layout

    def with_tensor(self, name: str, tensor: NDArray[Any]) -> SegmentLayout:
        """This layout and one more tensor. Raises TransportError if its type has no plain bytes."""
        if tensor.dtype.kind not in "biufc":
            raise TransportError(
                f"tensor {name!r} has type {tensor.dtype}, which cannot be pushed; push a view of it as a"
                " plain number type of the same size"
            )
        offset = _round_up(self.payload_bytes, _TENSOR_ALIGNMENT)
        spec = TensorSpec(name=name, dtype=tensor.dtype.str, shape=tensor.shape, offset=offset)
        return SegmentLayout((*self.specs, spec), offset + tensor.nbytes)

    @property
    def manifest(self) -> bytes:
        """As stored in the segment."""
        return json.dumps(
            {"payload_bytes": self.payload_bytes, "specs": [asdict(s) for s in self.specs]}
        ).encode()

    @staticmethod
    def from_manifest(manifest: bytes) -> SegmentLayout:
        """Inverse of `manifest`."""
        data = json.loads(manifest)
        specs = (TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in data["specs"])
        return SegmentLayout(tuple(specs), data["payload_bytes"])

    @property
    def file_bytes(self) -> int:
        """Size of a segment file."""
        return self.manifest_offset + len(self.manifest)

    @property
    def manifest_offset(self) -> int:
        """Bytes from the start of the file."""
        return PAYLOAD_OFFSET + _round_up(self.payload_bytes, _TENSOR_ALIGNMENT)

    def difference(self, other: SegmentLayout) -> str:
        """The first tensor in which `other` differs from this layout, for a message; empty if none differs.

        The order does not matter: a segment is written by name.
        """
        mine = {spec.name: (spec.dtype, spec.shape) for spec in self.specs}
        theirs = {spec.name: (spec.dtype, spec.shape) for spec in other.specs}
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                return f"tensor {name!r} was {mine.get(name, 'absent')} and is {theirs.get(name, 'absent')}"
        return ""


class Draft:
    """A segment file that grows tensor by tensor: the first of a run, whose layout is not known in advance.

    Raises OSError (ENOSPC) if memory runs out, to avoid a bus error later.
    """

    def __init__(self, path: Path) -> None:
        """Create the file, replacing one that a writer left unfinished."""
        self.path = path
        self.layout = SegmentLayout((), 0)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def reserve(self, layout: SegmentLayout) -> None:
        """Allocate the memory of a known layout; the payload is written later."""
        self.layout = layout
        os.posix_fallocate(self._descriptor, 0, layout.file_bytes)

    def append(self, name: str, tensor: NDArray[Any]) -> None:
        """Write one tensor after the others."""
        self.layout = self.layout.with_tensor(name, tensor)
        self._write(PAYLOAD_OFFSET + self.layout.specs[-1].offset, np.ascontiguousarray(tensor))

    def finish(self) -> None:
        """Write manifest and header. The version is INCOMPLETE."""
        manifest = np.frombuffer(self.layout.manifest, np.uint8)
        self._write(self.layout.manifest_offset, manifest)
        header = _HEADER.pack(_MAGIC, INCOMPLETE, 0, self.layout.manifest_offset, manifest.nbytes)
        self._write(0, np.frombuffer(header, np.uint8))

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, offset: int, array: NDArray[Any]) -> None:
        left = array.reshape(-1).view(np.uint8).data
        if left.nbytes:
            os.posix_fallocate(self._descriptor, offset, left.nbytes)
        while left.nbytes:  # one call writes at most 2 GB
            written = os.pwrite(self._descriptor, left, offset)
            left, offset = left[written:], offset + written


class WeightSegment:
    """A mapped segment file. The caller must hold the lock."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        """Map an existing segment. Raises OSError, or TransportError if the file is not a segment."""
        self.path = path
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            # Fill the page tables once here, so that no copy pays for first touches.
            self._map = mmap.mmap(
                descriptor,
                0,
                flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
                prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
            )
        finally:
            os.close(descriptor)
        magic, _, _, manifest, manifest_bytes = _HEADER.unpack_from(self._map)
        if magic != _MAGIC:
            raise TransportError(f"{path} is not a weight segment of this version of staleflow")
        self.layout = SegmentLayout.from_manifest(self._map[manifest : manifest + manifest_bytes])
        self.views: dict[str, NDArray[Any]] = {
            spec.name: np.ndarray(spec.shape, np.dtype(spec.dtype), self._map, PAYLOAD_OFFSET + spec.offset)
            for spec in self.layout.specs
        }
        self.payload: NDArray[np.uint8] = np.ndarray(
            self.layout.payload_bytes, np.uint8, self._map, PAYLOAD_OFFSET
        )
        """All tensors as raw bytes, to copy the whole segment."""

    @property
    def version(self) -> int:
        """Version in the header; INCOMPLETE during a write."""
        return int(_HEADER.unpack_from(self._map)[1])

    @property
    def sequence(self) -> int:
        """Number of pushes of the run up to and including this one."""
        return int(_HEADER.unpack_from(self._map)[2])

    def begin(self, sequence: int) -> None:
        """Mark the payload as incomplete before it changes. The exclusive lock must be held."""
        struct.pack_into("<qQ", self._map, _VERSION_OFFSET, INCOMPLETE, sequence)

    def write(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Replace the payload, between `begin` and `commit`.

        Raises TransportError, leaving the payload incomplete, if the tensors do not match the layout.
        """
        missing = {spec.name: (spec.dtype, spec.shape) for spec in self.layout.specs}
        for name, tensor in tensors.items():
            was, new = missing.pop(name, "absent"), (tensor.dtype.str, tensor.shape)
            if was != new:
                raise TransportError(f"tensor {name!r} was {was} and is {new}")
            np.copyto(self.views[name], tensor, casting="no")
        if missing:
            name, was = next(iter(missing.items()))
            raise TransportError(f"tensor {name!r} was {was} and is absent")

    def commit(self, version: int) -> None:
        """Mark the payload as complete, with `version`."""
        struct.pack_into("<q", self._map, _VERSION_OFFSET, version)

    def close(self) -> None:
        """Unmap as soon as no view is in use."""
        self.views, self.payload = {}, np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # leases hold views; the mapping ends with the last of them
            self._map.close()


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
