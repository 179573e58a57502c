"""``HTSVecEnv``: environments in worker processes, as an SB3 ``VecEnv`` and as a service that collects rollouts."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import TracebackType
from typing import Any, Literal, Protocol

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn
from stable_baselines3.common.vec_env.util import dict_to_obs, obs_space_info

from sb3_hts.errors import ClosedError, ProtocolError, WorkerError
from sb3_hts.interrupts import shielded
from sb3_hts.pool import WorkerPool, original_exception
from sb3_hts.processes import resolve_start_method
from sb3_hts.protocol import (
    AttachLockstep,
    CallMethod,
    Cancel,
    Collect,
    Collected,
    Configure,
    Done,
    Failed,
    GetAttr,
    HasAttr,
    IsWrapped,
    Phase,
    Published,
    Render,
    Reply,
    Request,
    Reset,
    Rows,
    SetAttr,
    Step,
    Stepped,
    Unconfigure,
)
from sb3_hts.registration import dump_registrations
from sb3_hts.serialization import dumps_by_value, loads
from sb3_hts.shared_arrays import SharedBlock, block_nbytes, carve
from sb3_hts.worker import lockstep_specs, worker_main

EnvFn = Callable[[], gym.Env[Any, Any]]


class RolloutOwner(Protocol):
    """Who is told about a rollout under way."""

    def before_waiting(self) -> None:
        """Called by whoever is about to wait for the rollout's end, in its own thread."""

    def after_gathering(self, replies: Sequence[Collected]) -> None:
        """Called once all replies are there, before anything else is asked of the environments."""


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
    :param step_timeout: Seconds without progress after which a worker counts as hung. Must be longer than the longest
        ``step`` plus ``reset``. Without it a hang is not detected.
    :param on_worker_failure: What to do when a worker fails: ``"raise"``.
    :raises ValueError: If an argument is wrong, or if environments have different spaces.
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
        env_fns = list(env_fns)
        self.envs_per_group = _checked_group_size(env_fns, envs_per_group)
        self.n_groups = len(env_fns) // self.envs_per_group
        self.n_workers = _checked_n_workers(n_workers, self.n_groups)
        self.start_method = resolve_start_method(start_method)
        _check_positive("step_timeout", step_timeout)
        if on_worker_failure != "raise":
            raise ValueError(f'on_worker_failure must be "raise", not {on_worker_failure!r}.')
        self.step_timeout = step_timeout

        # Guards every exchange with the workers; reentrant because the learner's hooks run inside of one
        self._lock = threading.RLock()
        self._phase = Phase.IDLE
        self._failure: WorkerError | None = None
        self._collected: list[Collected] = []
        self._rollout = -1
        self._owner: RolloutOwner | None = None

        self._firsts = _split(self.n_groups, self.n_workers, self.envs_per_group)
        self._worker_of = np.searchsorted(self._firsts, np.arange(len(env_fns)), side="right") - 1
        self._pool = self._start_workers(env_fns)
        try:
            self._handshake(len(env_fns))
        except BaseException:
            self.close()
            raise

    # --- construction -----------------------------------------------------------------------------------------------

    def _start_workers(self, env_fns: list[EnvFn]) -> WorkerPool:
        bounds = [*self._firsts, len(env_fns)]
        registrations = dump_registrations()
        arguments = [
            (dumps_by_value(env_fns[first:last]), registrations, first, self.envs_per_group, len(env_fns))
            for first, last in pairwise(bounds)
        ]
        return WorkerPool(self.start_method, worker_main, arguments, timeout=self.step_timeout)

    def _handshake(self, n_envs: int) -> None:
        """Learn the spaces, give the workers their arrays."""
        hellos = [loads(reply.value) for reply in self._receive_all(Done)]
        spaces, _, metadata = hellos[0]
        for worker, (first_spaces, different, _) in enumerate(hellos):
            different = different if first_spaces == spaces else {self._firsts[worker]: first_spaces}
            for index, (obs_space, act_space) in different.items():
                raise ValueError(
                    f"Environment {index} has the observation space {obs_space} and the action space {act_space}, but "
                    f"environment 0 has {spaces[0]} and {spaces[1]}: all environments must have the same spaces."
                )
        observation_space, action_space = spaces
        specs = lockstep_specs(n_envs, observation_space, action_space)
        block = SharedBlock(block_nbytes(specs))
        self._arrays = carve(block.bytes, specs)
        self._keys = obs_space_info(observation_space)[0]
        self._exchange([AttachLockstep(block.nbytes)] * self.n_workers, Done, block)
        block.release_descriptor()
        super().__init__(n_envs, observation_space, action_space)
        self.metadata = metadata

    # --- exchanges with the workers ---------------------------------------------------------------------------------

    def _exchange(self, requests: Sequence[Request], reply_type: type[Any], *blocks: SharedBlock) -> list[Any]:
        """Send one request to each worker and wait for all replies."""
        with shielded:
            for worker, request in enumerate(requests):
                self._pool.send(worker, request, *blocks)
        return self._receive_all(reply_type)

    def _receive_all(self, reply_type: type[Any]) -> list[Any]:
        return [self._receive(worker, reply_type) for worker in range(self.n_workers)]

    def _receive(self, worker: int, reply_type: Any) -> Any:
        with self._noting_failure():
            reply: Reply = self._pool.receive(worker)
            return self._checked(worker, reply, reply_type)

    def _checked(self, worker: int, reply: Reply, reply_type: Any) -> Any:
        if isinstance(reply, reply_type):
            return reply
        if isinstance(reply, Failed):
            self._pool.raise_failure(worker, reply)
        raise ProtocolError(f"Worker {worker} answered with {type(reply).__name__}, not {reply_type}")

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except WorkerError as error:
            self._phase, self._failure = Phase.BROKEN, error
            raise

    def _become_idle(self) -> None:
        """Make sure that nothing is under way and the workers can be asked. Called with the lock held."""
        match self._phase:
            case Phase.CLOSED:
                raise ClosedError("These environments have been closed; make a new HTSVecEnv.")
            case Phase.BROKEN:
                raise ClosedError(f"These environments were shut down after a failure: {self._failure}") from self._failure
            case Phase.COLLECTING:
                self._gather()
            case Phase.IDLE | Phase.STEPPING:
                # An interrupt may have come between a request and its reply
                with self._noting_failure():
                    self._pool.discard_pending()
                self._phase = Phase.IDLE

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Hold the lock with nothing under way."""
        # Before the lock: whoever holds it may be waiting for snapshots that only this thread can publish
        if self._phase is Phase.COLLECTING and self._owner is not None:
            self._owner.before_waiting()
        with self._lock:
            self._become_idle()
            yield

    # --- VecEnv -----------------------------------------------------------------------------------------------------

    def reset(self) -> VecEnvObs:
        """Reset all environments, with the seeds and options set before."""
        with self._idle():
            bounds = [*self._firsts, self.num_envs]
            requests = [
                Reset(tuple(self._seeds[first:last]), dumps_by_value(self._options[first:last]))
                for first, last in pairwise(bounds)
            ]
            replies = self._exchange(requests, Done)
            self.reset_infos = [info for reply in replies for info in loads(reply.value)]
            self._reset_seeds()
            self._reset_options()
            return self._observations()

    def step_async(self, actions: np.ndarray) -> None:
        """Start a step of all environments.

        :param actions: One per environment.
        """
        with self._idle():
            if len(actions) != self.num_envs:
                raise ValueError(f"Expected one action for each of the {self.num_envs} environments, got {len(actions)}.")
            self._arrays["actions"][...] = actions
            with shielded:
                self._phase = Phase.STEPPING
                for worker in range(self.n_workers):
                    self._pool.send(worker, Step())

    def step_wait(self) -> VecEnvStepReturn:
        """Wait for the step started by :meth:`step_async`.

        :return: Observations, rewards (float32), dones, infos; as ``DummyVecEnv``, all of them the caller's own.
        :raises ProtocolError: Without a step under way.
        """
        with self._lock:
            if self._phase is not Phase.STEPPING:
                self._become_idle()
                raise ProtocolError("step_wait() was called without step_async().")
            replies: list[Stepped] = self._receive_all(Stepped)
            self._phase = Phase.IDLE
            infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
            for worker, reply in enumerate(replies):
                for index, info in reply.infos.items():
                    infos[index] = loads(info)
                if reply.reset_infos is not None:
                    self._store_reset_infos(worker, reply.reset_infos)
            return self._observations(), self._arrays["rewards"].copy(), self._arrays["dones"].copy(), infos

    def _observations(self) -> VecEnvObs:
        copies = {key: self._arrays["observations", key].copy() for key in self._keys}
        return dict_to_obs(self.observation_space, copies)

    def _store_reset_infos(self, worker: int, data: bytes) -> None:
        infos = loads(data)
        self.reset_infos[self._firsts[worker] : self._firsts[worker] + len(infos)] = infos

    def close(self) -> None:
        """Close the environments and end the workers; works in any phase and more than once."""
        with self._lock:
            if self._phase is Phase.COLLECTING:
                self.cancel_rollout()
            self._phase = Phase.CLOSED
            self._pool.close()
            self._forget_rollout()

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
        with self._idle():
            wanted = np.arange(self.num_envs)[np.asarray(list(self._get_indices(indices)), dtype=np.intp)]
            workers = [int(worker) for worker in dict.fromkeys(self._worker_of[wanted])]
            with shielded:
                for worker in workers:
                    mine = wanted[self._worker_of[wanted] == worker]
                    self._pool.send(worker, request(tuple(int(index) - self._firsts[worker] for index in mine)))
            replies = {worker: self._receive(worker, Done | Failed) for worker in workers}
            for reply in replies.values():
                if isinstance(reply, Failed):
                    raise original_exception(reply)
            results = {worker: iter(loads(reply.value)) for worker, reply in replies.items()}
            return [next(results[int(self._worker_of[index])]) for index in wanted]

    # --- rollouts: used by the worker collector ---------------------------------------------------------------------

    def configure_rollouts(self, program: bytes, storage: SharedBlock, slots: SharedBlock) -> None:
        """Prepare the workers to collect.

        :param program: A serialised :class:`~sb3_hts.acting.Program`.
        :param storage: Memory of the rollout storage.
        :param slots: Memory of the parameter slots.
        """
        with self._idle():
            request = Configure(program, storage.nbytes, slots.nbytes)
            self._exchange([request] * self.n_workers, Done, storage, slots)

    def release_rollouts(self) -> None:
        """Make the workers forget what :meth:`configure_rollouts` gave them; does nothing after a failure."""
        with self._lock:
            if self._phase not in (Phase.CLOSED, Phase.BROKEN):
                self._become_idle()
                self._exchange([Unconfigure()] * self.n_workers, Done)
            self._forget_rollout()

    def start_rollout(self, request: Callable[[int, range], Collect], owner: RolloutOwner) -> None:
        """Let all workers collect.

        :param request: Makes a worker's request from the serial number of the rollout and the groups that it hosts. Serial
            numbers never repeat, since notices of an earlier rollout must not be taken for this one's.
        :param owner: Who is told about it.
        """
        with self._idle():
            serial = self._rollout + 1
            requests = [request(serial, self.groups_of(worker)) for worker in range(self.n_workers)]
            with shielded:
                self._phase, self._rollout, self._collected = Phase.COLLECTING, serial, []
                self._owner = owner
                for worker, message in enumerate(requests):
                    self._pool.send(worker, message)

    def groups_of(self, worker: int) -> range:
        """The groups that a worker hosts."""
        bounds = [*self._firsts, self.n_groups * self.envs_per_group]
        return range(bounds[worker] // self.envs_per_group, bounds[worker + 1] // self.envs_per_group)

    def announce_snapshot(self, snapshot: int) -> None:
        """Tell the workers that a snapshot is in its slot. Does not wait, and needs no lock."""
        notice = Published(self._rollout, snapshot)
        for worker in range(self.n_workers):
            self._pool.notify(worker, notice)

    def cancel_rollout(self) -> None:
        """Tell the workers to stop at the next step boundary. Does not wait, and needs no lock."""
        self._pool.status.cancelled = self._rollout
        for worker in range(self.n_workers):
            self._pool.notify(worker, Cancel(self._rollout))

    def finish_rollout(self) -> list[Collected]:
        """Wait for the end of the rollout that was started last.

        :return: One reply per worker, in worker order.
        :raises WorkerError: If a worker failed.
        """
        with self._lock:
            if self._phase is not Phase.IDLE:
                self._become_idle()
            return self._collected

    def _forget_rollout(self) -> None:
        # The owner holds the storage
        self._owner, self._collected = None, []

    def _gather(self) -> None:
        """Take the replies of a rollout; can be interrupted and called again."""
        with self._noting_failure():
            while (worker := len(self._collected)) < self.n_workers:
                self._pool.wait(worker)
                with shielded:
                    self._collected.append(self._checked(worker, self._pool.take(worker), Collected))
        for worker, reply in enumerate(self._collected):
            self._store_reset_infos(worker, reply.reset_infos)
        if self._owner is not None:
            self._owner.after_gathering(self._collected)
        self._phase = Phase.IDLE


def _split(n_groups: int, n_workers: int, group_size: int) -> list[int]:
    """Index of each worker's first environment: consecutive groups, as evenly as possible."""
    return [int(part[0]) * group_size for part in np.array_split(np.arange(n_groups), n_workers)]


