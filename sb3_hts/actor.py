"""The actor process of central inference: runs the behaviour policy for whichever groups are ready.

It waits for two things at once: tokens of groups that ask for an action, which it answers without waiting for anybody, and
requests of the main process, which come between rollouts only. Several actors take from the same queue.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch as th

from sb3_hts.acting import Manner
from sb3_hts.child import describe, ignore_interrupts, settle_in
from sb3_hts.exchange import Exchange, ExchangeLayout
from sb3_hts.protocol import Activity, Close, Configure, Done, Reply, Unconfigure
from sb3_hts.randomness import seed_process
from sb3_hts.replicas import PortablePolicy
from sb3_hts.serialization import dumps, loads
from sb3_hts.serving import FullServer, GroupServer, ParameterMirror, Server
from sb3_hts.shared_arrays import SharedBlock
from sb3_hts.slots import ParameterSlots
from sb3_hts.storage import RolloutStorage
from sb3_hts.tokens import TokenQueue
from sb3_hts.worker_status import WorkerStatus


@dataclass(frozen=True)
class ActorProgram:
    """What an actor needs.

    :param layout: Of what is handed over.
    :param manner: How to act.
    :param policy: For the device.
    :param n_slots: Number of slots, see :mod:`sb3_hts.slots`.
    :param device: Where the policy acts.
    :param full_batch: Whether all environments share a forward, see :mod:`sb3_hts.serving`.
    :param worker_of: Which worker hosts each group.
    :param device_slots: Pickled tensors that take the place of the slots in shared memory, where those of the learner's
        device can be shared; each pickle can be loaded once.
    """

    layout: ExchangeLayout
    manner: Manner
    policy: PortablePolicy
    n_slots: int
    device: str
    full_batch: bool
    worker_of: tuple[int, ...]
    device_slots: bytes | None = None

    def open_slots(self, block: SharedBlock) -> ParameterMirror:
        """The parameters."""
        slots = ParameterSlots(self.policy.slot_nbytes, self.n_slots, block)
        if self.device_slots is None:
            published = [th.from_numpy(slot) for slot in slots.slots]
        else:
            published = list(pickle.loads(self.device_slots))
        return ParameterMirror(published, slots.versions, th.device(self.device))

    def make_server(self, mirror: ParameterMirror, blocks: Sequence[SharedBlock], actor: int, status: WorkerStatus) -> Server:
        """What serves the groups; blocks: the storage's, the exchange's."""
        storage_block, exchange_block = blocks
        server_class = FullServer if self.full_batch else GroupServer
        # The networks that share a forward draw nothing, and what they lead to is drawn on the CPU
        seed = () if self.full_batch else (seed_process(th.device(self.device)),)
        return server_class(
            self.policy.make_replica(mirror.slots, *seed),
            mirror,
            self.manner,
            RolloutStorage(self.layout.rollout, storage_block),
            Exchange(self.layout, exchange_block),
            partial(status.set, actor, Activity.ACTING),
        )


def actor_main(actor: int, connection: Connection, status: WorkerStatus) -> None:
    """Entry point of the process.

    :param actor: Index of this actor.
    :param connection: Pipe to the main process.
    :param status: Where to say what we are doing.
    """
    settle_in()
    with suppress(EOFError, ConnectionError):
        _Actor(actor, connection, status).run()


class _Actor:
    def __init__(self, actor: int, connection: Connection, status: WorkerStatus) -> None:
        self._actor = actor
        self._connection = connection
        self._status = status
        self._server: Server | None = None
        self._requests: TokenQueue | None = None
        self._answers: list[TokenQueue] = []
        self._most = 1

    def run(self) -> None:
        """Serve until :class:`Close` or the end of the main process."""
        self._connection.send_bytes(dumps(Done()))
        while True:
            self._status.set(self._actor, Activity.AWAITING_OBSERVATION)
            groups = self._requests.take(self._most, beside=self._connection) if self._requests else []
            request = None if groups else pickle.loads(self._connection.recv_bytes())
            if isinstance(request, Close):
                return
            reply: Reply | None = None
            try:
                if request is None:
                    self._serve(groups)
                else:
                    reply = self._answer(request)
            except BaseException as error:  # whatever a policy raises is the main process's to hear
                reply = describe(error, self._status, self._actor)
            if reply is not None:
                ignore_interrupts()
                self._connection.send_bytes(dumps(reply))

    def _serve(self, groups: list[int]) -> None:
        """Give the tokens back, each with its answer."""
        assert self._server is not None
        for group in self._server.serve(groups):
            self._answers[self._worker_of[group]].put(group)

    def _answer(self, request: Configure | Unconfigure) -> Reply:
        self._status.set(self._actor, Activity.STARTING)
        self._forget()
        if isinstance(request, Configure):
            blocks = [SharedBlock.receive(self._connection, nbytes) for nbytes in request.sizes]
            self._requests, *self._answers = [TokenQueue.receive(self._connection) for _ in range(request.n_queues)]
            for block in blocks:
                block.release_descriptor()
            program: ActorProgram = loads(request.program)
            slots_block, *others = blocks
            try:
                mirror = program.open_slots(slots_block)
            except Exception as error:  # drivers and containers have many ways to say that memory is not shared
                if program.device_slots is None:
                    raise
                return Done(dumps(f"{type(error).__name__}: {error}"))
            self._server = program.make_server(mirror, others, self._actor, self._status)
            self._worker_of = program.worker_of
            # A full batch costs the same whoever is in it; other forwards are left to whoever has time
            self._most = len(self._worker_of) if program.full_batch else 1
        return Done()

    def _forget(self) -> None:
        self._server, self._requests, self._answers = None, None, []
