"""All workers of one ``HTSVecEnv`` as one party: who may ask them when, and the rollouts that they collect.

Where actors act for them, those belong to the party: they are told together with the workers, and end with them.

At any time one thing is under way (:class:`~sb3_hts.protocol.Phase`). Whoever asks for anything holds the lock and first
waits for the end of what is under way, so callers never see an intermediate state. While a rollout is being collected only
the notices that it waits for and its cancellation pass, without the lock.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from sb3_hts.actor import actor_main
from sb3_hts.env_group import EnvFn
from sb3_hts.errors import ClosedError, ProtocolError, WorkerError
from sb3_hts.interrupts import shielded
from sb3_hts.placement import Placement
from sb3_hts.pool import Sendable, WorkerPool
from sb3_hts.processes import resolve_start_method
from sb3_hts.protocol import Cancel, Collect, Collected, Configure, Done, Phase, Published, Request, Step, Stepped, Unconfigure
from sb3_hts.registration import dump_registrations
from sb3_hts.serialization import dumps_by_value
from sb3_hts.shared_arrays import SharedBlock
from sb3_hts.tokens import TokenQueue
from sb3_hts.worker import worker_main

SENT_AT_ONCE = 128
"""How much of what travels by its descriptors is sent before it must have been taken: systems limit what is under way."""

CANCEL_TIMEOUT = 30.0
"""Seconds without progress that a cancelled rollout may take to its next step boundary, if no ``step_timeout`` is set."""


class Borrower(Protocol):
    """Who steps the environments by itself for a whole rollout, in a thread of its own."""

    def before_asking(self, stepping: bool) -> None:
        """Called by whoever is about to ask the environments, in its own thread; returns once it may.

        :param stepping: Asks for a step or reset. Some wrappers do that in a thread of their own.
        """

    def keeps_out(self, stepping: bool) -> bool:
        """Whether the present thread has to wait."""


class RolloutOwner(Protocol):
    """Who is told about a rollout under way."""

    def before_waiting(self) -> None:
        """Called by whoever is about to wait for the rollout's end, in its own thread."""

    def after_gathering(self, replies: Sequence[Collected]) -> None:
        """Called once all replies are there, before anything else is asked of the environments."""


@dataclass(frozen=True)
class Equipment:
    """What one process gets to collect with.

    :param program: See :class:`~sb3_hts.protocol.Configure`.
    :param blocks: Shared memory.
    :param queues: Where it puts and takes tokens.
    """

    program: bytes
    blocks: tuple[SharedBlock, ...]
    queues: tuple[TokenQueue, ...] = ()

    @property
    def request(self) -> Configure:
        return Configure(self.program, tuple(block.nbytes for block in self.blocks), len(self.queues))

    @property
    def sendables(self) -> tuple[Sendable, ...]:
        return *self.blocks, *self.queues


