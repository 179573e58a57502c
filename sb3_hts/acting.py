"""The actor: policy, observation and noise stream in, action out."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import StateDependentNoiseDistribution

from sb3_hts.lean_policy import lean_forward
from sb3_hts.replicas import Replica
from sb3_hts.shared_arrays import Array, ArraySpec, empty_aligned

Observations = Mapping[Hashable, Array]


@dataclass(frozen=True)
class Manner:
    """How to act, apart from the policy.

    :param observations: Observation key (``None`` unless the space is a Dict) to the spec of a single observation.
    :param action_space: Of the environments.
    :param channels_last: See :func:`sb3_hts.wrappers.channels_last_keys`.
    :param sde_sample_freq: As in SB3, ``None`` without gSDE.
    """

    observations: dict[Hashable, ArraySpec]
    action_space: spaces.Space[Any]
    channels_last: frozenset[Any]
    sde_sample_freq: int | None


class GroupActor:
    """Acts for one group: a fixed batch shape, an aligned input, an exploration matrix of its own.

    :param replica: The policy, shared by the groups of a worker.
    :param manner: How to act.
    :param group: Index of the group.
    :param size: Number of environments in it.
    """

    def __init__(self, replica: Replica, manner: Manner, group: int, size: int) -> None:
        self._replica = replica
        self.policy = replica.policy
        self._forward = lean_forward(replica.policy)
        self._group = group
        self._size = size
        self._sde_sample_freq = manner.sde_sample_freq
        self._exploration: tuple[Any, Any] | None = None
        self._inputs = {
            key: _input_array(size, spec, key in manner.channels_last) for key, spec in manner.observations.items()
        }
        tensors = {key: th.from_numpy(array) for key, array in self._inputs.items()}
        self._obs_tensor: Any = tensors.get(None, tensors)
        self._device = replica.policy.device

    @th.no_grad()
    def act(self, observations: Observations, first_step: int, t: int) -> tuple[Array, Array, Array]:
        """One forward, as in SB3's ``collect_rollouts``.

        :param observations: By key, ``(size, ...)`` each.
        :param first_step: Global step of the rollout's first step.
        :param t: Step within the rollout.
        :return: Actions ``(size, ...)``, values ``(size,)``, log-probabilities ``(size,)``.
        """
        with self._replica.drawing:
            if self._sde_sample_freq is not None:
                self._explore(first_step, t)
            self._replica.seed(self._group, first_step + t)
            actions, values, log_probs = self._forward(self._load(observations))
        return actions.cpu().numpy(), values.cpu().numpy().reshape(-1), log_probs.cpu().numpy()

    @th.no_grad()
    def values(self, observations: Observations) -> Array:
        """Values ``(size,)`` of the given observations."""
        return self.policy.predict_values(self._load(observations)).cpu().numpy().reshape(-1)

    @th.no_grad()
    def terminal_value(self, observation: Any) -> float:
        """Value of one terminal observation, as SB3 bootstraps at a time limit."""
        obs_tensor = self.policy.obs_to_tensor(observation)[0]
        return self.policy.predict_values(obs_tensor)[0].item()

    def _load(self, observations: Observations) -> Any:
        for key, array in self._inputs.items():
            np.copyto(array, observations[key])
        if self._device.type == "cpu":
            return self._obs_tensor
        if isinstance(self._obs_tensor, dict):
            return {key: tensor.to(self._device) for key, tensor in self._obs_tensor.items()}
        return self._obs_tensor.to(self._device)

    def _explore(self, first_step: int, t: int) -> None:
        """gSDE: this group's exploration matrix, sampled anew when SB3 would."""
        distribution = self.policy.action_dist
        assert isinstance(distribution, StateDependentNoiseDistribution)
        frequency = self._sde_sample_freq or 0
        if t == 0 or (frequency > 0 and t % frequency == 0):
            self._replica.seed(self._group, first_step + t)
            self.policy.reset_noise(self._size)
            self._exploration = (distribution.exploration_mat, distribution.exploration_matrices)
        assert self._exploration is not None
        distribution.exploration_mat, distribution.exploration_matrices = self._exploration


def _input_array(size: int, spec: ArraySpec, channels_last: bool) -> Array:
    if not channels_last:
        return empty_aligned((size, *spec.shape), spec.dtype)
    channels, height, width = spec.shape
    return empty_aligned((size, height, width, channels), spec.dtype).transpose(0, 3, 1, 2)


def to_env_actions(policy: Any, action_space: spaces.Space[Any], actions: Array) -> Array:
    """What the environments get for the policy's actions: unscaled or clipped for Box spaces, as in SB3."""
    if not isinstance(action_space, spaces.Box):
        return actions
    if policy.squash_output:
        return np.asarray(policy.unscale_action(actions))
    return np.clip(actions, action_space.low, action_space.high)
