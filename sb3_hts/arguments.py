"""The arguments beyond SB3's: what is allowed, what the defaults are, and what the name of an environment stands for."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import torch as th
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_hts.errors import WorkerRaised
from sb3_hts.inference import BATCHES, INFERENCES
from sb3_hts.placement import checked_count, is_integer
from sb3_hts.vec_env import HTSVecEnv

DEFAULT_SNAPSHOTS = 4
"""Refreshes of the behaviour policy per rollout, if the rollout is long enough."""


@contextmanager
def own_env(env: GymEnv | str, n_envs: int | None) -> Iterator[GymEnv]:
    """Turn an environment's name into an ``HTSVecEnv``, which does not outlive a failure of the block.

    :raises ValueError: If ``n_envs`` is given with anything but a name.
    """
    if not isinstance(env, str):
        if n_envs is not None:
            raise ValueError(
                f"n_envs={n_envs} goes with the name of an environment only: leave it out, or make the environments by "
                f"make_vec_env(..., n_envs={n_envs}, vec_env_cls=HTSVecEnv)."
            )
        yield env
        return
    n_envs = 1 if n_envs is None else checked_count("n_envs", n_envs)
    # Those of a multiprocessing.Pool, for instance, must not have children
    vec_env_cls: Any = DummyVecEnv if multiprocessing.current_process().daemon else HTSVecEnv
    try:
        vec_env = make_vec_env(env, n_envs=n_envs, vec_env_cls=vec_env_cls)
    except WorkerRaised as error:
        # An unknown name, a missing package: as from gym.make() in this process
        if isinstance(error.__cause__, gym.error.Error):
            raise error.__cause__ from None
        raise
    try:
        yield vec_env
    except BaseException:
        vec_env.close()
        raise


def check_arguments(model: Any) -> None:
    """Check the arguments that a model was made or loaded with; puts plain types and numbers in the place of ``None``.

    :param model: An :class:`~sb3_hts.algorithm.HTSOnPolicyAlgorithm`.
    :raises ValueError: If one of them is out of range.
    """
    if not is_integer(model.policy_lag) or model.policy_lag not in (0, 1):
        raise ValueError(f"policy_lag must be 0 (synchronous) or 1 (collect during train()), not {model.policy_lag!r}.")
    if not isinstance(model.correction, str) or model.correction not in model.corrections:
        raise ValueError(f"correction must be one of {sorted(model.corrections)}, not {model.correction!r}.")
    _check_inference(model)
    model.n_steps = checked_count("n_steps", model.n_steps)
    if model.n_snapshots is None or model.n_snapshots == model._default_snapshots:
        model.n_snapshots = model._default_snapshots = min(DEFAULT_SNAPSHOTS, model.n_steps)
    model.n_snapshots = checked_count("n_snapshots", model.n_snapshots)
    if model.n_snapshots > model.n_steps:
        raise ValueError(
            f"n_snapshots={model.n_snapshots} is more than n_steps={model.n_steps}: each snapshot needs at least one step; "
            f"pass n_snapshots={model.n_steps} or less."
        )
    model.policy_lag = int(model.policy_lag)
    if model.env is not None and model.n_envs != model.env.num_envs:
        raise ValueError(f"n_envs={model.n_envs} does not fit the environment, which has {model.env.num_envs}: leave it out.")


def _check_inference(model: Any) -> None:
    for name, choices in (("inference", INFERENCES), ("central_batch", BATCHES)):
        value = getattr(model, name)
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{name} must be one of {sorted(choices)}, not {value!r}.")
    model.n_actors = checked_count("n_actors", model.n_actors)
    model.actor_device = None if model.actor_device is None else _checked_device(model.actor_device)
    if model.inference == "local" and model.actor_device not in (None, "cpu"):
        raise ValueError(
            f'actor_device={model.actor_device!r} does not go with inference="local", which acts on the CPU: pass '
            'inference="central", or leave actor_device out.'
        )


def _checked_device(device: Any) -> str:
    """The name of a device, which may be of another machine."""
    try:
        return str(th.device(device))
    except (RuntimeError, TypeError) as error:
        raise ValueError(f'actor_device={device!r} is not a device: pass one, such as "cuda", or None.') from error
