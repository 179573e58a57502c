"""Wake-ups between processes: numbers that one side puts into a pipe and another takes out.

A token says that a certain row of shared memory is somebody else's from now on; what it refers to lies there, so four bytes
are all that travels. Tokens are written and read in single system calls of a multiple of their size, which pipes do not
divide, so several processes may put and several take. A taker that finds nothing spins shortly, since the answer to a
forward of a small network comes sooner than a sleeping process can be woken, and sleeps then.
"""

from __future__ import annotations

import os
import select
import struct
import time
import weakref
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection

SPIN = 50e-6
"""Seconds to look for tokens before going to sleep: about what it costs to be woken."""

_TOKEN = struct.Struct("<i")
_MOST = select.PIPE_BUF // _TOKEN.size

_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


class TokenQueue:
    """A queue of small numbers; each process that has its descriptors makes its own object.

    There is room for many thousand; whoever puts more than are taken would wait.
    """

    def __init__(self, descriptors: tuple[int, int] | None = None) -> None:
        self._reader, self._writer = os.pipe() if descriptors is None else descriptors
        os.set_blocking(self._reader, False)
        # Also on the way out of an error
        self.close = weakref.finalize(self, _close, self._reader, self._writer)

    def put(self, number: int) -> None:
        """Wake one of those who wait."""
        os.write(self._writer, _TOKEN.pack(number))

    def take(self, most: int = _MOST, beside: Connection | None = None) -> list[int]:
        """Wait for tokens, and take what is there; in the order in which they were put.

        :param most: How many to take at the most.
        :param beside: What else to wait for.
        :return: Nothing, if there is something to be read from ``beside`` only.
        """
        deadline = time.perf_counter() + SPIN
        while True:
            try:
                data = os.read(self._reader, min(most, _MOST) * _TOKEN.size)
            except BlockingIOError:
                data = b""
            if data:
                return [number for (number,) in _TOKEN.iter_unpack(data)]
            if time.perf_counter() < deadline:
                _yield_core()
            elif self._sleep(beside):
                return []

    def _sleep(self, beside: Connection | None) -> bool:
        """Sleep until there is anything; whether it is in ``beside``."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        if beside is not None:
            poll.register(beside.fileno(), select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll()}
        return self._reader not in ready

    def send(self, connection: Connection, pid: int) -> None:
        """Pass the queue to the process at the other end of a pipe."""
        for descriptor in (self._reader, self._writer):
            reduction.send_handle(connection, descriptor, pid)

    @classmethod
    def receive(cls, connection: Connection) -> TokenQueue:
        """Counterpart of :meth:`send`."""
        reader = reduction.recv_handle(connection)
        return cls((reader, reduction.recv_handle(connection)))


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
