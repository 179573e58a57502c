"""One batch of environments that step together: the inner loop of every rollout."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from sb3_hts.shared_arrays import Array
from sb3_hts.storage import Half


class Critic(Protocol):
    """Who values terminal observations."""

    def write_terminal_value(self, half: Half, t: int, row: int, observation: Any) -> None:
        """See :meth:`sb3_hts.acting.GroupActor.write_terminal_value`."""


class Lockstep:
    """Steps a stack of environments, and writes down what happens.

    :param stack: The environments, with their wrappers.
    :param columns: Which they are.
    :param critic: Values the observations with which a time limit ended an episode, before the next step is taken.
    """

    def __init__(self, stack: VecEnv, columns: slice, critic: Critic) -> None:
        self.stack = stack
        self.columns = columns
        self._critic = critic

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

    def step(self, half: Half, t: int, actions: Array) -> list[dict[str, Any]]:
        """Step once; writes row ``t`` of the columns, and the observations of row ``t + 1``.

        :param actions: What the environments get, ``(size, ...)``; they may keep it.
        :return: The info dicts.
        """
        columns = self.columns
        new_obs, rewards, dones, infos = self.stack.step(actions)
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
                self._critic.write_terminal_value(half, t, int(row), observation)

    def settle(self, half: Half, steps_done: int) -> None:
        """After a cancellation, move what is latest to where it belongs."""
        for array in [*half.observations.values(), *half.memory.values()]:
            array[-1, self.columns] = array[steps_done, self.columns]
