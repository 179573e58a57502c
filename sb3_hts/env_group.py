"""A group of environments: stepped in lockstep inside one worker, forwarded as one batch."""

from __future__ import annotations

import random
import secrets
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from functools import partial
from operator import itemgetter
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn
from stable_baselines3.common.vec_env.patch_gym import _patch_env
from stable_baselines3.common.vec_env.util import dict_to_obs

from sb3_hts.protocol import Activity
from sb3_hts.serialization import dumps

EnvFn = Callable[[], gym.Env[Any, Any]]
Report = Callable[[Activity, int], None]


def is_plain(info: dict[str, Any]) -> bool:
    """Whether an info dict says nothing; such ones are not sent but made anew by the receiver."""
    return type(info) is dict and len(info) == 1 and not info.get("TimeLimit.truncated", True)


def dump_infos(infos: Sequence[dict[str, Any]], first_index: int, report: Report) -> dict[int, bytes]:
    """Serialise the infos that say something, by environment index.

    :param first_index: Index of the first environment.
    :param report: Told which environment's info cannot be serialised.
    """
    return {
        first_index + row: _dump_info(info, first_index + row, report) for row, info in enumerate(infos) if not is_plain(info)
    }


def _dump_info(info: dict[str, Any], env_index: int, report: Report) -> bytes:
    try:
        return dumps(info)
    except Exception:
        report(Activity.REPORTING, env_index)
        raise


def construct(env_fns: Sequence[EnvFn], first_index: int, report: Report, known: set[int]) -> list[gym.Env[Any, Any]]:
    """Make the environments of one group, as ``DummyVecEnv`` does.

    :param first_index: Index of the first one, over all groups.
    :param report: Called with ``(activity, environment index)`` before an environment is touched.
    :param known: The ids of the spaces of all environments of this process, to be updated.
    """
    seed_global_generators(secrets.randbits(32))
    envs = []
    for row, env_fn in enumerate(env_fns):
        report(Activity.CONSTRUCTING, first_index + row)
        env = _patch_env(env_fn())
        _keep_spaces_apart(env.unwrapped, known)
        envs.append(env)
    return envs


SPACES = ("observation_space", "action_space")


def _keep_spaces_apart(env: gym.Env[Any, Any], known: set[int]) -> None:
    """Give an environment spaces of its own, if others have the same ones.

    A space has a generator. If it belongs to a class or a module, what one environment samples would depend on who else is
    in the process.
    """
    for name in SPACES:
        space = getattr(env, name, None)
        if id(space) in known:
            with suppress(AttributeError):  # a property
                setattr(env, name, deepcopy(space))
        known.add(id(getattr(env, name, None)))


def _seed_spaces(env: gym.Env[Any, Any], seed: int) -> None:
    """Seed the spaces of an environment and of all its wrappers, for environments that sample from them."""
    layers = [env]
    while isinstance(layers[-1], gym.Wrapper):
        layers.append(layers[-1].env)
    # From the inside out, each once: wrappers mostly have the same ones
    spaces = {id(space): space for layer in layers for space in (getattr(layer, name, None) for name in SPACES)}
    for space in spaces.values():
        if isinstance(space, gym.Space):
            space.seed(seed)


class EnvGroup(DummyVecEnv):
    """SB3's ``DummyVecEnv`` for one group, with three differences.

    It says which environment it is about to touch, for error messages. What ``step()`` and ``reset()`` return is its own
    buffers, valid until the next call: the worker copies them on at once. And the terminal observation and info are
    copied *before* the reset, because some environments return the same array and the same dict for ever; reset infos are
    serialised at once for the same reason.

    :param envs: Result of :func:`construct`.
    :param first_index: Index of the first one, over all groups.
    :param report: As of :func:`construct`.
    """

    def __init__(self, envs: Sequence[gym.Env[Any, Any]], first_index: int, report: Report) -> None:
        self.first_index = first_index
        self._report = report
        with warnings.catch_warnings():
            # The main process warns of it, once instead of once per worker
            warnings.filterwarnings("ignore", message="The `render_mode` attribute is not defined")
            super().__init__([partial(itemgetter(row), envs) for row in range(len(envs))])
        self.columns = slice(first_index, first_index + len(envs))
        self._new_reset_infos: dict[int, bytes] = {}

    def step_wait(self) -> VecEnvStepReturn:
        for row, env in enumerate(self.envs):
            self._report(Activity.STEPPING, self.first_index + row)
            obs, self.buf_rews[row], terminated, truncated, info = env.step(self.actions[row])
            done = terminated or truncated
            self.buf_dones[row] = done
            info = copy(info)  # the environment's own stays as it is
            info["TimeLimit.truncated"] = truncated and not terminated
            if done:
                info["terminal_observation"] = obs
                info = deepcopy(info)
                self._report(Activity.RESETTING, self.first_index + row)
                obs, self.reset_infos[row] = env.reset()
                self._note_reset(row)
            self.buf_infos[row] = info
            self._save_obs(row, obs)
        keep_one_thread()
        return self._observations(), self.buf_rews, self.buf_dones, self.buf_infos

    def reset(self) -> VecEnvObs:
        if self._seeds[0] is not None:
            seed_global_generators(self._seeds[0])
        for env, seed in zip(self.envs, self._seeds, strict=True):
            if seed is not None:
                _seed_spaces(env, seed)
        for row, env in enumerate(self.envs):
            self._report(Activity.RESETTING, self.first_index + row)
            options = {"options": self._options[row]} if self._options[row] else {}
            obs, self.reset_infos[row] = env.reset(seed=self._seeds[row], **options)
            self._note_reset(row)
            self._save_obs(row, obs)
        self._reset_seeds()
        self._reset_options()
        return self._observations()

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        results = []
        for row in self._get_indices(indices):
            self._report(Activity.CALLING, self.first_index + row)
            results += super().env_method(method_name, *args, indices=row, **kwargs)
        return results

    def _note_reset(self, row: int) -> None:
        index = self.first_index + row
        self._new_reset_infos[index] = _dump_info(self.reset_infos[row], index, self._report)

    def take_reset_infos(self) -> dict[int, bytes]:
        """The reset infos since the last call, serialised, by environment index."""
        infos, self._new_reset_infos = self._new_reset_infos, {}
        return infos

    def prepare_reset(self, seeds: Sequence[int | None], options: Sequence[dict[str, Any]]) -> None:
        """Set what the next :meth:`reset` passes to each environment."""
        self._seeds = list(seeds)
        self._options = list(options)

    def _observations(self) -> VecEnvObs:
        return dict_to_obs(self.observation_space, self.buf_obs)


def seed_global_generators(seed: int) -> None:
    """Seed the process-wide generators, for environments that draw from those.

    :param seed: Of any size, as Gymnasium's seeds.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    th.default_generator.manual_seed(seed % 2**63)


def keep_one_thread() -> None:
    """Undo what environments may have done to torch: other numbers of threads give other bits."""
    if th.get_num_threads() != 1:
        th.set_num_threads(1)


class GlobalGenerators:
    """Python's, NumPy's and torch's process-wide generators, one state per group, where a worker hosts several groups."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[Any, Any, th.Tensor]] = {}
        self._current: int | None = None

    def enter(self, group: int) -> None:
        """Make the given group's state the current one; groups that never were get what is there."""
        keep_one_thread()
        if group == self._current:
            return
        if self._current is not None:
            self._states[self._current] = (random.getstate(), np.random.get_state(), th.default_generator.get_state())
        if group in self._states:
            python_state, numpy_state, torch_state = self._states[group]
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            th.default_generator.set_state(torch_state)
        self._current = group
