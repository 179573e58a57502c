"""Promise 1: the same seed gives the same parameters, bit for bit, whatever the timing and the number of workers."""

from __future__ import annotations

import hashlib
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch as th
from envs import WalkEnv
from gymnasium import spaces

from sb3_hts import HTSA2C, HTSPPO, HTSVecEnv

pytestmark = pytest.mark.usefixtures("inference")

BOX = spaces.Box(-1, 1, (2,), np.float32)
JITTER = 0.004


def fingerprint(algorithm: Any, env_fn: Any, n_workers: int | None = None, seed: int = 5, **kwargs: Any) -> str:
    with HTSVecEnv([env_fn] * 8, envs_per_group=2, n_workers=n_workers) as env:
        extra = {"batch_size": 16, "n_epochs": 2} if algorithm is HTSPPO else {}
        model = algorithm("MlpPolicy", env, n_steps=8, seed=seed, device="cpu", **extra, **kwargs)
        model.learn(6 * 64)
    digest = hashlib.sha256()
    for tensor in model.policy.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    digest.update(np.ascontiguousarray(model._last_obs).tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("algorithm", [HTSPPO, HTSA2C])
@pytest.mark.parametrize("action_space", [spaces.Discrete(3), BOX], ids=["discrete", "box"])
def test_timing_and_workers_do_not_matter(algorithm: Any, action_space: spaces.Space[Any]) -> None:
    prints = [fingerprint(algorithm, partial(WalkEnv, None, action_space))]
    for n_workers in (1, 2, 4, 4, None):
        prints.append(fingerprint(algorithm, partial(WalkEnv, None, action_space, JITTER), n_workers))
    assert len(set(prints)) == 1
    assert fingerprint(algorithm, partial(WalkEnv, None, action_space), seed=6) != prints[0]


def test_start_methods_do_not_matter() -> None:
    prints = set()
    for start_method in ("forkserver", "spawn"):
        with HTSVecEnv([WalkEnv] * 2, start_method=start_method) as env:
            model = HTSPPO("MlpPolicy", env, n_steps=8, batch_size=8, n_epochs=2, seed=2**32 - 1, device="cpu").learn(64)
            prints.add(sum(float(p.detach().double().sum()) for p in model.policy.parameters()))
    assert len(prints) == 1


class GlobalEnv(WalkEnv):
    """Draws from every process-wide generator there is."""

    def _observation(self) -> Any:
        return np.array([random.random(), np.random.random(), float(th.rand(()))], np.float32)


def test_environments_may_use_process_wide_generators() -> None:
    """They are seeded per group, and every group has its own state, whatever else its worker hosts."""
    prints = {fingerprint(HTSA2C, GlobalEnv, n_workers) for n_workers in (1, 2, 4)}
    assert len(prints) == 1


def test_process_wide_generators_outside_of_rollouts() -> None:
    """In lockstep, after several ``learn()`` calls, and in what policies leave behind."""
    results = []
    for n_workers in (1, 2, 4):
        with HTSVecEnv([GlobalEnv] * 8, envs_per_group=2, n_workers=n_workers) as env:
            model = HTSA2C("MlpPolicy", env, seed=1, device="cpu")
            model.learn(80)
            model.learn(80)
            results.append([env.step(np.ones(8, int))[0] for _ in range(10)])
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_acting_does_not_touch_the_learners_generators() -> None:
    states = []
    for n_updates in (1, 3):
        with HTSVecEnv([WalkEnv] * 2) as env:
            model = HTSA2C("MlpPolicy", env, seed=0, device="cpu")
            model.learn(n_updates * 10)
        states.append(th.get_rng_state())
    assert th.equal(*states)


def test_without_a_seed_runs_differ() -> None:
    with HTSVecEnv([WalkEnv] * 2) as env:
        keys = {HTSA2C("MlpPolicy", env, device="cpu")._noise_key for _ in range(3)}
    assert len(keys) == 3
