"""Shared memory without names: nothing to unlink, nothing to leak.

A :class:`SharedBlock` is an anonymous file that processes map. It exists as long as somebody holds its descriptor or a
mapping, and the kernel frees it whatever way the last of them ends. It reaches other processes by its descriptor only:
with the arguments of a new process, or through a pipe (:meth:`SharedBlock.send` / :meth:`SharedBlock.receive`).
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64
"""Every array starts on a cache line: less false sharing, and the same vector instructions wherever it lies."""

POISON: int | None = None
"""Byte that fresh memory is filled with instead of zero; set by tests, so that a cell nobody wrote shows."""

Array = npt.NDArray[Any]


def aligned(nbytes: int) -> int:
    """Round up to a multiple of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def empty_aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Like :func:`numpy.empty`, starting on a multiple of :data:`ALIGNMENT`."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class SharedBlock:
    """A piece of anonymous memory that several processes map.

    :param nbytes: Size in bytes.
    """

    def __init__(self, nbytes: int) -> None:
        fd = _anonymous_file()
        os.ftruncate(fd, max(nbytes, 1))
        self._adopt(fd, nbytes)
        if POISON is not None:
            self.bytes[:] = POISON

    def _adopt(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        # Also on the way out of an error, where nobody releases it
        self._close_descriptor = weakref.finalize(self, os.close, fd)
        self.nbytes = nbytes
        # numpy keeps the mapping alive for as long as any array over it exists
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, max(nbytes, 1)), dtype=np.uint8)

    @classmethod
    def _attach(cls, handle: Any, nbytes: int) -> SharedBlock:
        block = cls.__new__(cls)
        block._adopt(handle.detach(), nbytes)
        return block

    def __reduce__(self) -> tuple[Any, ...]:
        # Only valid among the arguments of a process that is being started
        return SharedBlock._attach, (reduction.DupFd(self._fd), self.nbytes)

    def send(self, connection: Connection, pid: int) -> None:
        """Pass the block to the process at the other end of a pipe."""
        reduction.send_handle(connection, self._fd, pid)

    @classmethod
    def receive(cls, connection: Connection, nbytes: int) -> SharedBlock:
        """Counterpart of :meth:`send`."""
        block = cls.__new__(cls)
        block._adopt(reduction.recv_handle(connection), nbytes)
        return block

    def release_descriptor(self) -> None:
        """Close the descriptor once nobody else needs it; the mapping stays."""
        self._close_descriptor()
        self._fd = -1


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sb3_hts", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # unlinked before anybody can see it
        return os.dup(file.fileno())


def block_nbytes(specs: Mapping[Any, ArraySpec]) -> int:
    """Size of a block that holds all the given arrays."""
    return sum(aligned(spec.nbytes) for spec in specs.values())


def carve(memory: npt.NDArray[np.uint8], specs: Mapping[Any, ArraySpec]) -> dict[Hashable, Array]:
    """Lay arrays over a piece of memory, one after the other, each aligned.

    :param memory: At least :func:`block_nbytes` bytes.
    :param specs: The arrays; the order is part of the layout.
    :return: The arrays under the keys of ``specs``.
    """
    arrays: dict[Hashable, Array] = {}
    offset = 0
    for key, spec in specs.items():
        arrays[key] = memory[offset : offset + spec.nbytes].view(spec.dtype).reshape(spec.shape)
        offset += aligned(spec.nbytes)
    return arrays
