"""The exceptions of this package, in one tree.

::

    HTSError (RuntimeError)
    ├── ProtocolError         a call that does not fit the object's phase (a bug of the caller)
    ├── ClosedError           a call on something that has been closed
    └── WorkerError           a worker process failed; knows the worker, the environment and what was being done
        ├── WorkerRaised      an environment (or the policy) raised an exception
        ├── WorkerDied        the process ended: exit, signal, out of memory
        └── WorkerTimeout     no progress within ``step_timeout``

The exception that an environment raised in a worker is the ``__cause__`` of :class:`WorkerRaised`; the worker's traceback
is part of the message.
"""

from __future__ import annotations

import signal


class HTSError(RuntimeError):
    """Base class of everything that this package raises on its own account."""


class ProtocolError(HTSError):
    """A call that is not possible in the current phase, e.g. ``step_wait()`` without ``step_async()``."""


class ClosedError(HTSError):
    """The environments have been closed, or were shut down after an earlier failure."""


class WorkerError(HTSError):
    """A worker process failed.

    :param message: One sentence: which environment, what it was doing, what happened.
    :param worker: Index of the worker process.
    :param env_index: Index of the environment that the worker was busy with, ``None`` if none.
    """

    # Pickle makes exceptions of their message alone, and adds the attributes afterwards
    def __init__(self, message: str, worker: int = -1, env_index: int | None = None) -> None:
        super().__init__(message)
        self.worker = worker
        self.env_index = env_index


class WorkerRaised(WorkerError):
    """An exception was raised inside a worker; ``__cause__`` is that exception."""


class WorkerDied(WorkerError):
    """A worker process ended by itself; ``exit_code`` as in :attr:`multiprocessing.Process.exitcode`."""

    def __init__(self, message: str, worker: int = -1, env_index: int | None = None, exit_code: int | None = None) -> None:
        super().__init__(message, worker, env_index)
        self.exit_code = exit_code


class WorkerTimeout(WorkerError):
    """A worker made no progress within ``step_timeout`` seconds."""


class RemoteTraceback(Exception):
    """The traceback of an exception that was raised in another process, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def describe_exit(exit_code: int | None) -> str:
    """Say in words how a process ended, e.g. ``"killed by SIGKILL"``.

    :param exit_code: Exit code; negative for a signal, ``None`` if unknown.
    """
    if exit_code is None:
        return "ended with an unknown exit code"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
