"""What SB3's vectorized wrappers carry from one step to the next, and how it moves between processes.

The stack in the main process has one wrapper over all environments, the workers have one like it over each group. Before a
rollout the state moves to the groups (:meth:`Port.get`, :meth:`Port.set`), after it what the groups have made of it moves
back (:meth:`Port.get`, :meth:`Port.merge`), in group order. So the main stack is right whenever the environments are at rest.
Files and warnings are written by the main process alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import (
    VecCheckNan,
    VecEnvWrapper,
    VecExtractDictObs,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)

Moments = tuple[Any, Any, float]
"""Mean, variance, count."""


class Port:
    """How a wrapper gets into the workers and back; this one is for wrappers without state.

    :param worker_class: Class of the wrapper in the workers.
    :param state: Names of attributes that are state and do not belong to the wrapper's structure.
    """

    def __init__(self, worker_class: type[VecEnvWrapper], *state: str) -> None:
        self.worker_class = worker_class
        self.state = state

    def why_not(self, wrapper: Any) -> str | None:
        """Why this one cannot be split; ``None`` if it can."""
        return None

    def get(self, wrapper: Any, columns: slice = slice(None)) -> Any:
        """The state of some environments, picklable and nobody else's.

        :param columns: Which of the wrapper's environments.
        """
        return None

    def set(self, wrapper: Any, state: Any) -> None:
        """Begin a rollout, in the worker.

        :param state: Result of :meth:`get` in the main process, for this group.
        """

    def merge(self, wrapper: Any, states: Sequence[Any]) -> list[str]:
        """End a rollout, in the main process.

        :param states: Result of :meth:`get` of each group, in group order.
        :return: What to warn the user of.
        """
        return []


class _FrameStackPort(Port):
    def get(self, wrapper: VecFrameStack, columns: slice = slice(None)) -> list[Any]:
        return [stack.stacked_obs[columns].copy() for stack in self._stacks(wrapper)]

    def set(self, wrapper: VecFrameStack, state: list[Any]) -> None:
        for stack, array in zip(self._stacks(wrapper), state, strict=True):
            stack.stacked_obs = array

    def merge(self, wrapper: VecFrameStack, states: Sequence[list[Any]]) -> list[str]:
        self.set(wrapper, [np.concatenate(arrays) for arrays in zip(*states, strict=True)])
        return []

    @staticmethod
    def _stacks(wrapper: VecFrameStack) -> list[Any]:
        stacked: Any = wrapper.stacked_obs
        return list(getattr(stacked, "sub_stacked_observations", {None: stacked}).values())


class _MonitorPort(Port):
    def get(self, wrapper: VecMonitor, columns: slice = slice(None)) -> tuple[Any, Any, int]:
        return wrapper.episode_returns[columns].copy(), wrapper.episode_lengths[columns].copy(), wrapper.episode_count

    def set(self, wrapper: VecMonitor, state: tuple[Any, Any, int]) -> None:
        wrapper.episode_returns, wrapper.episode_lengths, _ = state
        wrapper.episode_count = 0
        wrapper.results_writer = None

    def merge(self, wrapper: VecMonitor, states: Sequence[tuple[Any, Any, int]]) -> list[str]:
        returns, lengths, counts = zip(*states, strict=True)
        wrapper.episode_returns, wrapper.episode_lengths = np.concatenate(returns), np.concatenate(lengths)
        wrapper.episode_count += sum(counts)
        return []


class _NotingCheckNan(VecCheckNan):
    """Notes what SB3's would warn of."""

    messages: list[str]

    def _check_val(self, event: str, **kwargs: Any) -> None:
        if self.raise_exception:
            super()._check_val(event, **kwargs)
            return
        if self.warn_once and self._user_warned:
            return
        self.raise_exception = True
        try:
            super()._check_val(event, **kwargs)
        except ValueError as error:
            self.messages.append(str(error))
        finally:
            self.raise_exception = False


class _CheckNanPort(Port):
    SETTINGS = ("raise_exception", "warn_once", "check_inf")

    def get(self, wrapper: VecCheckNan, columns: slice = slice(None)) -> tuple[dict[str, bool], bool, list[str], Any]:
        attributes = vars(wrapper)  # an attribute that is missing would be looked for in the wrappers below
        settings = {name: attributes[name] for name in self.SETTINGS}
        return settings, wrapper._user_warned, attributes.get("messages", []), _cut(attributes.get("_observations"), columns)

    def set(self, wrapper: _NotingCheckNan, state: tuple[dict[str, bool], bool, list[str], Any]) -> None:
        settings, wrapper._user_warned, _, wrapper._observations = state
        vars(wrapper).update(settings)
        wrapper.messages = []

    def merge(self, wrapper: VecCheckNan, states: Sequence[tuple[dict[str, bool], bool, list[str], Any]]) -> list[str]:
        _, warned, messages, observations = zip(*states, strict=True)
        wrapper._user_warned |= any(warned)
        wrapper._observations = _join(observations)
        found = [message for group in messages for message in group]
        return found[:1] if wrapper.warn_once else found


