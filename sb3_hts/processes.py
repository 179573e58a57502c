"""Start processes that do not import the main module.

:mod:`multiprocessing` re-imports the user's script in every spawned or forkserver child, hence its rule of the
``if __name__ == "__main__":`` guard. Our workers get all they need by value, so they must not: the contexts below are
the standard ones with that step left out. The forkserver is a private one, because the standard one is shared with
whoever started it first, and then ignores what we ask it to preload; importing torch once in the server instead of once
per worker is the difference between seconds and a minute.

The server ends with the last :class:`ForkServerLease`, or with the main process.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import context, forkserver, popen_forkserver, popen_spawn_posix, process, reduction, spawn, util
from multiprocessing import resource_tracker as tracker
from typing import Any

START_METHODS = ("forkserver", "spawn", "fork")

PRELOAD = ["sb3_hts.worker", "sb3_hts.actor"]
"""Imports torch, Stable-Baselines3 and Gymnasium too."""


def _main_free_payload(popen: Any, process_obj: Any) -> memoryview:
    """What a child reads first: how to set itself up (never the main module), then the process object."""
    preparation = spawn.get_preparation_data(process_obj._name)
    preparation.pop("init_main_from_name", None)
    preparation.pop("init_main_from_path", None)
    buffer = io.BytesIO()
    context.set_spawning_popen(popen)
    try:
        reduction.dump(preparation, buffer)
        reduction.dump(process_obj, buffer)
    finally:
        context.set_spawning_popen(None)
    return buffer.getbuffer()


class _PrivateForkServer(forkserver.ForkServer):
    """A forkserver of our own that can be stopped."""

    # Of the base class, and unknown to typeshed
    _forkserver_pid: int | None
    _stop: Callable[[], None]

    def __init__(self) -> None:
        super().__init__()
        self.set_forkserver_preload(PRELOAD)
        self._leases = 0
        self._lease_lock = threading.Lock()

    def acquire(self) -> None:
        with self._lease_lock:
            self._leases += 1

    def release(self) -> None:
        with self._lease_lock:
            self._leases -= 1
            if self._leases == 0 and self._forkserver_pid is not None:
                # All its children are gone, and it would only notice once every copy of its pipe is closed, which a
                # process that some environment left behind may hold
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._forkserver_pid, signal.SIGKILL)
                self._stop()


_server = _PrivateForkServer()


class ForkServerLease:
    """Keeps the private forkserver alive; idempotent :meth:`release`."""

    def __init__(self) -> None:
        _server.acquire()
        self._finalizer = util.Finalize(self, _server.release, exitpriority=0)

    def release(self) -> None:
        if self._finalizer.still_active():
            self._finalizer()


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _ForkServerPopen(popen_forkserver.Popen):
    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        payload = _main_free_payload(self, process_obj)
        self.sentinel, writer = _server.connect_to_new_process(self._fds)
        # The child takes the end of this copy as the end of its parent
        keep_alive = os.dup(writer)
        self.finalizer = util.Finalize(self, _close, (keep_alive, self.sentinel))
        with open(writer, "wb") as file:
            file.write(payload)
        self.pid = forkserver.read_signed(self.sentinel)


class _SpawnPopen(popen_spawn_posix.Popen):
    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        tracker_fd = tracker._resource_tracker.getfd()
        assert tracker_fd is not None
        self._fds.append(tracker_fd)
        payload = _main_free_payload(self, process_obj)
        self.sentinel, child_w = os.pipe()
        child_r, writer = os.pipe()
        self.finalizer = util.Finalize(self, _close, (writer, self.sentinel))
        try:
            command = spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=child_r)
            executable = os.fsencode(spawn.get_executable())
            self.pid = util.spawnv_passfds(executable, command, [*self._fds, child_r, child_w])
        finally:
            os.close(child_r)
            os.close(child_w)
        with open(writer, "wb", closefd=False) as file:
            file.write(payload)


class _ForkServerProcess(context.ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> Any:
        return _ForkServerPopen(process_obj)


class _SpawnProcess(context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> Any:
        return _SpawnPopen(process_obj)


_PROCESS_CLASSES: dict[str, type[process.BaseProcess]] = {
    "forkserver": _ForkServerProcess,
    "spawn": _SpawnProcess,
    "fork": context.ForkProcess,
}


def resolve_start_method(start_method: str | None) -> str:
    """Validate a start method, or choose the default.

    :param start_method: ``"forkserver"``, ``"spawn"``, ``"fork"`` or ``None``: forkserver where it exists, else spawn.
    :raises OSError: On Windows.
    :raises ValueError: If the method is unknown or does not exist on this platform.
    """
    if sys.platform == "win32":
        raise OSError("HTSVecEnv needs Linux or macOS: its workers get shared memory by file descriptor; use WSL on Windows.")
    available = [method for method in START_METHODS if method in multiprocessing.get_all_start_methods()]
    if start_method is None:
        return available[0]
    if start_method not in available:
        raise ValueError(f"start_method must be one of {available}, not {start_method!r}.")
    return start_method


def make_process(start_method: str, **kwargs: Any) -> process.BaseProcess:
    """Make a process object of a resolved start method, not yet started.

    :param start_method: Result of :func:`resolve_start_method`.
    :param kwargs: As for :class:`multiprocessing.Process`.
    """
    return _PROCESS_CLASSES[start_method](**kwargs)
