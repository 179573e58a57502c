"""Keep signals out of the middle of an exchange with the workers."""

from __future__ import annotations

import signal
import threading

# The same functions without the conversions to enums, which would be most of a shield's cost, several times per rollout
from _signal import getsignal as get_handler  # type: ignore[import-not-found]
from _signal import signal as set_handler
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
"""Those whose handlers, if they are written in Python, may raise: Ctrl-C, a scheduler's notice, a time limit."""


class InterruptShield:
    """Put off the handlers of signals while the block runs; what came in meanwhile is delivered at its end.

    A message that is half read or a request that only half of the workers got cannot be repaired afterwards, so those
    blocks are short and never wait for an environment. Outside of the main thread, where Python never delivers
    signals, it does nothing. It may be nested.
    """

    def __init__(self) -> None:
        self._replaced: dict[int, Any] = {}
        self._pending: list[tuple[Any, int, FrameType | None]] = []
        self._depth = 0

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._depth == 0:
            try:
                self._replace()
            except BaseException:  # of a handler not yet replaced: nothing has begun
                self._restore()
                raise
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth == 0:
            try:
                self._restore()
            finally:
                self._deliver()

    def _replace(self) -> None:
        for number in SIGNALS:
            handler = get_handler(number)
            # Ignored, default, or set from C: there is no Python handler that could interrupt the block
            if callable(handler) and handler != self._remember:
                self._replaced[number] = handler
                set_handler(number, self._remember)

    def _restore(self) -> None:
        if self._replaced:
            number, handler = self._replaced.popitem()
            try:
                set_handler(number, handler)
            finally:  # a handler that is back already may raise
                self._restore()

    def _deliver(self) -> None:
        if self._pending:
            handler, number, frame = self._pending.pop(0)
            try:
                handler(number, frame)
            finally:
                self._deliver()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._pending.append((self._replaced[number], number, frame))


shielded = InterruptShield()
"""The one shield of the process (there is only one main thread)."""
