"""What collects rollouts: one at a time, while the learner trains on the one before.

::

    learner's thread                              those who collect
    ----------------                              -----------------
    start():  row 0, snapshot 0           ----->  act, step, act, step, ...
    train():  publish() snapshot 1        ----->      ... (those that need it wait here)
              publish() snapshot 2 ...    ----->      ...
    wait():                               <-----  the end, and the infos
              reads this half                     (the next rollout writes the other half)

A collector owns the storage, the slots and the publisher. All its methods are the learner's thread's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces

from sb3_hts.acting import Manner
from sb3_hts.inference import Central
from sb3_hts.replicas import Publisher
from sb3_hts.shared_arrays import Array, ArraySpec
from sb3_hts.storage import N_HALVES, Half, RolloutLayout, RolloutStorage

Version = tuple[int, int]
"""``(update, gradient step)``: how many updates are complete, and how many gradient steps of the next one are done."""

Infos = dict[tuple[int, int], dict[str, Any]]
"""``(t, environment)`` to info dict, for infos that are not the plain one."""


Observation = npt.NDArray[Any] | dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Position:
    """Where the environments, and who acts in them, are between two steps.

    :param observations: What the policy sees next: ``(n_envs, ...)``, by key for Dict spaces.
    :param episode_starts: Whether it begins an episode, ``(n_envs,)`` bool.
    :param memory: What the policy remembers, ``(n_envs, ...)`` each.
    """

    observations: Observation
    episode_starts: npt.NDArray[np.bool_]
    memory: dict[str, Array] = field(default_factory=dict)


def as_observation(arrays: dict[Hashable, Array]) -> Observation:
    """From observations by key to what SB3 passes around: an array, or a dict for Dict spaces."""
    return arrays[None] if None in arrays else arrays  # type: ignore[return-value] # noqa: SIM401


@dataclass(frozen=True)
class Rollout:
    """What was collected. The arrays of ``half`` are valid until the rollout after the next starts.

    :param half: The data.
    :param parameters: The policy's parameters that its first steps were made with; valid as long as ``half``.
    :param load_infos: Gives the info dicts; call it once.
    :param groups: Environments of each group.
    :param steps_done: Per group; ``n_steps`` unless cancelled.
    :param collect_time: Seconds from the launch to the last step, waits for snapshots included.
    :param wait_time: Seconds that the learner was blocked waiting for it.
    """

    half: Half
    parameters: list[th.Tensor]
    load_infos: Callable[[], Infos]
    groups: tuple[slice, ...]
    steps_done: tuple[int, ...]
    collect_time: float
    wait_time: float

    def end(self) -> Position:
        """Where the environments are now; copies."""
        dones = self.half.episode_starts.copy()
        for columns, steps in zip(self.groups, self.steps_done, strict=True):
            if steps:
                dones[columns] = self.half.dones[steps - 1, columns]
        observations = {key: array[-1].copy() for key, array in self.half.observations.items()}
        memory = {name: array[-1].copy() for name, array in self.half.memory.items()}
        return Position(as_observation(observations), dones, memory)


@dataclass(frozen=True)
class Plan:
    """What rollouts of one ``learn()`` look like.

    :param layout: Of the rollout storage.
    :param manner: How to act.
    :param n_snapshots: Most snapshots per rollout.
    :param noise_key: See :func:`sb3_hts.seeding.stream_seed`.
    :param central: Who acts for the workers; ``None``: they do themselves.
    """

    layout: RolloutLayout
    manner: Manner
    n_snapshots: int
    noise_key: int
    central: Central | None = None

    @property
    def n_slots(self) -> int:
        return N_HALVES * self.n_snapshots


def specs_of(arrays: dict[Any, Array], fractional: Collection[Any] = ()) -> dict[Any, ArraySpec]:
    """Specs of what belongs to one environment.

    :param arrays: ``(n_envs, ...)`` each.
    :param fractional: Keys of those that must be able to hold float32, too.
    """
    return {
        key: ArraySpec(array.shape[1:], np.result_type(array, np.float32) if key in fractional else array.dtype)
        for key, array in arrays.items()
    }


def action_spec(action_space: spaces.Space[Any], integral: tuple[type[spaces.Space[Any]], ...]) -> ArraySpec:
    """Shape and dtype of a single action as the policy's distributions return it.

    :param integral: Spaces whose actions are int64; those of others are float32.
    """
    assert action_space.shape is not None
    return ArraySpec(tuple(action_space.shape), np.dtype(np.int64 if isinstance(action_space, integral) else np.float32))


@dataclass(frozen=True)
class Job:
    """One rollout to collect.

    :param half: Which half of the storage to write.
    :param first_step: Global step (never restarts) of the rollout's first step; part of the noise key.
    :param n_snapshots: Step ``t`` acts with snapshot ``t * n_snapshots // n_steps``.
    :param first_slot: Slot of snapshot 0; the others follow.
    """

    half: int
    first_step: int
    n_snapshots: int
    first_slot: int


class Collector(ABC):
    """See the module's docstring.

    :param plan: What to collect.
    :param storage: Both halves.
    :param publisher: Of the learner's policy.
    """

    description: str
    """What collects, in a few words."""

    def __init__(self, plan: Plan, storage: RolloutStorage, publisher: Publisher) -> None:
        self._plan = plan
        self._storage = storage
        self._publisher = publisher
        self._half = 0
        self._version: Version = (0, 0)
        self._n_published = 0
        self.n_snapshots = 0
        self.in_flight = False

    @property
    def advice(self) -> str | None:
        """What would be faster, judging by the latest rollout."""
        return None

    def predict_here(self, *args: Any, **kwargs: Any) -> Any:
        """Predict with the behaviour policy, if it is one of the environments being stepped that asks; ``None`` otherwise."""
        return None

    @property
    def n_unpublished(self) -> int:
        """Snapshots that the rollout in flight still waits for."""
        return self.n_snapshots - self._n_published if self.in_flight else 0

    def start(
        self,
        position: Position,
        first_step: int,
        n_snapshots: int,
        version: Version,
    ) -> None:
        """Publish the current parameters as snapshot 0 and launch a rollout.

        :param position: Where the environments are.
        :param first_step: Global step of the rollout's first step.
        :param n_snapshots: How many snapshots this rollout uses, the first included.
        :param version: Of the current parameters.
        """
        self._half = (self._half + 1) % N_HALVES
        half = self._storage.halves[self._half]
        for key, array in half.observations.items():
            array[0] = position.observations if key is None else position.observations[key]  # type: ignore[call-overload, index]
        for name, array in half.memory.items():
            array[0] = position.memory[name]
        half.episode_starts[:] = position.episode_starts
        self.n_snapshots, self._n_published, self._version = n_snapshots, 1, version
        job = Job(self._half, first_step, n_snapshots, self._half * self._plan.n_snapshots)
        self._publisher.write(job.first_slot, version)
        self._launch(job)

    def publish(self, version: Version) -> None:
        """Publish the current parameters as the next snapshot of the rollout in flight; only between gradient steps."""
        self._version = version
        self._publisher.write(self._half * self._plan.n_snapshots + self._n_published, version)
        self._announce(self._n_published)
        self._n_published += 1

    def publish_rest(self, version: Version) -> None:
        """Publish the current parameters as all remaining snapshots."""
        while self.n_unpublished:
            self.publish(version)

    def wait(self) -> Rollout:
        """Wait for the rollout in flight.

        :raises WorkerError: If a worker failed.
        """
        # If train() has not been ours, nobody else will publish what the others wait for
        self.publish_rest(self._version)
        rollout = self._finish()
        self.in_flight = False
        return rollout

    def cancel(self) -> Rollout | None:
        """Stop the rollout in flight at a step boundary.

        :return: The unfinished rollout, whose last observations are the current ones; ``None`` if none was in flight.
        """
        if not self.in_flight:
            return None
        self._n_published = self.n_snapshots  # nobody waits for snapshots any more
        rollout = self._stop()
        self.in_flight = False
        return rollout

    @property
    def _data(self) -> tuple[Half, list[th.Tensor]]:
        """The half being written, and the parameters of its first steps."""
        return self._storage.halves[self._half], self._publisher.parameters(self._half * self._plan.n_snapshots)

    @abstractmethod
    def _launch(self, job: Job) -> None:
        """Let the others begin, and set ``in_flight``: together or not at all."""

    @abstractmethod
    def _announce(self, snapshot: int) -> None:
        """Say that a snapshot is in its slot."""

    @abstractmethod
    def _finish(self) -> Rollout:
        """Wait for the end of the rollout."""

    @abstractmethod
    def _stop(self) -> Rollout:
        """Make the others stop at the next step boundary, and wait for that."""

    @abstractmethod
    def note_episodes(self, ends: Infos) -> None:
        """Write down the episodes that ended in a rollout, as wrappers in the main process would have done.

        :param ends: The infos of their last steps.
        """

    @abstractmethod
    def release(self) -> None:
        """Give back what the collector holds. The environments stay as they are."""
