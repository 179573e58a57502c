"""A worker's part of a rollout: its groups run free until the rollout's end, without a message per step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from sb3_hts.acting import GroupActor, Program, Replica, to_env_actions
from sb3_hts.env_group import EnvGroup, GlobalGenerators, dump_infos
from sb3_hts.protocol import Activity, Cancel, Collect, Collected, Published
from sb3_hts.serialization import loads
from sb3_hts.slots import ParameterSlots
from sb3_hts.storage import Half, RolloutStorage
from sb3_hts.worker_status import WorkerStatus
from sb3_hts.wrappers import get_state, mount, set_state


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


class _Member:
    """A group while it collects: environments, wrappers and actor."""

    def __init__(self, envs: EnvGroup, replica: Replica, program: Program) -> None:
        group = envs.first_index // envs.num_envs
        self.envs = envs
        self.columns = envs.columns
        self.wrappers, self.stack = mount(program.wrappers, envs)
        self.actor = GroupActor(replica, program, group, envs.num_envs)
        self._action_space = program.action_space
        self._policy = replica.policy

    def step(self, half: Half, t: int, first_step: int) -> list[dict[str, Any]]:
        """Act and step once; writes row ``t`` of this group's columns, and the observations of row ``t + 1``."""
        columns = self.columns
        observations = {key: array[t, columns] for key, array in half.observations.items()}
        actions, half.values[t, columns], half.log_probs[t, columns] = self.actor.act(observations, first_step, t)
        half.actions[t, columns] = actions
        new_obs, rewards, dones, infos = self.stack.step(to_env_actions(self._policy, self._action_space, actions))
        half.rewards[t, columns] = rewards
        half.dones[t, columns] = dones
        for key, array in half.observations.items():
            array[t + 1, columns] = new_obs if key is None else new_obs[key]  # type: ignore[call-overload, index]
        if dones.any():
            self._bootstrap(half, t, dones, infos)
        return infos

    def _bootstrap(self, half: Half, t: int, dones: Any, infos: list[dict[str, Any]]) -> None:
        for row in np.flatnonzero(dones):
            observation = infos[row].get("terminal_observation")
            if observation is not None and infos[row].get("TimeLimit.truncated", False):
                half.terminal_values[t, self.columns.start + row] = self.actor.terminal_value(observation)

    def finish(self, half: Half, steps_done: int) -> None:
        """Write the value of the last observation; after a cancellation, move the last observation to where it belongs."""
        if steps_done == len(half.dones):
            last = {key: array[-1, self.columns] for key, array in half.observations.items()}
            half.last_values[self.columns] = self.actor.values(last)
            return
        for array in half.observations.values():
            array[-1, self.columns] = array[steps_done, self.columns]


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
        self._replica = Replica(program, slots)
        self._members = [_Member(group, self._replica, program) for group in groups]
        self._channel = channel
        self._generators = generators

    def collect(self, request: Collect) -> Collected:
        """Run all groups to the end of the rollout, or to the step at which it is cancelled.

        The groups take turns step by step: a step blocks its worker whichever group it belongs to, and this way all of
        them need the next snapshot at the same time.
        """
        half = self._storage.halves[request.half]
        for member, states in zip(self._members, request.wrapper_states, strict=True):
            for wrapper, state in zip(member.wrappers, states, strict=True):
                set_state(wrapper, state)
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
            reset_infos.update(member.envs.take_reset_infos())
        return Collected(
            steps_done=tuple(steps_done),
            infos=infos,
            reset_infos=reset_infos,
            wrapper_states=tuple(tuple(get_state(w) for w in member.wrappers) for member in self._members),
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
            self._channel.report(Activity.ACTING, member.columns.start)
            step_infos = member.step(half, t, request.first_step)
            infos.update(
                ((t, i), info) for i, info in dump_infos(step_infos, member.columns.start, self._channel.report).items()
            )
            half.versions[t, member.columns] = version
            steps_done[index] = t + 1
        return True
