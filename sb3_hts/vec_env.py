"""``HTSVecEnv``: environments in worker processes, as an SB3 ``VecEnv``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from stable_baselines3.common.preprocessing import get_obs_shape
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn
from stable_baselines3.common.vec_env.util import dict_to_obs, obs_space_info

from sb3_hts.env_group import EnvFn
from sb3_hts.placement import checked_env_fns, place
from sb3_hts.pool import original_exception
from sb3_hts.processes import resolve_start_method
from sb3_hts.protocol import (
    AttachLockstep,
    CallMethod,
    Collected,
    Failed,
    GetAttr,
    HasAttr,
    IsWrapped,
    Phase,
    Render,
    Request,
    Reset,
    Rows,
    SetAttr,
    Step,
)
from sb3_hts.serialization import dumps_by_value, loads
from sb3_hts.shared_arrays import SharedBlock, block_nbytes, carve
from sb3_hts.worker import lockstep_specs
from sb3_hts.workforce import Workforce


class HTSVecEnv(VecEnv):
    """Environments in worker processes; a drop-in for SB3's ``SubprocVecEnv`` that can also collect whole rollouts.

    In lockstep use (stock algorithms, ``evaluate_policy``) it behaves as ``SubprocVecEnv``, except that observations and
    actions go through shared memory, that a failing environment raises
    :class:`~sb3_hts.errors.WorkerError` instead of hanging, and that no ``if __name__ == "__main__":`` guard is needed:
    workers do not import the main module, and what is defined there travels by value. Under ``HTSPPO`` and ``HTSA2C`` its
    workers run the behaviour policy themselves.

    Any call while a rollout is being collected waits for the rollout's end first.

    :param env_fns: Functions that each make one environment.
    :param n_workers: Number of worker processes; by default one per group. Does not influence results.
    :param envs_per_group: Environments that are stepped one after the other and forwarded as one batch. 1 suits slow
        environments; for ones whose step takes microseconds choose all of them (one group) or a large divisor of their
        number. Part of the numerics: results are bitwise repeatable for the same value only.
    :param start_method: ``"forkserver"`` (default where it exists), ``"spawn"`` or ``"fork"``.
    :param step_timeout: Seconds without progress after which a worker that is waited for counts as hung. Must be longer than
        the longest constructor, ``reset``, ``step`` or other call of one environment. Without it a hang is not detected.
    :param on_worker_failure: What to do when a worker fails: ``"raise"``.
    :raises ValueError: If an argument is wrong, or if environments have spaces of different shapes or dtypes.
    :raises WorkerError: If an environment cannot be constructed.
    """

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        n_workers: int | None = None,
        envs_per_group: int | None = None,
        start_method: str | None = None,
        step_timeout: float | None = None,
        on_worker_failure: Literal["raise"] = "raise",
    ) -> None:
        env_fns = checked_env_fns(env_fns)
        placement = place(len(env_fns), envs_per_group, n_workers)
        self.envs_per_group, self.n_groups, self.n_workers = placement.envs_per_group, placement.n_groups, placement.n_workers
        self.start_method = resolve_start_method(start_method)
        self.step_timeout = _checked_timeout(step_timeout)
        if on_worker_failure != "raise":
            raise ValueError(f'on_worker_failure must be "raise", not {on_worker_failure!r}.')
        self.workforce = Workforce(placement, env_fns, self.start_method, self.step_timeout, self._after_rollout)
        try:
            self._introduce(len(env_fns))
        except BaseException:
            self.close()
            raise

    def _introduce(self, n_envs: int) -> None:
        """Learn the spaces, give the workers their arrays."""
        hellos = [loads(reply.value) for reply in self.workforce.hellos()]
        spaces = [pair for pairs, _ in hellos for pair in pairs]
        for index, pair in enumerate(spaces):
            if _form(pair) != _form(spaces[0]):
                raise ValueError(
                    f"Environment {index} has the observation space {pair[0]} and the action space {pair[1]}, but "
                    f"environment 0 has {spaces[0][0]} and {spaces[0][1]}: all environments must have spaces of the same form."
                )
        observation_space, action_space = spaces[0]
        self._keys = _checked_keys(observation_space)
        specs = lockstep_specs(n_envs, observation_space, action_space)
        block = SharedBlock(block_nbytes(specs))
        self._arrays = carve(block.bytes, specs)
        with self.workforce.idle():
            self.workforce.ask_all([AttachLockstep(block.nbytes)] * self.n_workers, block)
        block.release_descriptor()
        super().__init__(n_envs, observation_space, action_space)
        self.metadata = hellos[0][1]

    # --- VecEnv -----------------------------------------------------------------------------------------------------

    def reset(self) -> VecEnvObs:
        """Reset all environments, with the seeds and options set before."""
        with self.workforce.idle(stepping=True):
            requests = []
            for worker in range(self.n_workers):
                envs = self.workforce.placement.envs_of(worker)
                requests.append(Reset(tuple(self._seeds[envs]), dumps_by_value(self._options[envs])))
            for reply in self.workforce.ask_all(requests):
                self._store_reset_infos(loads(reply.value))
            self._reset_seeds()
            self._reset_options()
            return self._observations()

    def step_async(self, actions: np.ndarray) -> None:
        """Start a step of all environments.

        :param actions: One per environment.
        """
        with self.workforce.idle(stepping=True):
            if len(actions) != self.num_envs:
                raise ValueError(f"Expected one action for each of the {self.num_envs} environments, got {len(actions)}.")
            self.workforce.start_step(self._step_requests(actions))

    def _step_requests(self, actions: np.ndarray) -> list[Step]:
        if "actions" in self._arrays:
            self._arrays["actions"][...] = actions
            return [Step()] * self.n_workers
        # Such as dicts: no array can hold them
        slices = [self.workforce.placement.envs_of(worker) for worker in range(self.n_workers)]
        return [Step(dumps_by_value(list(actions)[envs])) for envs in slices]

    def step_wait(self) -> VecEnvStepReturn:
        """Wait for the step started by :meth:`step_async`.

        :return: Observations, rewards (float32), dones, infos; as ``DummyVecEnv``, all of them the caller's own.
        :raises ProtocolError: Without a step under way.
        """
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        for reply in self.workforce.finish_step():
            for index, info in reply.infos.items():
                infos[index] = loads(info)
            self._store_reset_infos(reply.reset_infos)
        return self._observations(), self._arrays["rewards"].copy(), self._arrays["dones"].copy(), infos

    def _observations(self) -> VecEnvObs:
        copies = {key: self._arrays["observations", key].copy() for key in self._keys}
        return dict_to_obs(self.observation_space, copies)

    def _store_reset_infos(self, infos: Mapping[int, bytes]) -> None:
        for index, info in infos.items():
            self.reset_infos[index] = loads(info)

    def _after_rollout(self, replies: Sequence[Collected]) -> None:
        for reply in replies:
            self._store_reset_infos(reply.reset_infos)

    def close(self) -> None:
        """Close the environments and end the workers; works in any phase and more than once."""
        self.workforce.close()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self.workforce.phase is Phase.CLOSED

    @property
    def waiting(self) -> bool:
        """Whether a step is under way, between :meth:`step_async` and :meth:`step_wait`."""
        return self.workforce.phase is Phase.STEPPING

    def __enter__(self) -> HTSVecEnv:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return an attribute of each environment."""
        return self._call(indices, lambda rows: GetAttr(attr_name, rows))

    def has_attr(self, attr_name: str) -> bool:
        """Whether all environments have the attribute."""
        return all(self._call(None, lambda rows: HasAttr(attr_name, rows)))

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute of each environment."""
        data = dumps_by_value(value)
        self._call(indices, lambda rows: SetAttr(attr_name, data, rows))

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of each environment."""
        data = dumps_by_value((method_args, method_kwargs))
        return self._call(indices, lambda rows: CallMethod(method_name, data, rows))

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        """Whether each environment is wrapped with the given Gymnasium wrapper."""
        data = dumps_by_value(wrapper_class)
        return self._call(indices, lambda rows: IsWrapped(data, rows))

    def get_images(self) -> Sequence[np.ndarray | None]:
        """Images of all environments; ``None`` for each unless the render mode is ``"rgb_array"``."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"The render mode is {self.render_mode}, but this method assumes it is `rgb_array` to obtain images.",
                stacklevel=2,
            )
            return [None] * self.num_envs
        return self._call(None, Render)

    def _call(self, indices: VecEnvIndices, request: Callable[[Rows], Request]) -> list[Any]:
        """Ask single environments; an exception of theirs is raised here as it was, with the worker's traceback as cause."""
        wanted = np.arange(self.num_envs)[np.asarray(list(self._get_indices(indices)), dtype=np.intp)].tolist()
        placement = self.workforce.placement
        rows: dict[int, list[int]] = {}
        for index in wanted:
            worker = placement.worker_of(index)
            rows.setdefault(worker, []).append(index - placement.envs_of(worker).start)
        with self.workforce.idle():
            replies = self.workforce.ask({worker: request(tuple(mine)) for worker, mine in rows.items()})
        for worker, reply in replies.items():
            if isinstance(reply, Failed):
                error = original_exception(reply)
                # The environment's sys.exit() or Ctrl-C is not ours
                raise error if isinstance(error, Exception) else self.workforce.pool.raised(worker, reply) from error.__cause__
        results = {worker: iter(loads(reply.value)) for worker, reply in replies.items()}
        return [next(results[placement.worker_of(index)]) for index in wanted]


def _form(space: Any) -> Any:
    """What shared arrays depend on. Bounds may differ: as in SB3, those of environment 0 count."""
    match space:
        case gym.spaces.Dict():
            return {key: _form(part) for key, part in space.spaces.items()}
        case gym.spaces.Tuple() | tuple():
            return [_form(part) for part in space]
        case _:
            return type(space), space.shape, space.dtype


def _checked_keys(observation_space: gym.Space[Any]) -> list[Any]:
    """The keys of the space, ``None`` for one without.

    :raises NotImplementedError: SB3's own, if it knows no arrays for such a space.
    """
    keys = obs_space_info(observation_space)[0]
    for key in keys:
        get_obs_shape(observation_space if key is None else observation_space[key])  # type: ignore[index]
    return keys


def _checked_timeout(step_timeout: Any) -> float | None:
    if step_timeout is None:
        return None
    number = isinstance(step_timeout, (int, float, np.integer, np.floating)) and not isinstance(step_timeout, bool)
    if not number or not 0 < step_timeout < math.inf:
        raise ValueError(f"step_timeout must be a positive, finite number of seconds or None, not {step_timeout!r}.")
    return float(step_timeout)