def _checked_group_size(env_fns: Sequence[EnvFn], envs_per_group: int | None) -> int:
    if not env_fns:
        raise ValueError("HTSVecEnv needs at least one environment: env_fns is empty.")
    for index, env_fn in enumerate(env_fns):
        if not callable(env_fn):
            raise ValueError(
                f"env_fns[{index}] is a {type(env_fn).__name__}, not a function that makes an environment: "
                "pass [lambda: env, ...] or use make_vec_env(..., vec_env_cls=HTSVecEnv)."
            )
    if envs_per_group is None:
        return 1
    _check_count("envs_per_group", envs_per_group)
    if len(env_fns) % envs_per_group:
        raise ValueError(f"envs_per_group={envs_per_group} does not divide the number of environments, {len(env_fns)}.")
    return int(envs_per_group)


def _checked_n_workers(n_workers: int | None, n_groups: int) -> int:
    if n_workers is None:
        return n_groups
    _check_count("n_workers", n_workers)
    if n_workers > n_groups:
        raise ValueError(f"n_workers={n_workers} is more than there are groups of environments, {n_groups}.")
    return int(n_workers)


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}.")


def _check_positive(name: str, value: Any) -> None:
    if value is not None and not value > 0:
        raise ValueError(f"{name} must be a positive number of seconds or None, not {value!r}.")
