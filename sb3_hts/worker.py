"""The worker process: hosts groups of environments, steps them in lockstep or runs them free for a whole rollout.

It answers one request at a time (:mod:`sb3_hts.protocol`). While it collects it takes no requests, only the two notices,
and those only when it has to wait for a snapshot; a cancellation also shows in shared memory, which it looks at before
each step. It ends when told to, or when the main process does.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env.util import obs_space_info

from sb3_hts.child import describe, ignore_interrupts, settle_in
from sb3_hts.env_group import EnvFn, EnvGroup, GlobalGenerators, construct, dump_infos
from sb3_hts.errors import ProtocolError
from sb3_hts.protocol import (
    Activity,
    AttachLockstep,
    CallMethod,
    Cancel,
    Close,
    Collect,
    Configure,
    Done,
    GetAttr,
    HasAttr,
    IsWrapped,
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
from sb3_hts.registration import load_registrations
from sb3_hts.rollout_runner import Channel, Host, Program, RolloutRunner
from sb3_hts.serialization import dumps, loads
from sb3_hts.shared_arrays import Array, ArraySpec, SharedBlock, carve
from sb3_hts.tokens import TokenQueue
from sb3_hts.worker_status import WorkerStatus

NICENESS = 5
"""How much lower the priority of workers is than that of the main process, as of ``os.nice``."""


def lockstep_specs(n_envs: int, observation_space: Any, action_space: Any) -> dict[Any, ArraySpec]:
    """Arrays that serve ``reset()`` and ``step()``: observations, actions, rewards, dones of all environments.

    There is none for actions that are not arrays, such as those of Dict spaces. Each row belongs to the worker of that
    environment while a request is under way, and to the main process otherwise.
    """
    keys, shapes, dtypes = obs_space_info(observation_space)
    specs: dict[Any, ArraySpec] = {
        ("observations", key): ArraySpec((n_envs, *shapes[key]), np.dtype(dtypes[key])) for key in keys
    }
    specs["rewards"] = ArraySpec((n_envs,), np.dtype(np.float32))
    specs["dones"] = ArraySpec((n_envs,), np.dtype(bool))
    if action_space.shape is not None and action_space.dtype is not None:
        specs["actions"] = ArraySpec((n_envs, *action_space.shape), np.dtype(action_space.dtype))
    return specs


def worker_main(
    worker: int,
    connection: Connection,
    status: WorkerStatus,
    env_fns: bytes,
    registrations: bytes,
    first_index: int,
    group_size: int,
    n_envs: int,
    start_method: str,
) -> None:
    """Entry point of the process.

    :param worker: Index of this worker.
    :param connection: Pipe to the main process.
    :param status: Where to say what we are doing.
    :param env_fns: The serialised list of functions that make this worker's environments.
    :param registrations: See :func:`sb3_hts.registration.dump_registrations`.
    :param first_index: Index of the first environment, over all workers.
    :param group_size: Environments per group.
    :param n_envs: Environments over all workers.
    :param start_method: multiprocessing's default in the main process.
    """
    settle_in()
    # What an environment starts by multiprocessing is started as it would be in the main process
    multiprocessing.set_start_method(start_method, force=True)
    # Where there are more workers than cores, the learner comes first: it is one thread, and everybody waits for it
    os.nice(NICENESS)
    _Worker(worker, connection, status, first_index, n_envs).run(env_fns, registrations, group_size)


def _has_attr(env: gym.Env[Any, Any], name: str) -> bool:
    try:
        env.get_wrapper_attr(name)
    except AttributeError:
        return False
    return True


class _Worker:
    def __init__(self, worker: int, connection: Connection, status: WorkerStatus, first_index: int, n_envs: int) -> None:
        self._worker = worker
        self._connection = connection
        self._status = status
        self._first_index = first_index
        self._n_envs = n_envs
        self._envs: list[list[gym.Env[Any, Any]]] = []
        self._groups: list[EnvGroup] = []
        self._generators = GlobalGenerators()
        self._arrays: dict[Any, Array] = {}
        self._runner: RolloutRunner | None = None

    def run(self, env_fns: bytes, registrations: bytes, group_size: int) -> None:
        """Construct the environments, then answer requests until :class:`Close` or the end of the main process."""
        with suppress(EOFError, ConnectionError):
            self._serve(env_fns, registrations, group_size)
        self._close()

    def _serve(self, env_fns: bytes, registrations: bytes, group_size: int) -> None:
        self._reply(partial(self._construct, env_fns, registrations, group_size))
        while True:
            self._report(Activity.WAITING)
            request = pickle.loads(self._connection.recv_bytes())
            if isinstance(request, (Published, Cancel)):
                continue  # of a rollout that has ended
            if isinstance(request, Close):
                break
            self._reply(partial(self._answer, request))

    def _reply(self, work: Callable[[], Reply]) -> None:
        try:
            reply = work()
        except BaseException as error:  # also SystemExit: whatever an environment raises is the main process's to hear
            reply = describe(error, self._status, self._worker)
        ignore_interrupts()  # some libraries put Python's own handler back
        self._connection.send_bytes(dumps(reply))

    def _report(self, activity: Activity, env_index: int = -1) -> None:
        self._status.set(self._worker, activity, env_index)

    def _construct(self, env_fns: bytes, registrations: bytes, group_size: int) -> Reply:
        self._report(Activity.CONSTRUCTING, self._first_index)
        load_registrations(registrations)
        functions: Sequence[EnvFn] = loads(env_fns)
        known: set[int] = set()
        for first in range(0, len(functions), group_size):
            self._generators.enter(first // group_size)
            envs = construct(functions[first : first + group_size], self._first_index + first, self._report, known)
            self._envs.append(envs)
        spaces = []
        for index, env in enumerate((env for envs in self._envs for env in envs), start=self._first_index):
            self._report(Activity.CONSTRUCTING, index)
            spaces.append((env.observation_space, env.action_space))
        return Done(dumps((spaces, self._envs[0][0].metadata)))

    def _answer(self, request: Request) -> Reply:
        match request:
            case Step():
                return self._step(request)
            case Collect():
                if self._runner is None:
                    raise ProtocolError("Asked to collect a rollout before being told how")
                return self._runner.collect(request)
            case Reset():
                return self._reset(request)
            case AttachLockstep():
                return self._attach_lockstep(request)
            case Configure():
                return self._configure(request)
            case Unconfigure():
                self._runner = None
                return Done()
            case _:
                return Done(dumps(self._call(request)))

    def _each_group(self) -> Iterator[EnvGroup]:
        for index, group in enumerate(self._groups):
            self._generators.enter(index)
            yield group

    def _attach_lockstep(self, request: AttachLockstep) -> Reply:
        block = SharedBlock.receive(self._connection, request.nbytes)
        block.release_descriptor()
        self._report(Activity.CONSTRUCTING)
        first_index = self._first_index
        for envs in self._envs:
            self._groups.append(EnvGroup(envs, first_index, self._report))
            first_index += len(envs)
        specs = lockstep_specs(self._n_envs, self._groups[0].observation_space, self._groups[0].action_space)
        self._arrays = carve(block.bytes, specs)
        return Done()

    def _configure(self, request: Configure) -> Reply:
        blocks = [SharedBlock.receive(self._connection, nbytes) for nbytes in request.sizes]
        queues = [TokenQueue.receive(self._connection) for _ in range(request.n_queues)]
        for block in blocks:
            block.release_descriptor()
        self._report(Activity.ACTING)
        program: Program = loads(request.program)
        channel = Channel(self._worker, self._connection, self._status)
        self._runner = program.make_runner(blocks, queues, Host(self._groups, channel, self._generators))
        return Done()

    def _reset(self, request: Reset) -> Reply:
        options = loads(request.options)
        reset_infos: dict[int, bytes] = {}
        for group in self._each_group():
            rows = slice(group.columns.start - self._first_index, group.columns.stop - self._first_index)
            group.prepare_reset(request.seeds[rows], options[rows])
            group.reset()
            self._write_observations(group)
            reset_infos.update(group.take_reset_infos())
        return Done(dumps(reset_infos))

    def _step(self, request: Step) -> Reply:
        infos: dict[int, bytes] = {}
        reset_infos: dict[int, bytes] = {}
        objects = None if request.actions is None else loads(request.actions)
        for group in self._each_group():
            columns = group.columns
            if objects is None:
                group.step_async(self._arrays["actions"][columns].copy())  # environments may keep their action
            else:
                group.step_async(objects[columns.start - self._first_index : columns.stop - self._first_index])
            _, self._arrays["rewards"][columns], self._arrays["dones"][columns], group_infos = group.step_wait()
            self._write_observations(group)
            infos.update(dump_infos(group_infos, columns.start, self._report))
            reset_infos.update(group.take_reset_infos())
        return Stepped(infos, reset_infos)

    def _write_observations(self, group: EnvGroup) -> None:
        for key, buffer in group.buf_obs.items():
            self._arrays["observations", key][group.columns] = buffer

    def _call(self, request: Request) -> Any:
        """Requests that concern single environments; the result has one entry per row."""
        self._report(Activity.CALLING)
        match request:
            case GetAttr(name, rows):
                return self._each_row(rows, lambda group, row: group.get_attr(name, row))
            case HasAttr(name, rows):
                return self._each_row(rows, lambda group, row: [_has_attr(group.envs[row], name)])
            case SetAttr(name, value, rows):
                return self._each_row(rows, lambda group, row: [setattr(group.envs[row], name, loads(value))])  # type: ignore[func-returns-value]
            case CallMethod(name, arguments, rows):
                args, kwargs = loads(arguments)
                return self._each_row(rows, lambda group, row: group.env_method(name, *args, indices=row, **kwargs))
            case IsWrapped(wrapper_class, rows):
                return self._each_row(rows, lambda group, row: group.env_is_wrapped(loads(wrapper_class), row))
            case Render(rows):
                return self._each_row(rows, lambda group, row: [group.envs[row].render()])
        raise ProtocolError(f"Unknown request {type(request).__name__}")

    def _each_row(self, rows: Rows, call: Callable[[EnvGroup, int], list[Any]]) -> list[Any]:
        results: list[Any] = []
        for row in rows:
            index, row_in_group = divmod(row, self._groups[0].num_envs)
            self._generators.enter(index)
            self._report(Activity.CALLING, self._first_index + row)
            results += call(self._groups[index], row_in_group)
        return results

    def _close(self) -> None:
        for index, env in enumerate((env for envs in self._envs for env in envs), start=self._first_index):
            self._report(Activity.CLOSING, index)
            try:
                env.close()
            except BaseException:  # whatever it is, the others want to be closed too
                with suppress(Exception):  # stderr may be closed
                    traceback.print_exc()
