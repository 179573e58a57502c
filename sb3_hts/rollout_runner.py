"""A worker's part of a rollout: its groups run free until the end, with nobody to wait for but who acts."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

from stable_baselines3.common.vec_env import VecEnvWrapper

from sb3_hts.env_group import EnvGroup, GlobalGenerators, dump_infos
from sb3_hts.lockstep import Critic, Lockstep
from sb3_hts.protocol import Activity, Cancel, Collect, Collected, Published
from sb3_hts.serialization import loads
from sb3_hts.shared_arrays import Array, SharedBlock
from sb3_hts.storage import Half, RolloutLayout, RolloutStorage
from sb3_hts.tokens import TokenQueue
from sb3_hts.worker_status import WorkerStatus
from sb3_hts.wrappers import Template, get_states, mount, set_states


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

    def await_snapshot(self, rollout: int) -> int | None:
        """Block until a snapshot is published or the rollout cancelled.

        :return: The snapshot's number; ``None`` if it is cancelled.
        """
        while True:
            match loads(self.connection.recv_bytes()):
                case Published(of, number) if of == rollout:
                    return number
                case Cancel(of) if of == rollout:
                    return None


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


class Program(Protocol):
    """What makes a worker's runner: all that collecting takes, apart from the environments."""

    def make_runner(self, blocks: Sequence[SharedBlock], queues: Sequence[TokenQueue], host: Host) -> RolloutRunner:
        """The runner of one worker.

        :param blocks: Shared memory that came with the program.
        :param queues: As well.
        :param host: Of the worker.
        """


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
