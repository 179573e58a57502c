"""A collected rollout as SB3's loop would have seen it, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import obs_as_tensor

from sb3_hts.collector import Position, Rollout, as_observation
from sb3_hts.policy_kinds import PolicyKind, Step
from sb3_hts.shared_arrays import Array


class Replay:
    """The data of one rollout, copied out of the storage; they never change again, so callbacks may keep them.

    :param rollout: What the workers collected.
    :param policy: The learner's policy.
    :param action_space: Of the environments.
    :param gamma: Discount factor, for the bootstrap of truncated episodes.
    :param kind: Of the policy.

    ``telling_infos`` are those that say more than that no episode was truncated, ``telling_steps`` their steps.
    """

    def __init__(
        self,
        rollout: Rollout,
        policy: ActorCriticPolicy,
        action_space: spaces.Space[Any],
        gamma: float,
        kind: PolicyKind,
    ) -> None:
        half = rollout.half
        self.n_steps, self.n_envs = half.dones.shape
        self.observations = {key: array.copy() for key, array in half.observations.items()}
        self.actions = half.actions.copy()
        self.clipped_actions = kind.actor_class.to_env(policy, action_space, self.actions)
        self.rewards = half.rewards.copy()
        self.episode_starts = np.concatenate([half.episode_starts[None], half.dones])
        self.dones = self.episode_starts[1:]  # callbacks may change them in place
        self.extras = {name: array.copy() for name, array in half.extras.items()}
        self.memory = {name: array.copy() for name, array in half.memory.items()}
        self.values = half.values.copy()
        self.log_probs = half.log_probs.copy()
        self.last_values = half.last_values.copy()
        self.telling_infos = rollout.load_infos()
        self.telling_steps = {t for t, _ in self.telling_infos}
        self._bonuses = self._find_bonuses(rollout, gamma)
        self.device = policy.device
        self._kind = kind
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

    def position(self, t: int) -> Position:
        """Before step ``t``; ``t = n_steps``: after the last step."""
        observations = as_observation({key: array[t] for key, array in self.observations.items()})
        return Position(observations, self.episode_starts[t], {name: array[t] for name, array in self.memory.items()})

    def step(self, t: int) -> Step:
        """Step ``t``, as kinds of policies look at it."""
        extras = {name: array[t] for name, array in self.extras.items()}
        return Step(self.position(t), self.position(t + 1), extras, self.device)

    def infos(self, t: int) -> list[dict[str, Any]]:
        """The info dicts of step ``t``; the plain ones are new at each call."""
        return [self.telling_infos.get((t, i), {"TimeLimit.truncated": False}) for i in range(self.n_envs)]

    def value_tensor(self, t: int) -> th.Tensor:
        """Values at step ``t``, ``(n_envs, 1)`` as the policy returns them; ``t = n_steps``: of the last observation."""
        values = self.values[t] if t < self.n_steps else self.last_values
        return th.from_numpy(values).reshape(-1, 1).to(self.device)

    def variables(self, t: int) -> dict[str, Any]:
        """The local variables of SB3's loop at ``on_step`` of step ``t``."""
        return {
            "n_steps": t,
            "obs_tensor": obs_as_tensor(self.position(t).observations, self.device),
            "actions": self.actions[t],
            "clipped_actions": self.clipped_actions[t],
            "values": self.value_tensor(t),
            "log_probs": th.from_numpy(self.log_probs[t]).to(self.device),
            "new_obs": self.position(t + 1).observations,
            "rewards": self.rewards[t],
            "dones": self.dones[t],
            "infos": self.infos(t),
            **self._kind.variables(self.step(t)),
        }

    def final_variables(self) -> dict[str, Any]:
        """The local variables of SB3's function that change between the last ``on_step`` and ``on_rollout_end``."""
        return {
            "n_steps": self.n_steps,
            "actions": self._stored_actions(-1),
            "rewards": self._with_bonus(self.rewards[-1], self.n_steps - 1),
            "values": self.value_tensor(self.n_steps),
        }

    def add_to(self, buffer: RolloutBuffer, t: int, step: dict[str, Any]) -> None:
        """Give step ``t`` to a buffer by its ``add()``.

        :param step: Its :meth:`variables`, as callbacks left them.
        """
        obs: Any = self.position(t).observations
        rewards = self._with_bonus(step["rewards"], t)
        buffer.add(
            obs,
            self._stored_actions(t),
            rewards,
            self.episode_starts[t],
            step["values"],
            step["log_probs"],
            **self._kind.stored(self.step(t)),
        )

    def _stored_actions(self, t: int) -> Array:
        """Actions in the shape that SB3 passes to its buffer."""
        actions: Array = self.actions[t]
        return actions.reshape(-1, 1) if self._discrete else actions

    def fill(self, buffer: RolloutBuffer) -> bool:
        """Copy everything into SB3's own buffers at once, except ``pos``.

        :return: False for a subclass, which must be given each step by ``add()``.
        """
        if type(buffer) not in (RolloutBuffer, DictRolloutBuffer):
            return False
        stored = {}
        for key, array in self.observations.items():
            place: Any = buffer.observations if key is None else buffer.observations[key]  # type: ignore[call-overload]
            stored[key] = array[:-1].reshape(place.shape).astype(place.dtype, copy=False)
        buffer.observations = as_observation(stored)  # type: ignore[assignment]
        buffer.actions[...] = self.actions.reshape(buffer.actions.shape)
        buffer.rewards[...] = self.rewards
        for t in self._bonuses:
            buffer.rewards[t] = self._with_bonus(self.rewards[t], t)
        buffer.episode_starts[...] = self.episode_starts[:-1]
        buffer.values[...] = self.values
        buffer.log_probs[...] = self.log_probs
        return True
