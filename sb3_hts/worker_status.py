"""What each worker is doing, in shared memory: readable when it can no longer be asked, and written without a message."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from sb3_hts.protocol import Activity
from sb3_hts.shared_arrays import SharedBlock

UNTIMED = (Activity.STARTING, Activity.AWAITING_SNAPSHOT, Activity.AWAITING_OBSERVATION)
"""Activities that no time limit applies to: importing what a worker needs, and waiting for the learner or for executors."""


class WorkerStatus:
    """What each worker is doing: ``(activity, environment index or -1, progress)``, written by that worker alone.

    ``cancelled`` is the one word that the main process writes: the serial number of the latest cancelled rollout.
    """

    def __init__(self, n_workers: int, block: SharedBlock | None = None) -> None:
        self.n_workers = n_workers
        self.block = SharedBlock((3 * n_workers + 1) * 8) if block is None else block
        if block is not None:
            block.release_descriptor()
        # A memoryview, since reading and writing single items is several times faster than with an array
        self._words = self.block.bytes.data.cast("q")
        if block is None:
            self._words[3 * n_workers] = -1
            for worker in range(n_workers):
                self._words[3 * worker + 2] = 0
                self.set(worker, Activity.STARTING, -1)

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerStatus, (self.n_workers, self.block)

    @property
    def cancelled(self) -> int:
        return self._words[3 * self.n_workers]

    @cancelled.setter
    def cancelled(self, rollout: int) -> None:
        self._words[3 * self.n_workers] = rollout

    def set(self, worker: int, activity: Activity, env_index: int = -1) -> None:
        """Say what the worker turns to now, which counts as progress."""
        words, first = self._words, 3 * worker
        words[first] = activity
        words[first + 1] = env_index
        words[first + 2] += 1

    def read(self, worker: int) -> tuple[Activity, int | None, int]:
        activity, env_index, progress = self._words[3 * worker : 3 * worker + 3]
        return Activity(activity), None if env_index < 0 else env_index, progress


class ProgressWatch:
    """Notices workers that make no progress.

    Time is counted in quarters of the limit, so that a halt of the whole program (Ctrl-Z, a debugger) counts as one quarter
    however long it was.

    :param limit: Seconds without progress; ``None``: any time.
    """

    QUARTERS = 4

    def __init__(self, status: WorkerStatus, workers: Iterable[int], limit: float | None) -> None:
        self._status = status
        self._slice = None if limit is None else limit / self.QUARTERS
        self._seen = {worker: (status.read(worker), 0) for worker in workers} if limit is not None else {}
        self._next_look = 0.0 if self._slice is None else time.monotonic() + self._slice

    def poll_timeout(self) -> int | None:
        """Milliseconds until :meth:`first_hung` should be called; ``None``: never."""
        return None if self._slice is None else int(max(0.0, self._next_look - time.monotonic()) * 1000) + 1

    def first_hung(self, workers: Iterable[int]) -> int | None:
        """The first of the workers that has made no progress for the limit."""
        if self._slice is None or time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + self._slice
        for worker in workers:
            (before, quarters), now = self._seen[worker], self._status.read(worker)
            idle = now == before and now[0] not in UNTIMED
            self._seen[worker] = now, quarters + 1 if idle else 0
            if idle and quarters + 1 >= self.QUARTERS:
                return worker
        return None
