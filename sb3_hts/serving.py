"""How an actor serves groups: which of them share a forward, and with which parameters.

Whatever is ready when, and whichever actor serves it, the result is the same: a group's actions depend on its observations,
on the snapshot of its step and on its noise alone, and forwards have a constant shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_hts.acting import Manner, input_array
from sb3_hts.exchange import Exchange
from sb3_hts.lean_policy import Parameters, lean_network, lean_sampler
from sb3_hts.replicas import Replica
from sb3_hts.shared_arrays import Array
from sb3_hts.storage import Half, RolloutStorage


class ParameterMirror:
    """The published slots, as seen from the device that acts.

    :param published: The bytes of each slot; read only.
    :param versions: Of the slots.
    :param device: If it is not theirs, each snapshot is copied there once, when it is first needed.
    """

    def __init__(self, published: Sequence[th.Tensor], versions: npt.NDArray[np.int64], device: th.device) -> None:
        self.versions = versions
        self._published = published
        self.slots = [slot.to(device) for slot in published]
        self._remote = self.slots[0] is not published[0]
        self._fetched_for = [-1] * len(published)

    def fetch(self, slot: int, rollout: int) -> None:
        """Make sure that a published snapshot is there.

        :param rollout: A number that no other rollout has: a slot stays as it is for one.
        """
        if self._remote and self._fetched_for[slot] != rollout:
            self.slots[slot].copy_(self._published[slot])
            self._fetched_for[slot] = rollout


@dataclass(frozen=True)
class Job:
    """The rollout under way, see :class:`sb3_hts.collector.Job`."""

    half: Half
    first_step: int
    n_snapshots: int
    first_slot: int


class Server(ABC):
    """Serves all groups of the environments.

    :param replica: The policy.
    :param mirror: The slots that it is a view of.
    :param manner: How to act.
    :param storage: Of the rollouts: the state buffer.
    :param exchange: With the executors.
    :param report: Told the first environment of a group that is about to be served, -1 for all together.
    """

    def __init__(
        self,
        replica: Replica,
        mirror: ParameterMirror,
        manner: Manner,
        storage: RolloutStorage,
        exchange: Exchange,
        report: Callable[[int], None],
    ) -> None:
        self._replica = replica
        self._mirror = mirror
        self._storage = storage
        self._exchange = exchange
        self._report = report
        n_envs, n_groups = storage.layout.n_envs, len(exchange.steps)
        size = n_envs // n_groups
        self._actors = [manner.actor_class(replica, manner, slice(first, first + size)) for first in range(0, n_envs, size)]

    def serve(self, groups: Sequence[int]) -> Iterator[int]:
        """Write the answers for groups that ask; gives each of them when it is done.

        What earlier rollouts left is never taken for what groups ask for now: the main process describes a rollout before it
        launches it.
        """
        half, first_step, n_snapshots, first_slot = self._exchange.job.tolist()
        job = Job(self._storage.halves[half], first_step, n_snapshots, first_slot)
        for group in groups:
            self._value_terminal_observations(job, group)
        yield from self._serve(job, groups)

    @abstractmethod
    def _serve(self, job: Job, groups: Sequence[int]) -> Iterator[int]:
        """As :meth:`serve`, once terminal observations have been valued."""

    def _slot(self, job: Job, t: int) -> int:
        """Where the parameters of step ``t`` are; the last observations are valued with those of the last step."""
        n_steps = self._storage.layout.n_steps
        return job.first_slot + min(t, n_steps - 1) * job.n_snapshots // n_steps

    def _bind(self, job: Job, t: int) -> None:
        slot = self._slot(job, t)
        self._mirror.fetch(slot, job.first_step)
        self._replica.bind(slot)

    def _turn_to(self, job: Job, group: int, t: int) -> None:
        """Be ready for a forward for one group, whatever has been served before."""
        self._report(self._actors[group].columns.start)
        self._bind(job, t)

    def _value_terminal_observations(self, job: Job, group: int) -> None:
        actor, exchange = self._actors[group], self._exchange
        for row in np.flatnonzero(exchange.truncated[actor.columns]).tolist():
            t = int(exchange.steps[group]) - 1
            self._turn_to(job, group, t)
            actor.seed(job.first_step + t)
            arrays: Any = {key: array[actor.columns.start + row, ...] for key, array in exchange.terminal.items()}
            actor.write_terminal_value(job.half, t, row, arrays.get(None, arrays))
        exchange.truncated[actor.columns] = False

    def _answer(self, job: Job, group: int, t: int, env_actions: Array) -> None:
        columns = self._actors[group].columns
        self._exchange.env_actions[columns] = env_actions
        job.half.versions[t, columns] = self._mirror.versions[self._slot(job, t)]


class GroupServer(Server):
    """One forward for each group: works with any policy."""

    def _serve(self, job: Job, groups: Sequence[int]) -> Iterator[int]:
        for group in groups:
            actor, t = self._actors[group], int(self._exchange.steps[group])
            if t < self._storage.layout.n_steps and not actor.is_exploring(job.first_step, t):
                # Perhaps another actor served the step before
                self._turn_to(job, group, actor.exploration_start(t))
                actor.explore(job.first_step, t)
            self._turn_to(job, group, t)
            if t == self._storage.layout.n_steps:
                actor.seed(job.first_step + t)
                actor.write_last_values(job.half)
            else:
                self._answer(job, group, t, actor.act(job.half, t, job.first_step))
            yield group


class FullServer(Server):
    """One forward for each snapshot in use, of a batch in which every environment has its own row, ready or not.

    For policies that divide into a network, whose rows do not depend on each other, and what draws from its distribution:
    :func:`sb3_hts.lean_policy.lean_network`.
    """

    def __init__(self, replica: Replica, mirror: ParameterMirror, manner: Manner, *others: Any) -> None:
        super().__init__(replica, mirror, manner, *others)
        network = lean_network(replica.policy)
        assert network is not None
        self._network = network
        self._sample = lean_sampler(replica.policy)
        self._inputs = {
            key: input_array(self._storage.layout.n_envs, spec, key in manner.channels_last)
            for key, spec in manner.observations.items()
        }
        for array in self._inputs.values():
            array[...] = 0  # of every space, so that rows that have not been ready yet can be forwarded too
        self._tensors = {key: th.from_numpy(array) for key, array in self._inputs.items()}

    def _serve(self, job: Job, groups: Sequence[int]) -> Iterator[int]:
        by_slot: dict[int, list[int]] = {}
        for group in groups:
            by_slot.setdefault(self._slot(job, int(self._exchange.steps[group])), []).append(group)
        for members in by_slot.values():
            yield from self._serve_together(job, members)

    @th.no_grad()
    def _forward(self, job: Job, groups: Sequence[int]) -> tuple[Parameters, th.Tensor]:
        for group in groups:
            columns = self._actors[group].columns
            for key, array in self._inputs.items():
                array[columns] = job.half.observations[key][self._exchange.steps[group], columns]
        device = self._replica.policy.device
        tensors: Any = {key: tensor.to(device) for key, tensor in self._tensors.items()}
        parameters, values = self._network(tensors.get(None, tensors))
        return tuple(part.cpu() for part in parameters), values.cpu()

    def _serve_together(self, job: Job, groups: Sequence[int]) -> Iterator[int]:
        """Serve groups whose steps use the same snapshot."""
        self._report(-1)
        self._bind(job, int(self._exchange.steps[groups[0]]))
        parameters, values = self._forward(job, groups)
        for group in groups:
            self._finish(job, group, parameters, values)
            yield group

    @th.no_grad()
    def _finish(self, job: Job, group: int, parameters: Parameters, values: th.Tensor) -> None:
        actor, t = self._actors[group], int(self._exchange.steps[group])
        columns = actor.columns
        self._report(columns.start)
        if t == self._storage.layout.n_steps:
            job.half.last_values[columns] = values[columns].numpy().reshape(-1)
            return
        actor.seed(job.first_step + t)
        actions, log_probs = self._sample(tuple(part[columns] for part in parameters))
        self._answer(job, group, t, actor.write(job.half, t, (actions, values[columns], log_probs)))
