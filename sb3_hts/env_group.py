"""A group of environments: stepped in lockstep inside one worker, forwarded as one batch."""

from __future__ import annotations

import random
import secrets
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn
from stable_baselines3.common.vec_env.util import dict_to_obs

from sb3_hts.protocol import Activity

EnvFn = Callable[[], gym.Env[Any, Any]]
Report = Callable[[Activity, int], None]


def is_plain(info: dict[str, Any]) -> bool:
    """Whether an info dict says nothing; such ones are not sent but made anew by the receiver."""
    return len(info) == 1 and info.get("TimeLimit.truncated") is False


class EnvGroup(DummyVecEnv):
    """SB3's ``DummyVecEnv`` for one group, with three differences.

    It says which environment it is about to touch, for error messages. What ``step()`` and ``reset()`` return is its own
    buffers, valid until the next call: the worker copies them on at once. And the terminal observation and info are
    copied *before* the reset, because some environments return the same array and the same dict for ever.

    :param env_fns: Functions that make the environments.
    :param first_index: Index of the first one, over all groups.
    :param report: Called with ``(activity, environment index)`` before an environment is touched.
    """

    def __init__(self, env_fns: Sequence[EnvFn], first_index: int, report: Report) -> None:
        self.first_index = first_index
        self._report = report
        self.seed_global_generators(secrets.randbits(32))
        with warnings.catch_warnings():
            # The main process warns of it, once instead of once per worker
            warnings.filterwarnings("ignore", message="The `render_mode` attribute is not defined")
            super().__init__([partial(self._construct, row, env_fn) for row, env_fn in enumerate(env_fns)])
        self.columns = slice(first_index, first_index + len(env_fns))
        self.any_reset = False

    def _construct(self, row: int, env_fn: EnvFn) -> gym.Env[Any, Any]:
        self._report(Activity.CONSTRUCTING, self.first_index + row)
        return env_fn()

    def step_wait(self) -> VecEnvStepReturn:
        for row, env in enumerate(self.envs):
            self._report(Activity.STEPPING, self.first_index + row)
            obs, self.buf_rews[row], terminated, truncated, info = env.step(self.actions[row])
            done = terminated or truncated
            self.buf_dones[row] = done
            info["TimeLimit.truncated"] = truncated and not terminated
            if done:
                info["terminal_observation"] = deepcopy(obs)
                info = deepcopy(info)
                self._report(Activity.RESETTING, self.first_index + row)
                obs, self.reset_infos[row] = env.reset()
                self.any_reset = True
            self.buf_infos[row] = info
            self._save_obs(row, obs)
        return self._observations(), self.buf_rews, self.buf_dones, self.buf_infos

    def reset(self) -> VecEnvObs:
        if self._seeds[0] is not None:
            self.seed_global_generators(self._seeds[0])
        for row, env in enumerate(self.envs):
            self._report(Activity.RESETTING, self.first_index + row)
            options = {"options": self._options[row]} if self._options[row] else {}
            obs, self.reset_infos[row] = env.reset(seed=self._seeds[row], **options)
            self._save_obs(row, obs)
        self._reset_seeds()
        self._reset_options()
        return self._observations()

    def prepare_reset(self, seeds: Sequence[int | None], options: Sequence[dict[str, Any]]) -> None:
        """Set what the next :meth:`reset` passes to each environment."""
        self._seeds = list(seeds)
        self._options = list(options)

    def _observations(self) -> VecEnvObs:
        return dict_to_obs(self.observation_space, self.buf_obs)

    @staticmethod
    def seed_global_generators(seed: int) -> None:
        """Seed the process-wide generators, for environments that draw from those."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        th.default_generator.manual_seed(seed)


class GlobalGenerators:
    """Python's and NumPy's process-wide generators, one state per group, where a worker hosts several groups.

    torch's needs no copy: it is seeded before every forward, see :mod:`sb3_hts.seeding`.
    """

    def __init__(self) -> None:
        self._states: dict[int, tuple[Any, Any]] = {}
        self._current: int | None = None

    def enter(self, group: int) -> None:
        """Make the given group's state the current one; groups that never were get what is there."""
        if group == self._current:
            return
        if self._current is not None:
            self._states[self._current] = (random.getstate(), np.random.get_state())
        if group in self._states:
            python_state, numpy_state = self._states[group]
            random.setstate(python_state)
            np.random.set_state(numpy_state)
        self._current = group
