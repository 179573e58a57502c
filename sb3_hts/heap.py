"""Keeps freed memory with the process while it trains.

glibc gives blocks of many megabytes back to the system as soon as they are freed, and the top of its heap as soon as it
exceeds a limit. The activations and gradients of a convolutional network are such blocks: they come and go with each
minibatch, and the system must hand out, and clear, the same pages again and again. That can be a quarter of ``train()``.
No number changes by where it lies, as torch aligns all of its blocks.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

# Of glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_KEEPING = 2**30
"""Bytes per block, and at the top of the heap, up to which memory is kept."""

_MMAP_DEFAULT, _TRIM_DEFAULT = 2**25, 2**26
"""The most that glibc's own, dynamic thresholds grow to; with large blocks around, they have."""


@contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Within the block, memory that is freed stays with the process; at its end it goes back to the system.

    Does nothing without glibc, and where the user has tuned malloc by the environment.
    """
    libc = ctypes.CDLL(None)
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(name.startswith("MALLOC_") for name in os.environ)
    if tuned or not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _KEEPING)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEEPING)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_DEFAULT)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_DEFAULT)
        libc.malloc_trim(0)
