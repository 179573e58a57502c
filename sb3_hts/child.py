"""What all child processes have in common: how they begin, how they end, and how they say what went wrong."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from multiprocessing.connection import wait
from typing import Any

import torch as th

from sb3_hts.protocol import Failed
from sb3_hts.serialization import dumps
from sb3_hts.worker_status import WorkerStatus


def settle_in() -> None:
    """To be called first: no interrupts, an end together with the main process, one thread for torch."""
    # Ctrl-C reaches the whole process group; what happens then is for the main process to decide. Not SIG_IGN: programs
    # that an environment starts would inherit it, and some are to be ended by an interrupt
    signal.signal(signal.SIGINT, _ignore)
    threading.Thread(target=_exit_with_main_process, daemon=True).start()
    # One process, one core: OpenMP teams of many processes only fight, and thread counts change floating-point results
    th.set_num_threads(1)


def ignore_interrupts() -> None:
    """Once more, if a library has put Python's own handler back."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _ignore)


def _ignore(*_: Any) -> None:
    pass


def _exit_with_main_process() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def describe(error: BaseException, status: WorkerStatus, worker: int) -> Failed:
    """What the main process is told of an exception; to be called while it is being handled."""
    activity, env_index, _ = status.read(worker)
    try:
        exception = dumps(error)
    except Exception:
        exception = None
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    return Failed(env_index, activity, exception, summary, traceback.format_exc().rstrip())
