"""Which worker hosts which groups, and which environments a group has. Pure data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Placement:
    """Groups are consecutive slices of the environments, workers host consecutive groups, as evenly as possible.

    :param n_envs: Number of environments.
    :param envs_per_group: Size of each group; divides ``n_envs``.
    :param n_workers: At most as many as there are groups.
    """

    n_envs: int
    envs_per_group: int
    n_workers: int

    @property
    def n_groups(self) -> int:
        return self.n_envs // self.envs_per_group

    def groups_of(self, worker: int) -> range:
        """The groups that a worker hosts."""
        size, larger = divmod(self.n_groups, self.n_workers)
        first = worker * size + min(worker, larger)
        return range(first, first + size + (worker < larger))

    def envs_of(self, worker: int) -> slice:
        """The environments that a worker hosts."""
        groups = self.groups_of(worker)
        return slice(groups.start * self.envs_per_group, groups.stop * self.envs_per_group)

    def columns_of(self, group: int) -> slice:
        """The environments of a group."""
        return slice(group * self.envs_per_group, (group + 1) * self.envs_per_group)

    def worker_of(self, env_index: int) -> int:
        """The worker that hosts an environment."""
        group, (size, larger) = env_index // self.envs_per_group, divmod(self.n_groups, self.n_workers)
        in_larger = larger * (size + 1)
        return group // (size + 1) if group < in_larger else larger + (group - in_larger) // size


def checked_env_fns(env_fns: Any) -> list[Any]:
    """A list of functions that each make an environment.

    :raises ValueError: If it is anything else.
    """
    hint = 'pass [lambda: gym.make("..."), ...] or use make_vec_env(..., vec_env_cls=HTSVecEnv).'
    if not isinstance(env_fns, Iterable) or isinstance(env_fns, (str, bytes, Mapping)):
        raise ValueError(f"env_fns must be a list of functions that each make an environment, not {env_fns!r}: {hint}")
    functions = list(env_fns)
    if not functions:
        raise ValueError(f"HTSVecEnv needs at least one environment, but env_fns is empty: {hint}")
    for index, function in enumerate(functions):
        if not callable(function):
            kind = type(function).__name__
            raise ValueError(f"env_fns[{index}] is a {kind}, not a function that makes an environment: {hint}")
    return functions


def place(n_envs: int, envs_per_group: int | None, n_workers: int | None) -> Placement:
    """Check the arguments of ``HTSVecEnv`` that say what goes where.

    :raises ValueError: If one of them is wrong.
    """
    group_size = 1 if envs_per_group is None else checked_count("envs_per_group", envs_per_group)
    if n_envs % group_size:
        raise ValueError(f"envs_per_group={group_size} does not divide the number of environments, {n_envs}.")
    n_groups = n_envs // group_size
    workers = n_groups if n_workers is None else checked_count("n_workers", n_workers)
    if workers > n_groups:
        raise ValueError(f"n_workers={workers} is more than there are groups of environments, {n_groups}.")
    return Placement(n_envs, group_size, workers)


def is_integer(value: Any) -> bool:
    """Whether a value that a user gave is a whole number, of Python's or numpy's."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def checked_count(name: str, value: Any) -> int:
    """A positive integer that a user gave, as a plain ``int``.

    :raises ValueError: If it is anything else.
    """
    if not is_integer(value) or value < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}.")
    return int(value)
