"""One batch of environments that act and step together: the inner loop of every rollout."""

from __future__ import annotations

from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from sb3_hts.acting import GroupActor
from sb3_hts.storage import Half


class Lockstep:
    """Acts for a stack of environments, steps it, and writes down what happens.

    :param stack: The environments, with their wrappers.
    :param actor: Acts for them.
    """

    def __init__(self, stack: VecEnv, actor: GroupActor) -> None:
        self.stack = stack
        self.columns = actor.columns
        self._actor = actor

    def read_extras(self, half: Half, t: int) -> None:
        """Write what else belongs to step ``t``, from the environments' methods of that name."""
        for name, array in half.extras.items():
            for index, value in enumerate(self.stack.env_method(name), start=self.columns.start):
                row = array[t, index]
                if np.size(value) != row.size:
                    raise ValueError(
                        f"{name}() of environment {index} gave {np.size(value)} entries, but its spaces demand {row.size}."
                    )
                row[...] = np.reshape(value, row.shape)

    def step(self, half: Half, t: int, first_step: int) -> list[dict[str, Any]]:
        """Act and step once; writes row ``t`` of the columns, and the observations of row ``t + 1``.

        :param first_step: Global step of the rollout's first step.
        :return: The info dicts.
        """
        columns = self.columns
        new_obs, rewards, dones, infos = self.stack.step(self._actor.act(half, t, first_step))
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
                self._actor.write_terminal_value(half, t, int(row), observation)

    def finish(self, half: Half, steps_done: int) -> None:
        """Write the value of the last observation; after a cancellation, move what is latest to where it belongs."""
        if steps_done == len(half.dones):
            self._actor.write_last_values(half)
            return
        for array in [*half.observations.values(), *half.memory.values()]:
            array[-1, self.columns] = array[steps_done, self.columns]
