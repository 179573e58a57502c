"""The actor: policy, observation and noise stream in, action out."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import StateDependentNoiseDistribution
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_hts.exchange import memory_shape
from sb3_hts.lean_policy import lean_forward
from sb3_hts.replicas import Replica
from sb3_hts.shared_arrays import Array, ArraySpec, empty_aligned
from sb3_hts.storage import Half


@dataclass(frozen=True)
class Manner:
    """How to act, apart from the policy.

    :param actor_class: What acts.
    :param observations: Observation key (``None`` unless the space is a Dict) to the spec of a single observation.
    :param action_space: Of the environments.
    :param channels_last: See :func:`sb3_hts.wrappers.channels_last_keys`.
    :param sde_sample_freq: As in SB3, ``None`` without gSDE.
    """

    actor_class: type[GroupActor]
    observations: dict[Hashable, ArraySpec]
    action_space: spaces.Space[Any]
    channels_last: frozenset[Any]
    sde_sample_freq: int | None

    def env_action_spec(self, policy: ActorCriticPolicy, action: ArraySpec) -> ArraySpec:
        """Of what one environment gets.

        :param action: Of what the policy returns.
        """
        example = np.zeros((1, *action.shape), action.dtype)
        return ArraySpec(action.shape, self.actor_class.to_env(policy, self.action_space, example).dtype)


class GroupActor:
    """Acts for one group: a fixed batch shape, an aligned input, an exploration matrix of its own.

    Subclasses act with policies that need more than observations.

    :param replica: The policy, shared by the groups of a worker.
    :param manner: How to act.
    :param columns: The group's environments.
    """

    def __init__(self, replica: Replica, manner: Manner, columns: slice) -> None:
        self.columns = columns
        self.policy: Any = replica.policy
        self._size = columns.stop - columns.start
        self._replica = replica
        self._forward = lean_forward(replica.policy)
        self._action_space = manner.action_space
        self._sde_sample_freq = manner.sde_sample_freq
        self._exploration: tuple[Any, Any] | None = None
        self._explored_at = -1
        self._inputs = {
            key: input_array(self._size, spec, key in manner.channels_last) for key, spec in manner.observations.items()
        }
        self._tensors = {key: th.from_numpy(array) for key, array in self._inputs.items()}
        self._device = replica.policy.device

    @th.no_grad()
    def act(self, half: Half, t: int, first_step: int) -> Array:
        """One forward, as in SB3's ``collect_rollouts``.

        Reads row ``t`` of the group's observations, and writes row ``t`` of its actions, values and log-probabilities.

        :param first_step: Global step of the rollout's first step.
        :return: What the environments get, ``(size, ...)``.
        """
        self.explore(first_step, t)
        self.seed(first_step + t)
        with self._replica.drawing:
            outputs = self._compute(half, t)
        return self.write(half, t, outputs)

    def seed(self, step: int) -> None:
        """Seed the generator for this group.

        :param step: Global step.
        """
        self._replica.seed(self.columns.start // self._size, step)

    def write(self, half: Half, t: int, outputs: tuple[th.Tensor, th.Tensor, th.Tensor]) -> Array:
        """Write row ``t`` of the group's actions, values and log-probabilities.

        :return: What the environments get, ``(size, ...)``.
        """
        actions, half.values[t, self.columns], half.log_probs[t, self.columns] = (
            tensor.cpu().numpy().reshape(self._size, *shape)
            for tensor, shape in zip(outputs, (half.actions.shape[2:], (), ()), strict=True)
        )
        half.actions[t, self.columns] = actions
        return self.to_env(self.policy, self._action_space, actions)

    def _compute(self, half: Half, t: int) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """Actions, values, log-probabilities."""
        return self._forward(self._load(half, t))

    @th.no_grad()
    def write_last_values(self, half: Half) -> None:
        """Values of the observations after the last step."""
        half.last_values[self.columns] = self._last_values(half).cpu().numpy().reshape(-1)

    def _last_values(self, half: Half) -> th.Tensor:
        values: th.Tensor = self.policy.predict_values(self._load(half, -1))
        return values

    @th.no_grad()
    def write_terminal_value(self, half: Half, t: int, row: int, observation: Any) -> None:
        """Value of a terminal observation, as SB3 bootstraps at a time limit.

        :param row: Which environment of the group.
        """
        obs_tensor = self.policy.obs_to_tensor(observation)[0]
        half.terminal_values[t, self.columns.start + row] = self._terminal_value(half, t, row, obs_tensor)[0].item()

    def _terminal_value(self, half: Half, t: int, row: int, obs_tensor: Any) -> th.Tensor:
        values: th.Tensor = self.policy.predict_values(obs_tensor)
        return values

    @staticmethod
    def to_env(policy: ActorCriticPolicy, action_space: spaces.Space[Any], actions: Array) -> Array:
        """What the environments get for the policy's actions: unscaled or clipped for Box spaces, as in SB3."""
        if not isinstance(action_space, spaces.Box):
            return actions
        if policy.squash_output:
            return np.asarray(policy.unscale_action(actions))
        return np.clip(actions, action_space.low, action_space.high)

    def _load(self, half: Half, t: int) -> Any:
        """The observations of a row as the policy's input."""
        for key, array in self._inputs.items():
            np.copyto(array, half.observations[key][t, self.columns])
        tensors = {key: tensor.to(self._device) for key, tensor in self._tensors.items()}
        return tensors.get(None, tensors)

    def exploration_start(self, t: int) -> int:
        """gSDE: the step at which SB3 would have sampled the exploration matrix that holds at step ``t``."""
        frequency = self._sde_sample_freq or 0
        return t - t % frequency if frequency > 0 else 0

    def is_exploring(self, first_step: int, t: int) -> bool:
        """Whether the exploration matrix that holds at step ``t`` is there, or none is needed."""
        return self._sde_sample_freq is None or self._explored_at == first_step + self.exploration_start(t)

    @th.no_grad()
    def explore(self, first_step: int, t: int) -> None:
        """Make the exploration matrix that holds at step ``t`` the policy's; if it is not there, sample it with the present
        parameters."""
        if self._sde_sample_freq is None:
            return
        distribution = self.policy.action_dist
        assert isinstance(distribution, StateDependentNoiseDistribution)
        if not self.is_exploring(first_step, t):
            self._explored_at = first_step + self.exploration_start(t)
            self.seed(self._explored_at)
            with self._replica.drawing:
                self.policy.reset_noise(self._size)
            self._exploration = (distribution.exploration_mat, distribution.exploration_matrices)
        assert self._exploration is not None
        distribution.exploration_mat, distribution.exploration_matrices = self._exploration


def input_array(size: int, spec: ArraySpec, channels_last: bool) -> Array:
    """A batch of observations, in memory as SB3 would pass it to the policy."""
    array = empty_aligned((size, *memory_shape(spec, channels_last)), spec.dtype)
    return array.transpose(0, 3, 1, 2) if channels_last else array
