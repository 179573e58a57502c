"""A fixed set of worker processes, one pipe each. Knows nothing of environments or policies.

Requests go out to some workers, then their replies are awaited together and taken in worker order. Whoever waits watches all
pipes and all processes at once, so that the first failure is noticed whatever the other workers do; with a time limit also
a worker that makes no progress. Any failure shuts the whole pool down before it is reported: a pool is either whole or gone.

What a worker was doing when it failed is in shared memory (:mod:`sb3_hts.worker_status`), so it need not be asked.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import Pipe, process, util
from multiprocessing.connection import Connection
from typing import Any, Protocol

from sb3_hts.errors import RemoteTraceback, WorkerDied, WorkerError, WorkerRaised, WorkerTimeout, describe_exit
from sb3_hts.interrupts import shielded
from sb3_hts.processes import ForkServerLease, make_process
from sb3_hts.protocol import Activity, Close, Failed
from sb3_hts.serialization import loads
from sb3_hts.worker_status import ProgressWatch, WorkerStatus

EXIT_CHECK_INTERVAL = 500
"""Milliseconds without news after which to see whether a worker has ended unnoticed."""

CLOSE_TIMEOUT = 5.0
"""Seconds that environments get to close in before their worker is killed."""


class Sendable(Protocol):
    """What travels by its file descriptors."""

    def send(self, connection: Connection, pid: int) -> None:
        """Pass it to the process at the other end of a pipe."""


class WorkerPool:
    """Start the workers and talk to them.

    :param start_method: A resolved start method.
    :param target: Runs in each child as ``target(worker, connection, status, *args)``.
    :param args_per_worker: Further arguments, one tuple per worker.
    :param timeout: Seconds without progress after which a worker that is waited for counts as hung; ``None``: never.
    :param role: What the workers are called.

    ``blocked_time`` adds up the seconds in which a caller waited for a reply that was not there yet.
    """

    def __init__(
        self,
        start_method: str,
        target: Callable[..., None],
        args_per_worker: Sequence[tuple[Any, ...]],
        timeout: float | None = None,
        role: str = "worker",
    ) -> None:
        self.n_workers = len(args_per_worker)
        self.role = role
        self.timeout = timeout
        self.status = WorkerStatus(self.n_workers)
        # Each worker begins with a reply: whether it could set itself up
        self._pending = [1] * self.n_workers
        self._arrived: list[deque[Any]] = [deque() for _ in range(self.n_workers)]
        self.blocked_time = 0.0
        self._connections: list[Connection] = []
        self._processes: list[process.BaseProcess] = []
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
                name=f"sb3-hts-{self.role}-{worker}",
            )
            child.start()
        finally:
            theirs.close()
        self._processes.append(child)

    @property
    def pids(self) -> list[int]:
        """Process ids, in worker order."""
        return [child.pid or -1 for child in self._processes]

    def send(self, worker: int, request: object, *sendables: Sendable) -> None:
        """Send a request, which will be answered by one reply.

        :param sendables: What goes with it.
        """
        self.notify(worker, request, *sendables)
        self._pending[worker] += 1

    def notify(self, worker: int, notice: object, *sendables: Sendable) -> None:
        """Send a message that has no reply.

        :raises WorkerError: If the system refuses to pass on what goes with it; the pool is shut down then.
        """
        connection = self._connections[worker]
        with shielded:
            if connection.closed:
                return  # after a failure
            try:
                connection.send_bytes(pickle.dumps(notice, protocol=pickle.HIGHEST_PROTOCOL))
                for sendable in sendables:
                    sendable.send(connection, self.pids[worker])
            except ConnectionError:
                # The worker is gone; why is in its last message or its exit code, and whoever awaits the reply will say
                pass
            except OSError as error:
                self.kill()  # it waits for what has not been sent
                name = self._name(worker, None)
                message = f"{name}: file descriptors cannot be sent to it ({error}): raise the limit (ulimit -n)."
                raise WorkerError(message, worker) from error

    def receive(self, workers: Sequence[int], *, tolerate_failures: bool = False) -> list[Any]:
        """Wait for the next reply of each of the workers, and take them; arguments and errors as of :meth:`wait`.

        :return: The replies, in the order of ``workers``.
        """
        self.wait(workers, tolerate_failures=tolerate_failures)
        with shielded:
            return self.take(workers)

    def wait(
        self,
        workers: Sequence[int],
        *,
        timeout: float | None = None,
        tolerate_failures: bool = False,
        helpers: WorkerPool | None = None,
    ) -> None:
        """Return once the next reply of each of the workers has arrived. Can be interrupted and called again.

        :param timeout: Seconds without progress to allow where the pool itself has no limit.
        :param tolerate_failures: Treat :class:`~sb3_hts.protocol.Failed` as any other reply.
        :param helpers: Those that the workers depend on meanwhile; all they may say is that they have failed.
        :raises WorkerError: As soon as one of the workers or helpers has failed; the pool is shut down then.
        """
        try:
            self._wait(workers, timeout if self.timeout is None else self.timeout, tolerate_failures, helpers)
        except WorkerError:
            self.kill()
            raise

    def take(self, workers: Sequence[int]) -> list[Any]:
        """The replies that have arrived; to be called under the shield, so that they are either taken and kept or neither."""
        return [self._arrived[worker].popleft() for worker in workers]

    def discard_pending(self) -> None:
        """Take and drop the replies that nobody waits for any more."""
        for worker in range(self.n_workers):
            while self._pending[worker] or self._arrived[worker]:
                self.receive([worker])

    def _wait(self, workers: Sequence[int], limit: float | None, tolerate_failures: bool, helpers: WorkerPool | None) -> None:
        missing = []
        poll = select.poll()
        if helpers is not None:
            for helper in range(helpers.n_workers):
                if helpers._arrived[helper]:  # before an interrupt
                    helpers._check(helper, tolerate_failures=False)
                helpers._register(poll, helper)
        for worker in workers:
            if self._arrived[worker]:
                self._check(worker, tolerate_failures)
                continue
            missing.append(worker)
            self._register(poll, worker)
        watch = ProgressWatch(self.status, missing, limit)
        while missing:
            started = time.monotonic()
            next_look = watch.poll_timeout()
            limit_ms = EXIT_CHECK_INTERVAL if next_look is None else min(next_look, EXIT_CHECK_INTERVAL)
            ready = {descriptor for descriptor, _ in poll.poll(limit_ms)}
            if not ready:
                # A child that an environment has forked holds the other ends of pipe and sentinel, and may outlive the worker
                children = [self._processes[worker] for worker in missing]
                ready = {child.sentinel for child in children if child.exitcode is not None}
            self.blocked_time += time.monotonic() - started
            if helpers is not None:
                helpers._check_all(ready)
            for worker in [worker for worker in missing if self._has_news(worker, ready)]:
                self._read(worker)
                self._check(worker, tolerate_failures)
                missing.remove(worker)
                poll.unregister(self._connections[worker].fileno())
                poll.unregister(self._processes[worker].sentinel)
            hung = watch.first_hung(missing)
            if hung is not None:
                raise self._hung(hung, limit)

    def _register(self, poll: select.poll, worker: int) -> None:
        poll.register(self._connections[worker].fileno(), select.POLLIN)
        poll.register(self._processes[worker].sentinel, select.POLLIN)

    def _check_all(self, ready: set[int]) -> None:
        """Notice failures of workers that nobody has asked for anything."""
        for worker in range(self.n_workers):
            if self._has_news(worker, ready):
                self._read(worker)
                self._check(worker, tolerate_failures=False)

    def _has_news(self, worker: int, ready: set[int]) -> bool:
        """Whether a reply can be read.

        :raises WorkerDied: If the process has ended without one.
        """
        connection = self._connections[worker]
        if connection.fileno() in ready:
            return True
        if self._processes[worker].sentinel not in ready:
            return False
        if connection.poll(0):  # it may have arrived just before the end
            return True
        raise self._died(worker)

    def _read(self, worker: int) -> None:
        with shielded:
            try:
                reply = pickle.loads(self._connections[worker].recv_bytes())
            except (EOFError, ConnectionResetError):
                raise self._died(worker) from None
            self._pending[worker] -= 1
            self._arrived[worker].append(reply)

    def _check(self, worker: int, tolerate_failures: bool) -> None:
        reply = self._arrived[worker][0]
        if isinstance(reply, Failed) and not tolerate_failures:
            original = original_exception(reply)
            # The traceback is in our message already
            original.__cause__ = None
            raise self.raised(worker, reply) from original

    def _died(self, worker: int) -> WorkerDied:
        child = self._processes[worker]
        child.join(1.0)
        subject, env_index, activity = self._whereabouts(worker)
        message = f"{subject}: its process {describe_exit(child.exitcode)} while {activity}."
        return WorkerDied(message, worker, env_index, child.exitcode)

    def _hung(self, worker: int, limit: float | None) -> WorkerTimeout:
        subject, env_index, activity = self._whereabouts(worker)
        reason = "step_timeout" if self.timeout is not None else "after the rollout was cancelled"
        return WorkerTimeout(f"{subject}: no progress for {limit} s ({reason}) while {activity}.", worker, env_index)

    def _whereabouts(self, worker: int) -> tuple[str, int | None, Activity]:
        activity, env_index, _ = self.status.read(worker)
        return self._name(worker, env_index), env_index, activity

    def _name(self, worker: int, env_index: int | None) -> str:
        process_name = f"{self.role} {worker}"
        return process_name.capitalize() if env_index is None else f"Environment {env_index} (of {process_name})"

    def raised(self, worker: int, failed: Failed) -> WorkerRaised:
        """The error that says what a worker reported."""
        subject = self._name(worker, failed.env_index)
        message = f"{subject} failed {failed.activity}: {failed.summary}\n\n{failed.traceback}"
        return WorkerRaised(message, worker, failed.env_index)

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
