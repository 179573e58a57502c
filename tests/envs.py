"""Environments for tests. Importable by workers, so everything here travels by reference."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

ObsType = Any


class WalkEnv(gym.Env[Any, Any]):
    """A random walk whose every number depends on its seed and on all actions so far.

    Ends by termination or by truncation after a random number of steps.

    :param observation_space: Observations are samples of the state, shaped and cast for this space.
    :param action_space: Any space that SB3 knows.
    :param jitter: Upper bound in seconds of a random delay in ``step`` and ``reset``; drawn from an unseeded generator.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
        jitter: float = 0.0,
    ) -> None:
        self.observation_space = observation_space or spaces.Box(-10, 10, (3,), np.float32)
        self.action_space = action_space or spaces.Discrete(3)
        self.jitter = jitter
        self.render_mode = "rgb_array"
        self.speed = 1.0
        self.n_steps = 0
        self.n_resets = 0
        self.last_action: Any = None

    def _delay(self) -> None:
        if self.jitter:
            time.sleep(np.random.default_rng().uniform(0, self.jitter))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._delay()
        self.n_resets += 1
        self.n_since_reset = 0
        self.position = float(self.np_random.normal()) + (options or {}).get("start", 0.0)
        self.remaining = int(self.np_random.integers(3, 9))
        self.truncates = bool(self.np_random.integers(2))
        return self._observation(), {"start": self.position}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._delay()
        self.last_action = action
        self.n_steps += 1
        self.n_since_reset += 1
        self.remaining -= 1
        if isinstance(self.action_space, (spaces.Dict, spaces.Tuple)):
            action = spaces.flatten(self.action_space, action)
        push = float(np.sum(np.asarray(action, dtype=np.float64)))
        self.position += self.speed * (0.3 * push - 0.25) + 0.1 * float(self.np_random.normal())
        ended = self.remaining <= 0
        truncated = ended and self.truncates
        info = {"position": self.position} if self.n_steps % 3 == 0 else {}
        return self._observation(), -abs(self.position), ended and not truncated, truncated, info

    def _observation(self) -> Any:
        return self._fill(self.observation_space)

    def _fill(self, space: spaces.Space[Any]) -> Any:
        match space:
            case spaces.Dict():
                return {key: self._fill(subspace) for key, subspace in space.spaces.items()}
            case spaces.Tuple():
                return tuple(self._fill(subspace) for subspace in space.spaces)
            case spaces.Discrete():
                return int(abs(self.position) * 7) % int(space.n)
            case spaces.MultiBinary():
                return (np.arange(space.n) < abs(self.position)).astype(space.dtype)
            case spaces.MultiDiscrete():
                return (int(abs(self.position) * 7) % space.nvec).astype(space.dtype)
            case spaces.Box():
                size = int(np.prod(space.shape))
                if space.dtype == np.uint8:
                    return (np.arange(size) * 7 + int(abs(self.position) * 50)).astype(np.uint8).reshape(space.shape)
                waves = np.sin(self.position + np.arange(size) / 3)
                return waves.astype(space.dtype).reshape(space.shape)
        raise TypeError(space)

    def render(self) -> Any:
        return np.full((2, 3, 3), int(abs(self.position) * 20) % 256, np.uint8)

    def get_position(self, factor: float = 1.0) -> float:
        return factor * self.position

    def remember_action(self) -> None:
        self.remembered_action = self.last_action

    def fail(self, message: str) -> None:
        raise KeyError(message)

    def leave(self) -> None:
        raise SystemExit(3)


class ReusingEnv(WalkEnv):
    """Returns the same observation array and the same info dict for ever."""

    def __init__(self) -> None:
        super().__init__()
        self._array = np.zeros(3, np.float32)
        self._info: dict[str, Any] = {}

    def _observation(self) -> Any:
        self._array[:] = super()._observation()
        return self._array

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, _ = super().reset(seed=seed, options=options)
        self._info.clear()
        return observation, self._info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        self._info.clear()
        self._info.update(info, history=[self.n_steps])
        return observation, reward, terminated, truncated, self._info


class FaultyEnv(WalkEnv):
    """Fails in a given way at a given place.

    :param place: ``"construct"``, ``"reset"``, ``"step"`` or ``"close"``.
    :param how: ``"raise"``, ``"exit"``, ``"sigkill"``, ``"hang"``, ``"unpicklable"`` or ``"nan"`` (observations from then on).
    :param at: Which call of that kind fails, counted from 1.
    """

    def __init__(self, place: str, how: str, at: int = 1) -> None:
        super().__init__()
        self.place, self.how, self.at = place, how, at
        self.counts = {"construct": 0, "reset": 0, "step": 0, "close": 0}
        self._maybe_fail("construct")

    def _maybe_fail(self, place: str) -> None:
        self.counts[place] += 1
        if place != self.place or self.counts[place] != self.at:
            return
        match self.how:
            case "raise":
                raise ValueError(f"no luck in {place}")
            case "unpicklable":
                error = ValueError(f"no luck in {place}")
                error.culprit = lambda: self  # type: ignore[attr-defined]
                error.handle = open(os.devnull)  # type: ignore[attr-defined] # noqa: SIM115
                raise error
            case "exit":
                os._exit(3)
            case "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                signal.pause()
            case "nan":
                self.position = float("nan")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._maybe_fail("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._maybe_fail("step")
        return super().step(action)

    def close(self) -> None:
        self._maybe_fail("close")


class UnpicklableInfoEnv(WalkEnv):
    """Puts what cannot leave the process into an info dict.

    :param place: ``"reset"`` or ``"step"``.
    """

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(**kwargs)
        return observation, {"lock": threading.Lock()} if self.place == "reset" else info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {"lock": threading.Lock()} if self.place == "step" else info


class NotingCloseEnv(WalkEnv):
    """Writes down that it was closed, then raises.

    :param path: File to append to.
    :param error: What to raise.
    """

    def __init__(self, path: str, error: type[BaseException]) -> None:
        super().__init__()
        self.path, self.error = path, error

    def close(self) -> None:
        with open(self.path, "a") as file:
            file.write("closed\n")
        raise self.error("no luck in close")
