"""The worker collector: one rollout at a time, collected by the workers of an ``HTSVecEnv``.

::

    learner's thread                              workers
    ----------------                              -------
    start():  row 0, snapshot 0, Collect  ----->  act, step, act, step, ...
    train():  publish() snapshot 1        ----->      ... (those that need it wait here)
              publish() snapshot 2 ...    ----->      ...
    wait():                               <-----  Collected (infos, wrapper states)
              reads this half                     (the next rollout writes the other half)

It owns the storage, the slots and the publisher. All its methods are the learner's thread's; anyone else who asks the
environments waits inside ``HTSVecEnv``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.util import obs_space_info

from sb3_hts.acting import PolicyTensors, Program, Publisher, dump_policy
from sb3_hts.errors import HTSError
from sb3_hts.interrupts import shielded
from sb3_hts.protocol import Collect, Collected
from sb3_hts.serialization import dumps_by_value
from sb3_hts.shared_arrays import Array, ArraySpec, SharedBlock
from sb3_hts.slots import ParameterSlots
from sb3_hts.storage import N_HALVES, Half, RolloutLayout, RolloutStorage
from sb3_hts.vec_env import HTSVecEnv
from sb3_hts.wrappers import SUPPORTED, channels_last_keys, get_state, make_template, set_state, unwrap

Version = tuple[int, int]
"""``(update, gradient step)``: how many updates are complete, and how many gradient steps of the next one are done."""


@dataclass(frozen=True)
class Rollout:
    """What the workers collected. The arrays of ``half`` are shared memory: valid until the rollout after the next starts.

    :param half: The data.
    :param parameters: The policy's parameters that its first steps were made with; valid as long as ``half``.
    :param infos: ``(t, environment)`` to serialised info dict, for infos that are not the plain one.
    :param steps_done: Per group; ``n_steps`` unless cancelled.
    :param collect_time: Seconds from the launch to the last worker's last step, waits for snapshots included.
    :param wait_time: Seconds that the learner was blocked waiting for it.
    :param step_time: Median seconds that a group took to act and step once, in the slowest worker.
    """

    half: Half
    parameters: list[th.Tensor]
    infos: dict[tuple[int, int], bytes]
    steps_done: tuple[int, ...]
    collect_time: float
    wait_time: float
    step_time: float

    @property
    def last_observations(self) -> dict[Hashable, Array]:
        """Copies of the latest observation of each environment."""
        return {key: array[-1].copy() for key, array in self.half.observations.items()}


def why_not_concurrent(env: VecEnv) -> str | None:
    """Why the workers cannot collect for this environment; ``None`` if they can."""
    wrappers, base = unwrap(env)
    if type(base) is not HTSVecEnv:
        return f"{type(base).__name__} is not an HTSVecEnv"
    for wrapper in wrappers:
        if type(wrapper) not in SUPPORTED:
            return f"the wrapper {type(wrapper).__name__} cannot run inside the workers"
    return None


def action_spec(action_space: spaces.Space[Any]) -> ArraySpec:
    """Shape and dtype of a single action as SB3's distributions return it."""
    integral = isinstance(action_space, (spaces.Discrete, spaces.MultiDiscrete))
    assert action_space.shape is not None
    return ArraySpec(tuple(action_space.shape), np.dtype(np.int64 if integral else np.float32))