class _TrackedMeanStd(RunningMeanStd):
    """Keeps the moments of what has been added lately, too.

    :param moments: To begin with.
    """

    def __init__(self, moments: Moments) -> None:
        self.mean, self.var, self.count = moments
        self.news = RunningMeanStd(epsilon=0, shape=np.shape(self.mean))

    def update_from_moments(self, batch_mean: Any, batch_var: Any, batch_count: float) -> None:
        super().update_from_moments(batch_mean, batch_var, batch_count)
        self.news.update_from_moments(batch_mean, batch_var, batch_count)


class _NormalizePort(Port):
    """Each group begins with the merged statistics and updates a copy of its own; what is new is merged in group order
    (Chan, Golub, LeVeque: "Updating formulae and a pairwise algorithm for computing sample variances", 1979)."""

    def why_not(self, wrapper: VecNormalize) -> str | None:
        kinds = {type(rms).__name__ for rms in self._statistics(wrapper).values() if type(rms) is not RunningMeanStd}
        return f"the statistics of VecNormalize are of another class ({', '.join(kinds)})" if kinds else None

    SETTINGS = ("training", "norm_obs", "norm_obs_keys", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon")

    def get(self, wrapper: VecNormalize, columns: slice = slice(None)) -> dict[str, Any]:
        statistics = self._statistics(wrapper)
        return {
            "settings": {name: vars(wrapper)[name] for name in self.SETTINGS if name in vars(wrapper)},
            "has_obs_rms": "obs_rms" in vars(wrapper),
            "moments": {key: _moments(rms) for key, rms in statistics.items()},
            "news": {key: _moments(rms.news) for key, rms in statistics.items() if isinstance(rms, _TrackedMeanStd)},
            "returns": wrapper.returns[columns].copy(),
            "old_obs": _cut(vars(wrapper).get("old_obs"), columns),
            "old_reward": wrapper.old_reward[columns].copy(),
        }

    def set(self, wrapper: VecNormalize, state: dict[str, Any]) -> None:
        vars(wrapper).update(state["settings"])
        statistics: dict[Any, Any] = {key: _TrackedMeanStd(moments) for key, moments in state["moments"].items()}
        wrapper.ret_rms = statistics.pop(_RETURNS)
        if state["has_obs_rms"]:
            wrapper.obs_rms = statistics.get(None, statistics)
        wrapper.returns, wrapper.old_obs, wrapper.old_reward = state["returns"], state["old_obs"], state["old_reward"]

    def merge(self, wrapper: VecNormalize, states: Sequence[dict[str, Any]]) -> list[str]:
        for key, rms in self._statistics(wrapper).items():
            if len(states) == 1:  # as SB3, to the bit
                rms.mean, rms.var, rms.count = states[0]["moments"][key]
                continue
            for state in states:
                if state["news"][key][2]:
                    rms.update_from_moments(*state["news"][key])
        wrapper.returns = np.concatenate([state["returns"] for state in states])
        wrapper.old_obs = _join([state["old_obs"] for state in states])
        # A group that was cancelled before its first step has none
        sizes = [len(state["returns"]) for state in states]
        rewards = [state["old_reward"] for state in states]
        wrapper.old_reward = np.concatenate(
            [reward if len(reward) else np.zeros(size, np.float32) for reward, size in zip(rewards, sizes, strict=True)]
        )
        return []

    @staticmethod
    def _statistics(wrapper: VecNormalize) -> dict[Any, Any]:
        """Of observations (by key; ``None`` without a Dict space) and of returns."""
        found: Any = vars(wrapper).get("obs_rms", {})
        return {**(found if isinstance(found, dict) else {None: found}), _RETURNS: wrapper.ret_rms}


_RETURNS = ("returns",)
"""No key of an observation space."""


def _moments(rms: RunningMeanStd) -> Moments:
    return rms.mean, rms.var, rms.count


def _cut(observations: Any, columns: slice) -> Any:
    if isinstance(observations, dict):
        return {key: array[columns].copy() for key, array in observations.items()}
    return None if observations is None else observations[columns].copy()


def _join(parts: Sequence[Any]) -> Any:
    if any(part is None for part in parts):
        return None
    if isinstance(parts[0], dict):
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    return np.concatenate(parts)


PORTS: dict[type[VecEnvWrapper], Port] = {
    VecTransposeImage: Port(VecTransposeImage),
    VecExtractDictObs: Port(VecExtractDictObs),
    VecFrameStack: _FrameStackPort(VecFrameStack),
    VecMonitor: _MonitorPort(VecMonitor, "results_writer", "episode_returns", "episode_lengths"),
    VecCheckNan: _CheckNanPort(_NotingCheckNan, "_observations", "_actions"),
    VecNormalize: _NormalizePort(VecNormalize, "obs_rms", "ret_rms", "returns", "old_obs", "old_reward"),
}
"""The wrappers that act on each environment alone, by exact type: a subclass may do anything."""
PORTS[_NotingCheckNan] = PORTS[VecCheckNan]