class Workforce:
    """See the module's docstring.

    :param placement: Who hosts what.
    :param env_fns: Functions that each make one environment.
    :param start_method: A resolved start method.
    :param step_timeout: Seconds without progress after which a worker counts as hung; ``None``: never.
    :param on_collected: Called with the replies when a rollout has ended, after its owner was told.
    """

    def __init__(
        self,
        placement: Placement,
        env_fns: Sequence[EnvFn],
        start_method: str,
        step_timeout: float | None,
        on_collected: Callable[[Sequence[Collected]], None],
    ) -> None:
        self.placement = placement
        self._everyone = range(placement.n_workers)
        self._on_collected = on_collected
        # Guards every exchange with the workers; reentrant because the learner's hooks run inside of one
        self._lock = threading.RLock()
        self._phase = Phase.IDLE
        self._failure: WorkerError | None = None
        self._collected: list[Collected] = []
        self._rollout = -1
        self._owner: RolloutOwner | None = None
        self._borrower: Borrower | None = None
        registrations = dump_registrations()
        # Without fixing it: asking for it otherwise makes it impossible for users to choose another one later
        method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        arguments = []
        for worker in self._everyone:
            envs = placement.envs_of(worker)
            functions = dumps_by_value(env_fns[envs])
            arguments.append((functions, registrations, envs.start, placement.envs_per_group, placement.n_envs, method))
        self.pool = WorkerPool(start_method, worker_main, arguments, timeout=step_timeout)
        # Neither a CUDA context nor OpenMP's threads survive a fork
        self._start_method_of_actors = resolve_start_method(None if start_method == "fork" else start_method)
        self.actors: WorkerPool | None = None
        # Why actors cannot read the learner's device; each attempt costs memory there
        self.device_refusal: str | None = None

    @property
    def phase(self) -> Phase:
        """What is under way."""
        return self._phase

    # --- asking -----------------------------------------------------------------------------------------------------

    @contextmanager
    def idle(self, *, stepping: bool = False) -> Iterator[None]:
        """Hold the lock with nothing under way.

        :param stepping: On the way to a step or reset.
        :raises ClosedError: If the workers are gone.
        :raises WorkerError: If one of them failed in what was under way.
        """
        while True:
            # Before the lock: whoever holds it may be waiting for snapshots that only this thread can publish
            if self._phase is Phase.COLLECTING and self._owner is not None:
                self._owner.before_waiting()
            elif self._borrower is not None:
                self._borrower.before_asking(stepping)
            with self._lock:
                if self._borrower is not None and self._borrower.keeps_out(stepping):
                    continue  # it has begun another rollout meanwhile
                self._become_idle()
                yield
                return

    def ask(self, requests: dict[int, Request], *blocks: SharedBlock) -> dict[int, Any]:
        """Send requests by worker and wait for the replies, failures among them; within :meth:`idle`.

        :param blocks: Shared memory that goes with each request.
        """
        with self._noting_failure():
            self._send(requests, *blocks)
            replies = self.pool.receive(list(requests), tolerate_failures=True)
        return dict(zip(requests, replies, strict=True))

    def ask_all(self, requests: Sequence[Request], *blocks: SharedBlock) -> list[Any]:
        """Send a request to each worker and wait for all replies; within :meth:`idle`.

        :raises WorkerError: If a worker failed; they are all gone then.
        """
        return self._tell(self.pool, [(request, blocks) for request in requests])

    def hellos(self) -> list[Any]:
        """What the workers say once they have constructed their environments."""
        return self._tell(self.pool)

    def _send(self, requests: dict[int, Request], *blocks: SharedBlock) -> None:
        with shielded:
            for worker, request in requests.items():
                self.pool.send(worker, request, *blocks)

    def _tell(self, pool: WorkerPool, requests: Sequence[tuple[Request, Sequence[Sendable]]] = ()) -> list[Done]:
        """Send a request to each process of a pool, with what goes with it, and wait for all replies."""
        replies: list[Done] = []
        n_sent = max((len(sendables) for _, sendables in requests), default=0)
        at_once = max(1, SENT_AT_ONCE // n_sent) if n_sent else pool.n_workers
        with self._noting_failure():
            for first in range(0, pool.n_workers, at_once):
                processes = range(first, min(first + at_once, pool.n_workers))
                with shielded:
                    for number, (request, sendables) in zip(processes, requests[first:], strict=False):
                        pool.send(number, request, *sendables)
                replies += pool.receive(processes)
        return _checked(replies, Done)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except WorkerError as error:
            self._phase, self._failure = Phase.BROKEN, error
            for pool in self._pools:
                pool.kill()
            raise

    @property
    def _pools(self) -> list[WorkerPool]:
        return [self.pool] if self.actors is None else [self.pool, self.actors]

    def _become_idle(self) -> None:
        """Make sure that nothing is under way and the workers can be asked. Called with the lock held."""
        match self._phase:
            case Phase.CLOSED:
                raise ClosedError("These environments have been closed; make a new HTSVecEnv.")
            case Phase.BROKEN:
                raise ClosedError(f"These environments were shut down after a failure: {self._failure}") from self._failure
            case Phase.COLLECTING:
                self._gather()
            case Phase.IDLE | Phase.STEPPING:
                # An interrupt may have come between a request and its reply
                with self._noting_failure():
                    for pool in self._pools:
                        pool.discard_pending()
                self._phase = Phase.IDLE

    def close(self) -> None:
        """Close the environments and end the workers; works in any phase and more than once."""
        if self._borrower is not None:
            self._borrower.before_asking(stepping=False)
        with self._lock:
            if self._phase is Phase.COLLECTING:
                self.cancel_rollout()
            self._phase = Phase.CLOSED
            for pool in self._pools:
                pool.close()
            self._forget_rollout()

    # --- single steps -----------------------------------------------------------------------------------------------

    def start_step(self, requests: Sequence[Step]) -> None:
        """Let all workers step their environments once; within :meth:`idle`."""
        with shielded:
            self._phase = Phase.STEPPING
            self._send(dict(enumerate(requests)))

    def finish_step(self) -> list[Stepped]:
        """Wait for the end of the step.

        :raises ProtocolError: Without a step under way.
        """
        with self._lock:
            if self._phase is not Phase.STEPPING:
                self._become_idle()
                raise ProtocolError("step_wait() was called without step_async().")
            with self._noting_failure():
                replies = _checked(self.pool.receive(self._everyone), Stepped)
            self._phase = Phase.IDLE
            return replies

    def lend(self, borrower: Borrower) -> None:
        """Make everybody else wait until :meth:`take_back`, by asking the borrower."""
        self._borrower = borrower

    def take_back(self, borrower: Borrower) -> None:
        """End :meth:`lend`; does nothing for anybody but the present borrower."""
        if self._borrower is borrower:
            self._borrower = None

    # --- rollouts ---------------------------------------------------------------------------------------------------

    def configure_rollouts(
        self, owner: RolloutOwner, workers: Sequence[Equipment], actors: Sequence[Equipment] = ()
    ) -> list[Done]:
        """Prepare the workers to collect.

        :param owner: On whose behalf; the latest one only can start rollouts.
        :param workers: What each of them gets.
        :param actors: Of those who act for them; there will be that many from now on.
        :return: What everybody answers, workers first.
        """
        with self.idle():
            self._employ(len(actors))
            replies = []
            for pool, equipments in zip(self._pools, (workers, actors), strict=False):
                replies += self._tell(pool, [(equipment.request, equipment.sendables) for equipment in equipments])
            self._owner = owner
            return replies

    def _employ(self, n_actors: int) -> None:
        """Have so many actors; those of an earlier model are as good as new ones."""
        if self.actors is not None and self.actors.n_workers != n_actors:
            actors, self.actors = self.actors, None
            actors.close()
        if self.actors is None and n_actors:
            arguments: list[tuple[Any, ...]] = [()] * n_actors
            actors = WorkerPool(self._start_method_of_actors, actor_main, arguments, self.pool.timeout, role="actor")
            try:
                actors.receive(range(n_actors))
            except BaseException:  # the environments can do without
                actors.kill()
                raise
            self.actors = actors

    def release_rollouts(self, owner: RolloutOwner) -> None:
        """Make the workers forget what :meth:`configure_rollouts` gave them; does nothing after a failure."""
        with self._lock:
            if self._owner is not owner:
                return
            if self._phase not in (Phase.CLOSED, Phase.BROKEN):
                self._become_idle()
                for pool in self._pools:
                    self._tell(pool, [(Unconfigure(), ())] * pool.n_workers)
            self._forget_rollout()

    def start_rollout(self, request: Callable[[int, int], Collect], owner: RolloutOwner) -> None:
        """Let all workers collect.

        :param request: Makes a worker's request from the serial number of the rollout and the worker's index. Serial numbers
            never repeat, since notices of an earlier rollout must not be taken for this one's.
        :param owner: Who is told about it.
        :raises ProtocolError: If another owner has configured the workers meanwhile.
        """
        with self.idle():
            if self._owner is not owner:
                raise ProtocolError(
                    "Another model has begun to train on these environments while this one was training: give each its own."
                )
            serial = self._rollout + 1
            requests: dict[int, Request] = {worker: request(serial, worker) for worker in self._everyone}
            with shielded:
                self._phase, self._rollout, self._collected = Phase.COLLECTING, serial, []
                self._send(requests)

    def announce_snapshot(self, snapshot: int) -> None:
        """Tell the workers that a snapshot is in its slot. Does not wait, and needs no lock."""
        for worker in self._everyone:
            self.pool.notify(worker, Published(self._rollout, snapshot))

    def cancel_rollout(self) -> None:
        """Tell the workers to stop at the next step boundary. Does not wait, and needs no lock."""
        self.pool.status.cancelled = self._rollout
        for worker in self._everyone:
            self.pool.notify(worker, Cancel(self._rollout))

    def finish_rollout(self) -> list[Collected]:
        """Wait for the end of the rollout that was started last.

        :return: One reply per worker, in worker order.
        :raises WorkerError: If a worker failed, even if somebody else was told before.
        """
        with self._lock:
            if self._phase is Phase.BROKEN and self._failure is not None:
                raise self._failure
            if self._phase is not Phase.IDLE:
                self._become_idle()
            return self._collected

    def _forget_rollout(self) -> None:
        # The owner holds the storage
        self._owner, self._collected = None, []

    def _gather(self) -> None:
        """Take the replies of a rollout; can be interrupted and called again."""
        cancelled = self.pool.status.cancelled == self._rollout
        with self._noting_failure():
            limit = CANCEL_TIMEOUT if cancelled else None
            self.pool.wait(self._everyone, timeout=limit, helpers=self.actors)
        with shielded:
            self._collected = _checked(self.pool.take(self._everyone), Collected)
            self._phase = Phase.IDLE
            if self._owner is not None:
                self._owner.after_gathering(self._collected)
            self._on_collected(self._collected)


def _checked(replies: list[Any], reply_type: type[Any]) -> list[Any]:
    for worker, reply in enumerate(replies):
        if not isinstance(reply, reply_type):
            raise ProtocolError(f"Worker {worker} answered with {type(reply).__name__}, not {reply_type.__name__}")
    return replies
