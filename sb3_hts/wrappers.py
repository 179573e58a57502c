"""SB3's vectorized wrappers, once in the main process over all environments and once in the workers over each group.

Only wrappers that act on each environment alone can be split like that, and only those that are known to
(:mod:`sb3_hts.wrapper_states`). A wrapper's *template* is what makes another like it over a group.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from stable_baselines3.common.vec_env import (
    VecEnv,
    VecEnvWrapper,
    VecExtractDictObs,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)

from sb3_hts.serialization import dumps_by_value
from sb3_hts.wrapper_states import PORTS


def unwrap(env: VecEnv) -> tuple[list[VecEnvWrapper], VecEnv]:
    """Take a stack apart.

    :return: The wrappers from the innermost outwards, and the environment below them.
    """
    wrappers: list[VecEnvWrapper] = []
    while isinstance(env, VecEnvWrapper):
        wrappers.insert(0, env)
        env = env.venv
    return wrappers, env


def why_not_split(wrappers: Sequence[VecEnvWrapper]) -> str | None:
    """Why these wrappers cannot run over each group by itself; ``None`` if they can."""
    for wrapper in wrappers:
        if type(wrapper) not in PORTS:
            return f"the wrapper {type(wrapper).__name__} cannot run inside the workers"
        reason = PORTS[type(wrapper)].why_not(wrapper)
        if reason is not None:
            return reason
        try:
            dumps_by_value(make_template(wrapper))
        except Exception as error:  # an attribute that users gave it
            return f"{type(wrapper).__name__} cannot be sent to the workers ({error})"
    if sum(isinstance(wrapper, VecMonitor) for wrapper in wrappers) > 1:
        return "there is more than one VecMonitor"
    return None


@dataclass(frozen=True)
class Template:
    """A wrapper without its environments: its class, and its attributes.

    Not the wrapper itself, since SB3's wrappers look up unknown attributes in their environments and so cannot be pickled
    without any.
    """

    wrapper_class: type[VecEnvWrapper]
    attributes: dict[str, Any]

    def mount(self, env: VecEnv) -> VecEnvWrapper:
        """A new wrapper over a group."""
        port = PORTS[self.wrapper_class]
        wrapper = object.__new__(port.worker_class)
        vars(wrapper).update(deepcopy(self.attributes))
        wrapper.num_envs = env.num_envs
        wrapper.venv = env
        wrapper.class_attributes = dict(inspect.getmembers(port.worker_class))
        return wrapper


def make_template(wrapper: VecEnvWrapper) -> Template:
    """The template of a wrapper of the main process."""
    left_behind = {"venv", "class_attributes", *PORTS[type(wrapper)].state}
    attributes = {name: value for name, value in vars(wrapper).items() if name not in left_behind}
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


def get_states(wrappers: Sequence[VecEnvWrapper], columns: slice = slice(None)) -> tuple[Any, ...]:
    """The state of each wrapper for some environments."""
    return tuple(PORTS[type(wrapper)].get(wrapper, columns) for wrapper in wrappers)


def set_states(wrappers: Sequence[VecEnvWrapper], states: Sequence[Any]) -> None:
    """Give a group's wrappers the state of the main process's."""
    for wrapper, state in zip(wrappers, states, strict=True):
        PORTS[type(wrapper)].set(wrapper, state)


def merge_states(wrappers: Sequence[VecEnvWrapper], groups: Sequence[Sequence[Any]]) -> list[str]:
    """Bring the main process's wrappers up to date.

    :param groups: Result of :func:`get_states` for each group, in group order.
    :return: What to warn the user of.
    """
    messages: list[str] = []
    for wrapper, *states in zip(wrappers, *groups, strict=True):
        messages += PORTS[type(wrapper)].merge(wrapper, states)
    return messages


def write_episodes(wrappers: Sequence[VecEnvWrapper], ends: Mapping[tuple[int, int], dict[str, Any]]) -> None:
    """Write the episodes that ended in a rollout to the file of a ``VecMonitor``.

    :param ends: The infos of their last steps, by ``(t, environment)``.
    """
    for wrapper in wrappers:
        if isinstance(wrapper, VecMonitor) and wrapper.results_writer is not None:
            for place in sorted(ends):
                wrapper.results_writer.write_row(ends[place]["episode"])


def normalized_keys(wrappers: Sequence[VecEnvWrapper]) -> frozenset[Any]:
    """Observation keys (``None`` without a Dict space) whose arrays may turn from the space's dtype to float32 at any time."""
    keys: set[Any] = set()
    for wrapper in wrappers:
        statistics = vars(wrapper).get("obs_rms")
        if statistics is not None:
            keys |= set(statistics) if isinstance(statistics, dict) else {None}
        elif isinstance(wrapper, VecExtractDictObs):
            keys = {None} if wrapper.key in keys else set()
    return frozenset(keys)


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
            case VecNormalize(norm_obs=True):  # its statistics are not transposed, and numpy follows them
                normalized = vars(wrapper).get("norm_obs_keys")
                keys -= set([None] if normalized is None else normalized)
            case VecExtractDictObs():
                keys = {None} if wrapper.key in keys else set()
    return frozenset(keys)
