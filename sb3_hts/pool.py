"""A fixed set of worker processes, one pipe each. Knows nothing of environments or policies.

Requests go out to all workers, then replies are taken in worker order. Whoever waits for a reply watches the process as
well as the pipe, so a worker that ends without a word is noticed at once; with a deadline also one that makes no
progress. Any failure shuts the whole pool down before it is reported: a pool is either whole or gone.

Each worker has three numbers in shared memory (:class:`WorkerStatus`), which say what it was doing even when it can no
longer be asked.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe, process, util
from multiprocessing.connection import Connection
from typing import Any

from sb3_hts.errors import RemoteTraceback, WorkerDied, WorkerError, WorkerRaised, WorkerTimeout, describe_exit
from sb3_hts.interrupts import shielded
from sb3_hts.processes import ForkServerLease, make_process
from sb3_hts.protocol import Activity, Close, Failed
from sb3_hts.serialization import loads
from sb3_hts.shared_arrays import SharedBlock

CLOSE_TIMEOUT = 5.0
"""Seconds that environments get to close in before their worker is killed."""


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
                self.set(worker, Activity.STARTING, -1)
                self._words[3 * worker + 2] = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerStatus, (self.n_workers, self.block)

    @property
    def cancelled(self) -> int:
        return self._words[3 * self.n_workers]

    @cancelled.setter
    def cancelled(self, rollout: int) -> None:
        self._words[3 * self.n_workers] = rollout

    def set(self, worker: int, activity: Activity, env_index: int = -1) -> None:
        self._words[3 * worker] = activity
        self._words[3 * worker + 1] = env_index

    def advance(self, worker: int) -> None:
        """Count one unit of progress."""
        self._words[3 * worker + 2] += 1

    def read(self, worker: int) -> tuple[Activity, int | None, int]:
        activity, env_index, progress = self._words[3 * worker : 3 * worker + 3]
        return Activity(activity), None if env_index < 0 else env_index, progress


class WorkerPool:
    """Start the workers and talk to them.

    :param start_method: A resolved start method.
    :param target: Runs in each child as ``target(worker, connection, status, *args)``.
    :param args_per_worker: Further arguments, one tuple per worker.
    :param timeout: Seconds without progress after which a worker counts as hung; ``None``: never.
    """

    def __init__(
        self,
        start_method: str,
        target: Callable[..., None],
        args_per_worker: Sequence[tuple[Any, ...]],
        timeout: float | None = None,
    ) -> None:
        self.n_workers = len(args_per_worker)
        self.timeout = timeout
        self.status = WorkerStatus(self.n_workers)
        # Each worker begins with a reply: whether it could set itself up
        self._pending = [1] * self.n_workers
        self._connections: list[Connection] = []
        self._processes: list[process.BaseProcess] = []
        self._polls: list[select.poll] = []
        self._lease = ForkServerLease() if start_method == "forkserver" else None
        self._finalizer = util.Finalize(self, _shut_down, (self._processes, self._connections, self._lease), exitpriority=10)
        try:
            with shielded:
                for worker, args in enumerate(args_per_worker):
                    self._start(start_method, target, worker, args)
            self.status.block.release_descriptor()
        except BaseException:
            self.kill()
            raise

    def _start(self, start_method: str, target: Callable[..., None], worker: int, args: tuple[Any, ...]) -> None:
        # One pipe at a time, and the child's end closed at once: otherwise the next child inherits it under "fork",
        # and keeps the pipe open after this child's death
        ours, theirs = Pipe(duplex=True)
        self._connections.append(ours)
        try:
            child = make_process(
                start_method,
                target=target,
                args=(worker, theirs, self.status, *args),
                name=f"sb3-hts-worker-{worker}",
            )
            child.start()
        finally:
            theirs.close()
        self._processes.append(child)
        poll = select.poll()
        poll.register(ours.fileno(), select.POLLIN)
        poll.register(child.sentinel, select.POLLIN)
        self._polls.append(poll)

    @property
    def pids(self) -> list[int]:
        """Process ids, in worker order."""
        return [child.pid or -1 for child in self._processes]

    def send(self, worker: int, request: object, *blocks: SharedBlock) -> None:
        """Send a request, which will be answered by one reply.

        :param blocks: Shared memory that goes with it.
        """
        self.notify(worker, request, *blocks)
        self._pending[worker] += 1

    def notify(self, worker: int, notice: object, *blocks: SharedBlock) -> None:
        """Send a message that has no reply."""
        connection = self._connections[worker]
        with shielded:
            try:
                connection.send_bytes(pickle.dumps(notice, protocol=pickle.HIGHEST_PROTOCOL))
                for block in blocks:
                    block.send(connection, self.pids[worker])
            except OSError:
                # The worker is gone; why is in its last message or its exit code, and whoever awaits the reply will say
                pass

    def receive(self, worker: int) -> Any:
        """Wait for the next reply of a worker and take it.

        :raises WorkerError: If the worker failed; the pool is shut down then.
        """
        self.wait(worker)
        with shielded:
            return self.take(worker)

    def wait(self, worker: int) -> None:
        """Return once a reply of the worker can be taken.

        :raises WorkerError: See :meth:`receive`.
        """
        try:
            self._wait(worker)
        except WorkerError:
            self.kill()
            raise

    def take(self, worker: int) -> Any:
        """Read a reply that has arrived; to be called under the shield, so that it is either read and kept or neither.

        :raises WorkerError: See :meth:`receive`.
        """
        try:
            reply = pickle.loads(self._connections[worker].recv_bytes())
        except (EOFError, ConnectionResetError):
            died = self._died(worker)
            self.kill()
            raise died from None
        self._pending[worker] -= 1
        return reply

    def discard_pending(self) -> None:
        """Take and drop the replies that nobody waits for any more."""
        for worker in range(self.n_workers):
            while self._pending[worker]:
                self.receive(worker)

    def raise_failure(self, worker: int, failed: Failed) -> None:
        """Shut down and raise what a worker reported as its end.

        :raises WorkerRaised: Always.
        """
        subject = _name(worker, failed.env_index)
        message = f"{subject} failed {failed.activity}: {failed.summary}\n\n{failed.traceback}"
        self.kill()
        raise WorkerRaised(message, worker, failed.env_index) from original_exception(failed)

    def _wait(self, worker: int) -> None:
        """Return once a reply can be read."""
        connection, poll = self._connections[worker], self._polls[worker]
        progress, deadline = self.status.read(worker)[2], None
        if self.timeout is not None:
            deadline = time.monotonic() + self.timeout
        while True:
            ready = poll.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000 + 1)
            if any(fd == connection.fileno() for fd, _ in ready):
                return
            if ready:
                # The process has ended; a reply may still have arrived just before
                if connection.poll(0):
                    return
                raise self._died(worker)
            if deadline is not None and time.monotonic() >= deadline:
                latest = self.status.read(worker)[2]
                if latest == progress:
                    raise self._hung(worker)
                progress, deadline = latest, time.monotonic() + (self.timeout or 0.0)

    def _died(self, worker: int) -> WorkerDied:
        child = self._processes[worker]
        child.join(1.0)
        subject, env_index, activity = self._whereabouts(worker)
        message = f"{subject}: its process {describe_exit(child.exitcode)} while {activity}."
        return WorkerDied(message, worker, env_index, child.exitcode)

    def _hung(self, worker: int) -> WorkerTimeout:
        subject, env_index, activity = self._whereabouts(worker)
        message = f"{subject}: no progress for {self.timeout} s (step_timeout) while {activity}."
        return WorkerTimeout(message, worker, env_index)

    def _whereabouts(self, worker: int) -> tuple[str, int | None, Activity]:
        activity, env_index, _ = self.status.read(worker)
        return _name(worker, env_index), env_index, activity

    def close(self) -> None:
        """Ask the workers to close their environments and exit; kill those that do not. Idempotent."""
        if not self._finalizer.still_active():
            return
        with contextlib.suppress(WorkerError):
            for worker in range(len(self._processes)):
                self.notify(worker, Close())
            deadline = time.monotonic() + CLOSE_TIMEOUT
            for child, connection in zip(self._processes, self._connections, strict=True):
                _drain_until_exit(child, connection, deadline)
        self.kill()

    def kill(self) -> None:
        """End all workers now, whatever they do. Idempotent."""
        if self._finalizer.still_active():
            self._finalizer()


def _name(worker: int, env_index: int | None) -> str:
    return f"Worker {worker}" if env_index is None else f"Environment {env_index} (of worker {worker})"


def original_exception(failed: Failed) -> BaseException:
    """The exception that a worker raised, or its traceback as one if the exception cannot be rebuilt here."""
    remote = RemoteTraceback(failed.traceback)
    try:
        original = None if failed.exception is None else loads(failed.exception)
    except Exception:  # its class may not exist here, or demand other arguments
        return remote
    if not isinstance(original, BaseException):
        return remote
    original.__cause__ = remote
    return original


def _drain_until_exit(child: process.BaseProcess, connection: Connection, deadline: float) -> None:
    """Join a worker, reading what it may still be blocked on writing."""
    with contextlib.suppress(EOFError, OSError):
        while time.monotonic() < deadline and child.exitcode is None:
            if connection.poll(0.01 if child.is_alive() else 0):
                connection.recv_bytes()
    child.join(max(0.0, deadline - time.monotonic()))


def _shut_down(processes: list[process.BaseProcess], connections: list[Connection], lease: ForkServerLease | None) -> None:
    """Kill what still runs and give everything back; must not refer to the pool, whose finalizer it is."""
    with shielded:
        for child in processes:
            if child.exitcode is None:
                child.kill()
        for child in processes:
            child.join()
            child.close()
        for connection in connections:
            connection.close()
        if lease is not None:
            lease.release()
