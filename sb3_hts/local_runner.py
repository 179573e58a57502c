"""Local inference: each worker acts for its own groups, without a message per step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch as th

from sb3_hts.acting import GroupActor, Manner
from sb3_hts.protocol import Activity, Collect
from sb3_hts.replicas import PortablePolicy
from sb3_hts.rollout_runner import Host, RolloutRunner
from sb3_hts.shared_arrays import SharedBlock
from sb3_hts.slots import ParameterSlots
from sb3_hts.storage import Half, RolloutLayout, RolloutStorage
from sb3_hts.tokens import TokenQueue
from sb3_hts.wrappers import Template


@dataclass(frozen=True)
class LocalProgram:
    """For workers that act by themselves.

    :param layout: Of the rollout storage.
    :param manner: How to act.
    :param wrappers: Templates of the vectorized wrappers, from the innermost outwards.
    :param policy: For the CPU.
    :param n_slots: Number of slots, see :mod:`sb3_hts.slots`.
    """

    layout: RolloutLayout
    manner: Manner
    wrappers: tuple[Template, ...]
    policy: PortablePolicy
    n_slots: int

    def make_runner(self, blocks: Sequence[SharedBlock], queues: Sequence[TokenQueue], host: Host) -> RolloutRunner:
        """See :class:`~sb3_hts.rollout_runner.Program`; blocks: the storage's, the slots'."""
        storage_block, slots_block = blocks
        slots = ParameterSlots(self.policy.slot_nbytes, self.n_slots, slots_block)
        return LocalRunner(self, RolloutStorage(self.layout, storage_block), slots, host)


class LocalRunner(RolloutRunner):
    """Acts by itself: the worker is executor and actor in one.

    :param program: Layout, policy, wrappers.
    :param storage: Both halves.
    :param slots: The published parameters; read only.
    :param host: Of the worker.
    """

    def __init__(self, program: LocalProgram, storage: RolloutStorage, slots: ParameterSlots, host: Host) -> None:
        self._slots = slots
        parameters = [th.from_numpy(slot) for slot in slots.slots]
        self._replica = program.policy.make_replica(parameters)
        manner = program.manner
        self._actors = [manner.actor_class(self._replica, manner, group.columns) for group in host.groups]
        super().__init__(program.layout, program.wrappers, storage, host)

    def _critic_of(self, columns: slice) -> GroupActor:
        return next(actor for actor in self._actors if actor.columns == columns)

    def _run(self, request: Collect, half: Half) -> None:
        """The groups take turns step by step: a step blocks its worker whichever group it belongs to, and this way all of
        them need the next snapshot at the same time.
        """
        snapshot = -1
        for t in range(self._n_steps):
            needed = t * request.n_snapshots // self._n_steps
            if needed != snapshot:
                self._await(request, needed)
                snapshot = needed
            started = time.monotonic()
            if not self._step_all(request, half, t, snapshot):
                break
            self._step_times.append((time.monotonic() - started) / len(self._members))
        for index, actor in enumerate(self._actors):
            if self._steps_done[index] == self._n_steps:
                self._host.generators.enter(index)
                self._host.channel.report(Activity.ACTING, actor.columns.start)
                self._replica.bind(request.first_slot + snapshot)
                actor.write_last_values(half)

    def _await(self, request: Collect, snapshot: int) -> None:
        """Wait for the given snapshot if need be."""
        if snapshot > 0:  # the first one was published before the request
            self._host.channel.report(Activity.AWAITING_SNAPSHOT)
            published: int | None = 0
            while published is not None and published < snapshot:
                published = self._host.channel.await_snapshot(request.rollout)

    def _step_all(self, request: Collect, half: Half, t: int, snapshot: int) -> bool:
        """One step of each group; false once the rollout is cancelled."""
        slot = request.first_slot + snapshot
        for index, (member, actor) in enumerate(zip(self._members, self._actors, strict=True)):
            if self._host.channel.is_cancelled(request.rollout):
                return False
            self._host.generators.enter(index)
            member.read_extras(half, t)
            self._host.channel.report(Activity.ACTING, member.columns.start)
            self._replica.bind(slot)
            self._step(index, half, t, actor.act(half, t, request.first_step))
            half.versions[t, member.columns] = self._slots.versions[slot]
        return True
