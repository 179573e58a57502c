"""A worker's part of a rollout: its groups run free until the rollout's end, without a message per step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch as th
from stable_baselines3.common.vec_env import VecEnvWrapper

from sb3_hts.acting import Manner
from sb3_hts.env_group import EnvGroup, GlobalGenerators, dump_infos
from sb3_hts.lockstep import Lockstep
from sb3_hts.protocol import Activity, Cancel, Collect, Collected, Published
from sb3_hts.replicas import Replica, TensorSpec, load_policy
from sb3_hts.serialization import loads
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


class RolloutRunner:
    """Collects rollouts for the groups of one worker.

    :param program: Layout, policy, wrappers.
    :param storage: Both halves; this worker writes its columns of the half that a request names.
    :param slots: The published parameters; read only.
    :param groups: The worker's environments.
    :param channel: To the main process.
    :param generators: Process-wide generators by group.
    """

    def __init__(
        self,
        program: Program,
        storage: RolloutStorage,
        slots: ParameterSlots,
        groups: Sequence[EnvGroup],
        channel: Channel,
        generators: GlobalGenerators,
    ) -> None:
        self._n_steps = program.layout.n_steps
        self._storage = storage
        self._slots = slots
        parameters = [th.from_numpy(slot) for slot in slots.slots]
        self._replica = Replica(program.tensors, parameters, partial(load_policy, program.policy), program.noise_key)
        self._groups = groups
        self._wrappers: list[list[VecEnvWrapper]] = []
        self._members: list[Lockstep] = []
        for group in groups:
            wrappers, stack = mount(program.wrappers, group)
            actor = program.manner.actor_class(self._replica, program.manner, group.columns)
            self._wrappers.append(wrappers)
            self._members.append(Lockstep(stack, actor))
        self._channel = channel
        self._generators = generators

    def collect(self, request: Collect) -> Collected:
        """Run all groups to the end of the rollout, or to the step at which it is cancelled.

        The groups take turns step by step: a step blocks its worker whichever group it belongs to, and this way all of
        them need the next snapshot at the same time.
        """
        half = self._storage.halves[request.half]
        for wrappers, states in zip(self._wrappers, request.wrapper_states, strict=True):
            set_states(wrappers, states)
        infos: dict[tuple[int, int], bytes] = {}
        steps_done, step_times = [0] * len(self._members), [0.0]
        snapshot = -1
        for t in range(self._n_steps):
            needed = t * request.n_snapshots // self._n_steps
            if needed != snapshot:
                self._switch(request, needed)
                snapshot = needed
            started = time.monotonic()
            if not self._step_all(request, half, t, snapshot, steps_done, infos):
                break
            step_times.append((time.monotonic() - started) / len(self._members))
        reset_infos: dict[int, bytes] = {}
        for index, member in enumerate(self._members):
            self._generators.enter(index)
            self._channel.report(Activity.ACTING, member.columns.start)
            member.finish(half, steps_done[index])
            reset_infos.update(self._groups[index].take_reset_infos())
        return Collected(
            steps_done=tuple(steps_done),
            infos=infos,
            reset_infos=reset_infos,
            wrapper_states=tuple(get_states(wrappers) for wrappers in self._wrappers),
            finished_at=time.monotonic(),
            step_time=statistics.median(step_times[1:] or step_times),
        )

    def _switch(self, request: Collect, snapshot: int) -> None:
        """Act with the given snapshot from now on; waits for it if need be."""
        if snapshot > 0:  # the first one was published before the request
            self._channel.report(Activity.AWAITING_SNAPSHOT)
            self._channel.await_snapshot(request.rollout, snapshot)
        self._replica.bind(request.first_slot + snapshot)

    def _step_all(
        self,
        request: Collect,
        half: Half,
        t: int,
        snapshot: int,
        steps_done: list[int],
        infos: dict[tuple[int, int], bytes],
    ) -> bool:
        """One step of each group; false once the rollout is cancelled."""
        version = self._slots.versions[request.first_slot + snapshot]
        for index, member in enumerate(self._members):
            if self._channel.is_cancelled(request.rollout):
                return False
            self._generators.enter(index)
            member.read_extras(half, t)
            self._channel.report(Activity.ACTING, member.columns.start)
            step_infos = member.step(half, t, request.first_step)
            infos.update(
                ((t, i), info) for i, info in dump_infos(step_infos, member.columns.start, self._channel.report).items()
            )
            half.versions[t, member.columns] = version
            steps_done[index] = t + 1
        return True