class WorkerCollector:
    """See the module's docstring.

    :param env: An ``HTSVecEnv``, bare or under supported wrappers.
    :param policy: The learner's policy; its parameters are read at each :meth:`start` and :meth:`publish`.
    :param n_steps: Steps per environment and rollout.
    :param n_snapshots: Most snapshots per rollout.
    :param noise_key: See :func:`sb3_hts.seeding.stream_seed`.
    :param sde_sample_freq: As in SB3, ``None`` without gSDE.
    """

    def __init__(
        self,
        env: VecEnv,
        policy: BasePolicy,
        n_steps: int,
        n_snapshots: int,
        noise_key: int,
        sde_sample_freq: int | None = None,
    ) -> None:
        self._wrappers, base = unwrap(env)
        assert isinstance(base, HTSVecEnv)
        self._workforce = base.workforce
        self._placement = base.workforce.placement
        self._learner = threading.current_thread()
        keys, shapes, dtypes = obs_space_info(env.observation_space)
        observations: dict[Hashable, ArraySpec] = {key: ArraySpec(tuple(shapes[key]), np.dtype(dtypes[key])) for key in keys}
        layout = RolloutLayout(n_steps, env.num_envs, observations, action_spec(env.action_space))
        tensors = PolicyTensors(policy)
        self._max_snapshots = n_snapshots
        slots = ParameterSlots(tensors.nbytes, N_HALVES * n_snapshots)
        storage_block = SharedBlock(layout.nbytes)
        self._storage = RolloutStorage(layout, storage_block)
        self._publisher = Publisher(tensors, slots)
        program = Program(
            layout=layout,
            wrappers=tuple(make_template(wrapper) for wrapper in self._wrappers),
            policy=dump_policy(policy, tensors),
            tensors=tuple(tensors.specs),
            slot_nbytes=tensors.nbytes,
            n_slots=slots.n_slots,
            noise_key=noise_key,
            action_space=env.action_space,
            channels_last=channels_last_keys(self._wrappers),
            sde_sample_freq=sde_sample_freq,
        )
        self.shared_nbytes = storage_block.nbytes + slots.block.nbytes
        self._workforce.configure_rollouts(self, dumps_by_value(program), storage_block, slots.block)
        for block in (storage_block, slots.block):
            block.release_descriptor()
        self._half = 0
        self.n_snapshots = self._n_published = 0
        self._launched_at = 0.0
        self._version: Version = (0, 0)
        self.in_flight = False

    @property
    def n_unpublished(self) -> int:
        """Snapshots that the rollout in flight still waits for."""
        return self.n_snapshots - self._n_published if self.in_flight else 0

    def start(
        self,
        observations: npt.NDArray[Any] | dict[str, npt.NDArray[Any]],
        first_step: int,
        n_snapshots: int,
        version: Version,
    ) -> None:
        """Publish the current parameters as snapshot 0 and launch a rollout.

        :param observations: What the policy sees first: ``(n_envs, ...)``, by key for Dict spaces.
        :param first_step: Global step of the rollout's first step.
        :param n_snapshots: How many snapshots this rollout uses, the first included.
        :param version: Of the current parameters.
        """
        self._half = (self._half + 1) % N_HALVES
        half = self._storage.halves[self._half]
        for key, array in half.observations.items():
            array[0] = observations if key is None else observations[key]  # type: ignore[call-overload, index]
        self.n_snapshots, self._n_published, self._version = n_snapshots, 1, version
        first_slot = self._half * self._max_snapshots
        self._publisher.write(first_slot, version)
        states = [get_state(wrapper) for wrapper in self._wrappers]

        def request(serial: int, worker: int) -> Collect:
            return Collect(
                rollout=serial,
                half=self._half,
                first_step=first_step,
                n_snapshots=n_snapshots,
                first_slot=first_slot,
                wrapper_states=tuple(self._states_of(states, group) for group in self._placement.groups_of(worker)),
            )

        self._launched_at = time.monotonic()
        # Together or not at all: a launch that nobody knows of would never be cancelled
        with shielded:
            self._workforce.start_rollout(request, self)
            self.in_flight = True

    def publish(self, version: Version) -> None:
        """Publish the current parameters as the next snapshot of the rollout in flight; only between gradient steps."""
        self._version = version
        self._publisher.write(self._half * self._max_snapshots + self._n_published, version)
        self._workforce.announce_snapshot(self._n_published)
        self._n_published += 1

    def publish_rest(self, version: Version) -> None:
        """Publish the current parameters as all remaining snapshots."""
        while self.n_unpublished:
            self.publish(version)

    def wait(self) -> Rollout:
        """Wait for the rollout in flight.

        :raises WorkerError: If a worker failed.
        """
        # If train() has not been ours, nobody else will publish what the workers wait for
        self.publish_rest(self._version)
        pool = self._workforce.pool
        blocked_before = pool.blocked_time
        replies = self._workforce.finish_rollout()
        rollout = self._assemble(replies, pool.blocked_time - blocked_before)
        self.in_flight = False
        return rollout

    def _assemble(self, replies: list[Collected], wait_time: float) -> Rollout:
        infos = [item for reply in replies for item in reply.infos.items()]
        return Rollout(
            half=self._storage.halves[self._half],
            parameters=self._publisher.parameters(self._half * self._max_snapshots),
            infos=dict(infos),
            steps_done=tuple(steps for reply in replies for steps in reply.steps_done),
            collect_time=max(reply.finished_at for reply in replies) - self._launched_at,
            wait_time=wait_time,
            step_time=max(reply.step_time for reply in replies),
        )

    def cancel(self) -> Rollout | None:
        """Stop the rollout in flight at a step boundary.

        :return: The unfinished rollout, whose last observations are the current ones; ``None`` if none was in flight.
        """
        if not self.in_flight:
            return None
        self._n_published = self.n_snapshots  # nobody waits for snapshots any more
        self._workforce.cancel_rollout()
        return self.wait()

    def last_dones(self, rollout: Rollout, before: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Which environments begin an episode with their latest observation.

        :param before: The same as of the rollout's launch.
        """
        dones = before.copy()
        for group, steps in enumerate(rollout.steps_done):
            if steps:
                columns = self._placement.columns_of(group)
                dones[columns] = rollout.half.dones[steps - 1, columns]
        return dones

    def release(self) -> None:
        """Give the memory back. The environments stay as they are; after a failure they are gone already."""
        with suppress(HTSError):
            self._workforce.release_rollouts(self)

    def before_waiting(self) -> None:
        """Publish what the workers still need: if the learner's thread is the one that waits, nobody else will."""
        if threading.current_thread() is self._learner:
            self.publish_rest(self._version)

    def after_gathering(self, replies: Sequence[Collected]) -> None:
        """Bring the state of the main process's wrappers up to date."""
        for worker, reply in enumerate(replies):
            for group, states in zip(self._placement.groups_of(worker), reply.wrapper_states, strict=True):
                for wrapper, state in zip(self._wrappers, states, strict=True):
                    set_state(wrapper, state, self._placement.columns_of(group))

    def _states_of(self, states: list[Any], group: int) -> tuple[Any, ...]:
        return tuple([array[self._placement.columns_of(group)] for array in state] for state in states)
