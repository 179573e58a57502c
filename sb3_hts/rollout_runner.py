"""A worker's part of a rollout: its groups run free until the rollout's end, without a message per step."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch as th
from stable_baselines3.common.vec_env import VecEnvWrapper

from sb3_hts.acting import GroupActor, Manner
from sb3_hts.env_group import EnvGroup, GlobalGenerators, dump_infos
from sb3_hts.lockstep import Critic, Lockstep
from sb3_hts.protocol import Activity, Cancel, Collect, Collected, Published
from sb3_hts.replicas import Replica, TensorSpec, load_policy
from sb3_hts.serialization import loads
from sb3_hts.shared_arrays import Array
from sb3_hts.slots import ParameterSlots
from sb3_hts.storage import Half, RolloutLayout, RolloutStorage
from sb3_hts.worker_status import WorkerStatus
from sb3_hts.wrappers import Template, get_states, mount, set_states


@dataclass(frozen=True)
class Program:
    """What a worker needs to collect rollouts, apart from its environments.

    :param layout: Of the rollout storage.
    :param manner: How to act.
    :param wrappers: Templates of the vectorized wrappers, from the innermost outwards.
    :param policy: Result of :func:`sb3_hts.replicas.dump_policy`.
    :param tensors: The policy's tensors, in order of their numbers.
    :param slot_nbytes: Size of one slot.
    :param n_slots: Number of slots, see :mod:`sb3_hts.slots`.
    :param noise_key: See :func:`sb3_hts.seeding.stream_seed`.
    """

    layout: RolloutLayout
    manner: Manner
    wrappers: tuple[Template, ...]
    policy: bytes
    tensors: tuple[TensorSpec, ...]
    slot_nbytes: int
    n_slots: int
    noise_key: int


@dataclass(frozen=True)
class Channel:
    """What a worker hears and says while it collects."""

    worker: int
    connection: Connection
    status: WorkerStatus

    def report(self, activity: Activity, env_index: int = -1) -> None:
        self.status.set(self.worker, activity, env_index)

    def is_cancelled(self, rollout: int) -> bool:
        return self.status.cancelled == rollout

    def await_snapshot(self, rollout: int, snapshot: int) -> None:
        """Block until the snapshot is published or the rollout cancelled."""
        while True:
            match loads(self.connection.recv_bytes()):
                case Published(of, number) if of == rollout and number >= snapshot:
                    return
                case Cancel(of) if of == rollout:
                    return


@dataclass(frozen=True)
class Host:
    """What a worker has.

    :param groups: Its environments.
    :param channel: To the main process.
    :param generators: Process-wide generators by group.
    """

    groups: Sequence[EnvGroup]
    channel: Channel
    generators: GlobalGenerators


class RolloutRunner(ABC):
    """Collects rollouts for the groups of one worker; where the actions come from is for subclasses to say.

    :param layout: Of the rollout storage.
    :param templates: Of the vectorized wrappers, from the innermost outwards.
    :param storage: Both halves; this worker writes its columns of the half that a request names.
    :param host: Of the worker.
    """

    def __init__(self, layout: RolloutLayout, templates: Sequence[Template], storage: RolloutStorage, host: Host) -> None:
        self._n_steps = layout.n_steps
        self._storage = storage
        self._host = host
        self._wrappers: list[list[VecEnvWrapper]] = []
        self._members: list[Lockstep] = []
        for group in host.groups:
            wrappers, stack = mount(templates, group)
            self._wrappers.append(wrappers)
            self._members.append(Lockstep(stack, group.columns, self._critic_of(group.columns)))
        self._steps_done: list[int] = []
        self._infos: dict[tuple[int, int], bytes] = {}
        self._step_times: list[float] = []

    @abstractmethod
    def _critic_of(self, columns: slice) -> Critic:
        """Who values the terminal observations of a group."""

    @abstractmethod
    def _run(self, request: Collect, half: Half) -> None:
        """Take all groups to the end of the rollout, or to the step at which it is cancelled."""

    def collect(self, request: Collect) -> Collected:
        """Run all groups to the end of the rollout, or to the step at which it is cancelled."""
        half = self._storage.halves[request.half]
        for wrappers, states in zip(self._wrappers, request.wrapper_states, strict=True):
            set_states(wrappers, states)
        self._steps_done, self._infos, self._step_times = [0] * len(self._members), {}, []
        self._run(request, half)
        reset_infos: dict[int, bytes] = {}
        for group, member, steps_done in zip(self._host.groups, self._members, self._steps_done, strict=True):
            if steps_done < self._n_steps:
                member.settle(half, steps_done)
            reset_infos.update(group.take_reset_infos())
        return Collected(
            steps_done=tuple(self._steps_done),
            infos=self._infos,
            reset_infos=reset_infos,
            wrapper_states=tuple(get_states(wrappers) for wrappers in self._wrappers),
            finished_at=time.monotonic(),
            step_time=statistics.median(self._step_times or [0.0]),
        )

    def _step(self, index: int, half: Half, t: int, actions: Array) -> None:
        """Step one group."""
        member = self._members[index]
        infos = member.step(half, t, actions)
        report = self._host.channel.report
        self._infos.update(((t, i), info) for i, info in dump_infos(infos, member.columns.start, report).items())
        self._steps_done[index] = t + 1


class LocalRunner(RolloutRunner):
    """Acts by itself: the worker is executor and actor in one.

    :param program: Layout, policy, wrappers.
    :param storage: Both halves.
    :param slots: The published parameters; read only.
    :param host: Of the worker.
    """

    def __init__(self, program: Program, storage: RolloutStorage, slots: ParameterSlots, host: Host) -> None:
        self._slots = slots
        parameters = [th.from_numpy(slot) for slot in slots.slots]
        replica = Replica(program.tensors, parameters, partial(load_policy, program.policy), program.noise_key)
        self._replica = replica
        manner = program.manner
        self._actors = [manner.actor_class(replica, manner, group.columns) for group in host.groups]
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
                self._switch(request, needed)
                snapshot = needed
            started = time.monotonic()
            if not self._step_all(request, half, t, snapshot):
                break
            self._step_times.append((time.monotonic() - started) / len(self._members))
        for index, actor in enumerate(self._actors):
            if self._steps_done[index] == self._n_steps:
                self._host.generators.enter(index)
                self._host.channel.report(Activity.ACTING, actor.columns.start)
                actor.write_last_values(half)

    def _switch(self, request: Collect, snapshot: int) -> None:
        """Act with the given snapshot from now on; waits for it if need be."""
        if snapshot > 0:  # the first one was published before the request
            self._host.channel.report(Activity.AWAITING_SNAPSHOT)
            self._host.channel.await_snapshot(request.rollout, snapshot)
        self._replica.bind(request.first_slot + snapshot)

    def _step_all(self, request: Collect, half: Half, t: int, snapshot: int) -> bool:
        """One step of each group; false once the rollout is cancelled."""
        version = self._slots.versions[request.first_slot + snapshot]
        for index, (member, actor) in enumerate(zip(self._members, self._actors, strict=True)):
            if self._host.channel.is_cancelled(request.rollout):
                return False
            self._host.generators.enter(index)
            member.read_extras(half, t)
            self._host.channel.report(Activity.ACTING, member.columns.start)
            self._step(index, half, t, actor.act(half, t, request.first_step))
            half.versions[t, member.columns] = version
        return True
