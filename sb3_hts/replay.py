"""A collected rollout as SB3's loop would have seen it, step by step."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import obs_as_tensor

from sb3_hts.acting import to_env_actions
from sb3_hts.collector import Rollout
from sb3_hts.shared_arrays import Array

Observation = npt.NDArray[Any] | dict[str, npt.NDArray[Any]]


def as_observation(arrays: dict[Hashable, Array]) -> Observation:
    """From observations by key to what SB3 passes around: an array, or a dict for Dict spaces."""
    return arrays[None] if None in arrays else arrays  # type: ignore[return-value] # noqa: SIM401


class Replay:
    """The data of one rollout, copied out of the storage; they never change again, so callbacks may keep them.

    :param rollout: What the workers collected.
    :param policy: The learner's policy.
    :param action_space: Of the environments.
    :param gamma: Discount factor, for the bootstrap of truncated episodes.

    ``telling_infos`` are those that say more than that no episode was truncated, ``telling_steps`` their steps.
    """

    def __init__(self, rollout: Rollout, policy: ActorCriticPolicy, action_space: spaces.Space[Any], gamma: float) -> None:
        half = rollout.half
        self.n_steps, self.n_envs = half.dones.shape
        self.observations = {key: array.copy() for key, array in half.observations.items()}
        self.actions = half.actions.copy()
        self.clipped_actions = to_env_actions(policy, action_space, self.actions)
        self.rewards = half.rewards.copy()
        self.dones = half.dones.copy()
        self.values = half.values.copy()
        self.log_probs = half.log_probs.copy()
        self.last_values = half.last_values.copy()
        self.telling_infos = rollout.load_infos()
        self.telling_steps = {t for t, _ in self.telling_infos}
        self._bonuses = self._find_bonuses(rollout, gamma)
        self._device = policy.device
        self._discrete = isinstance(action_space, spaces.Discrete)

    def _find_bonuses(self, rollout: Rollout, gamma: float) -> dict[int, dict[int, np.float32]]:
        """By step and environment: the discounted value of the terminal observation where a time limit ended the episode,
        which SB3 adds to the reward (its issue 633)."""
        bonuses: dict[int, dict[int, np.float32]] = {}
        for (t, i), info in self.telling_infos.items():
            truncated = info.get("TimeLimit.truncated", False) and info.get("terminal_observation") is not None
            if self.dones[t, i] and truncated:
                bonuses.setdefault(t, {})[i] = np.float32(gamma) * rollout.half.terminal_values[t, i]
        return bonuses

    def _with_bonus(self, rewards: Array, t: int) -> Array:
        rewards = rewards.copy()
        for i, bonus in self._bonuses.get(t, {}).items():
            rewards[i] += bonus
        return rewards

    def observation(self, t: int) -> Observation:
        """What the policy saw at step ``t``; ``t = n_steps``: what came after the last step."""
        return as_observation({key: array[t] for key, array in self.observations.items()})

    def infos(self, t: int) -> list[dict[str, Any]]:
        """The info dicts of step ``t``; the plain ones are new at each call."""
        return [self.telling_infos.get((t, i), {"TimeLimit.truncated": False}) for i in range(self.n_envs)]

    def value_tensor(self, t: int) -> th.Tensor:
        """Values at step ``t``, ``(n_envs, 1)`` as the policy returns them; ``t = n_steps``: of the last observation."""
        values = self.values[t] if t < self.n_steps else self.last_values
        return th.from_numpy(values).reshape(-1, 1).to(self._device)

    def variables(self, t: int) -> dict[str, Any]:
        """The local variables of SB3's loop at ``on_step`` of step ``t``."""
        return {
            "n_steps": t,
            "obs_tensor": obs_as_tensor(self.observation(t), self._device),
            "actions": self.actions[t],
            "clipped_actions": self.clipped_actions[t],
            "values": self.value_tensor(t),
            "log_probs": th.from_numpy(self.log_probs[t]).to(self._device),
            "new_obs": self.observation(t + 1),
            "rewards": self.rewards[t],
            "dones": self.dones[t],
            "infos": self.infos(t),
        }

    def final_variables(self) -> dict[str, Any]:
        """The local variables of SB3's function that change between the last ``on_step`` and ``on_rollout_end``."""
        return {
            "n_steps": self.n_steps,
            "actions": self._stored_actions(-1),
            "rewards": self._with_bonus(self.rewards[-1], self.n_steps - 1),
            "values": self.value_tensor(self.n_steps),
        }

    def add_to(self, buffer: RolloutBuffer, t: int, step: dict[str, Any], first_episode_starts: npt.NDArray[np.bool_]) -> None:
        """Give step ``t`` to a buffer by its ``add()``.

        :param step: Its :meth:`variables`, as callbacks left them.
        """
        obs: Any = self.observation(t)
        starts = self.dones[t - 1] if t else first_episode_starts
        rewards = self._with_bonus(step["rewards"], t)
        buffer.add(obs, self._stored_actions(t), rewards, starts, step["values"], step["log_probs"])

    def _stored_actions(self, t: int) -> Array:
        """Actions in the shape that SB3 passes to its buffer."""
        actions: Array = self.actions[t]
        return actions.reshape(-1, 1) if self._discrete else actions

    def fill(self, buffer: RolloutBuffer, first_episode_starts: npt.NDArray[np.bool_]) -> bool:
        """Copy everything into SB3's own buffers at once, except ``pos``.

        :return: False for a subclass, which must be given each step by ``add()``.
        """
        if type(buffer) not in (RolloutBuffer, DictRolloutBuffer):
            return False
        stored = {
            key: array[:-1].reshape(buffer_array.shape).astype(buffer_array.dtype, copy=False)
            for (key, array), buffer_array in zip(self.observations.items(), _arrays(buffer.observations), strict=True)
        }
        buffer.observations = as_observation(stored)  # type: ignore[assignment]
        buffer.actions[...] = self.actions.reshape(buffer.actions.shape)
        buffer.rewards[...] = self.rewards
        for t in self._bonuses:
            buffer.rewards[t] = self._with_bonus(self.rewards[t], t)
        buffer.episode_starts[0] = first_episode_starts
        buffer.episode_starts[1:] = self.dones[:-1]
        buffer.values[...] = self.values
        buffer.log_probs[...] = self.log_probs
        return True


def _arrays(observations: Any) -> list[Array]:
    return list(observations.values()) if isinstance(observations, dict) else [observations]
