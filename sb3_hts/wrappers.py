"""SB3's vectorized wrappers, once in the main process over all environments and once in the workers over each group.

Only wrappers that act on each environment alone can be split like that, and only those that are known to:
:data:`SUPPORTED`. A wrapper's *template* is what makes another like it over a group; its *state* is what it carries from
one step to the next, by environment.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from stable_baselines3.common.vec_env import (
    VecEnv,
    VecEnvWrapper,
    VecExtractDictObs,
    VecFrameStack,
    VecTransposeImage,
)
from stable_baselines3.common.vec_env.stacked_observations import StackedObservations

SUPPORTED: tuple[type[VecEnvWrapper], ...] = (VecTransposeImage, VecFrameStack, VecExtractDictObs)
"""Matched by exact type: a subclass may do anything."""


def unwrap(env: VecEnv) -> tuple[list[VecEnvWrapper], VecEnv]:
    """Take a stack apart.

    :return: The wrappers from the innermost outwards, and the environment below them.
    """
    wrappers: list[VecEnvWrapper] = []
    while isinstance(env, VecEnvWrapper):
        wrappers.insert(0, env)
        env = env.venv
    return wrappers, env


@dataclass(frozen=True)
class Template:
    """A wrapper without its environments: its class, and its attributes for a group of one size.

    Not the wrapper itself, since SB3's wrappers look up unknown attributes in their environments and so cannot be pickled
    without any.
    """

    wrapper_class: type[VecEnvWrapper]
    attributes: dict[str, Any]

    def mount(self, env: VecEnv) -> VecEnvWrapper:
        """A new wrapper over a group."""
        wrapper = object.__new__(self.wrapper_class)
        vars(wrapper).update(deepcopy(self.attributes))
        wrapper.num_envs = env.num_envs
        wrapper.venv = env
        wrapper.class_attributes = dict(inspect.getmembers(self.wrapper_class))
        for stack in _frame_stacks(wrapper):
            stack.stacked_obs = stack.stacked_obs[: env.num_envs].copy()
        return wrapper


def make_template(wrapper: VecEnvWrapper) -> Template:
    """The template of a wrapper of the main process."""
    attributes = {name: value for name, value in vars(wrapper).items() if name not in ("venv", "class_attributes")}
    return Template(type(wrapper), attributes)


def mount(templates: Sequence[Template], env: VecEnv) -> tuple[list[VecEnvWrapper], VecEnv]:
    """Put new wrappers over a group.

    :return: The wrappers from the innermost outwards, and the whole stack.
    """
    wrappers: list[VecEnvWrapper] = []
    for template in templates:
        env = template.mount(env)
        wrappers.append(env)
    return wrappers, env


def channels_last_keys(wrappers: Sequence[VecEnvWrapper]) -> frozenset[Any]:
    """Observation keys (``None`` without a Dict space) whose arrays SB3 hands to the policy as views of transposed images.

    Convolutions give other bits for another order in memory, so we must do the same.
    """
    keys: set[Any] = set()
    for wrapper in wrappers:
        match wrapper:
            case VecTransposeImage(skip=False):
                keys |= set(getattr(wrapper, "image_space_keys", [None]))
            case VecFrameStack():
                keys.clear()  # it copies into an array of its own
            case VecExtractDictObs():
                keys = {None} if wrapper.key in keys else set()
    return frozenset(keys)


def get_state(wrapper: VecEnvWrapper, columns: slice = slice(None)) -> Any:
    """The state of some environments: a list of arrays, empty if the wrapper has no state."""
    return [stack.stacked_obs[columns].copy() for stack in _frame_stacks(wrapper)]


def set_state(wrapper: VecEnvWrapper, state: Any, columns: slice = slice(None)) -> None:
    """Counterpart of :func:`get_state`."""
    for stack, array in zip(_frame_stacks(wrapper), state, strict=True):
        stack.stacked_obs[columns] = array


def _frame_stacks(wrapper: VecEnvWrapper) -> list[StackedObservations[Any]]:
    if not isinstance(wrapper, VecFrameStack):
        return []
    stacked = wrapper.stacked_obs
    return list(getattr(stacked, "sub_stacked_observations", {None: stacked}).values())
