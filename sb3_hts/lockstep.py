"""One batch of environments that act and step together: the inner loop of every rollout."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from sb3_hts.acting import GroupActor, to_env_actions
from sb3_hts.storage import Half


class Lockstep:
    """Acts for a stack of environments, steps it, and writes down what happens.

    :param stack: The environments, with their wrappers.
    :param columns: Their place among all environments.
    :param actor: Acts for them.
    :param action_space: Of the environments.
    """

    def __init__(self, stack: VecEnv, columns: slice, actor: GroupActor, action_space: spaces.Space[Any]) -> None:
        self.stack = stack
        self.columns = columns
        self._actor = actor
        self._action_space = action_space

    def step(self, half: Half, t: int, first_step: int) -> list[dict[str, Any]]:
        """Act and step once; writes row ``t`` of the columns, and the observations of row ``t + 1``.

        :param first_step: Global step of the rollout's first step.
        :return: The info dicts.
        """
        columns = self.columns
        observations = {key: array[t, columns] for key, array in half.observations.items()}
        actions, half.values[t, columns], half.log_probs[t, columns] = self._actor.act(observations, first_step, t)
        half.actions[t, columns] = actions
        new_obs, rewards, dones, infos = self.stack.step(to_env_actions(self._actor.policy, self._action_space, actions))
        half.rewards[t, columns] = rewards
        half.dones[t, columns] = dones
        for key, array in half.observations.items():
            array[t + 1, columns] = new_obs if key is None else new_obs[key]  # type: ignore[call-overload, index]
        if half.dones[t, columns].any():
            self._bootstrap(half, t, infos)
        return infos

    def _bootstrap(self, half: Half, t: int, infos: list[dict[str, Any]]) -> None:
        for row in np.flatnonzero(half.dones[t, self.columns]):
            observation = infos[row].get("terminal_observation")
            if observation is not None and infos[row].get("TimeLimit.truncated", False):
                half.terminal_values[t, self.columns.start + row] = self._actor.terminal_value(observation)

    def finish(self, half: Half, steps_done: int) -> None:
        """Write the value of the last observation; after a cancellation, move the last observation to where it belongs."""
        if steps_done == len(half.dones):
            last = {key: array[-1, self.columns] for key, array in half.observations.items()}
            half.last_values[self.columns] = self._actor.values(last)
            return
        for array in half.observations.values():
            array[-1, self.columns] = array[steps_done, self.columns]
