"""Keep Ctrl-C out of the middle of an exchange with the workers."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class InterruptShield:
    """Put off SIGINT while the block runs; what came in meanwhile is delivered at its end.

    A message that is half read or a request that only half of the workers got cannot be repaired afterwards, so those
    blocks are short and never wait for an environment. Outside of the main thread, where Python never delivers
    signals, it does nothing. It may be nested.
    """

    def __init__(self) -> None:
        self._previous: Any = None
        self._pending: tuple[int, FrameType | None] | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._depth == 0:
            handler = signal.getsignal(signal.SIGINT)
            # Ignored, default, or set from C: there is no Python handler that could interrupt the block
            if callable(handler) and handler != self._remember:
                self._previous = handler
                signal.signal(signal.SIGINT, self._remember)
        # Only now: an interrupt before this line raises with nothing changed, after it none does
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth or self._previous is None:
            return
        previous, self._previous = self._previous, None
        signal.signal(signal.SIGINT, previous)
        pending, self._pending = self._pending, None
        if pending is not None:
            previous(*pending)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._pending = (number, frame)


shielded = InterruptShield()
"""The one shield of the process (there is only one main thread)."""
