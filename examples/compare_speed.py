"""How much faster than stock SB3? Steps per second, side by side in one run.

    python examples/compare_speed.py                 # every workload that is installed
    python examples/compare_speed.py --workload waiting --repeats 5

The contenders take turns (A B C A B C ...), each repeat is a ``learn()`` after a warm-up, in a process of its own, and the
speed-up is the median over repeats of HTS's steps per second over those of the faster stock contender in the same turn.
"idle" is the share of HTS's wall time in which the learner waited for a rollout. The overlap bound is what overlap alone could
give: the speed-up of stock SB3 if the shorter of its collection and training took no time. Environments that need not wait for
each other, and cheaper acting, can exceed it; too few cores keep one below it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack

from sb3_hts import HTSA2C, HTSPPO, HTSVecEnv


class WaitingEnv(gym.Env[Any, Any]):
    """Each step waits Exp(mean) seconds without using the CPU, as a remote or GPU-bound simulator does."""

    observation_space = spaces.Box(-1, 1, (8,), np.float32)
    action_space = spaces.Discrete(4)

    def __init__(self, mean: float = 0.005) -> None:
        self.mean = mean

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self.np_random.exponential(self.mean))
        return self.np_random.uniform(-1, 1, 8).astype(np.float32), 0.0, bool(self.np_random.random() < 0.01), False, {}


def make_pong(n_envs: int, vec_env_cls: Any, vec_env_kwargs: dict[str, Any]) -> VecEnv:
    import ale_py

    gym.register_envs(ale_py)
    if vec_env_cls is SubprocVecEnv:
        vec_env_kwargs = {"start_method": "fork"}  # its other workers would not know the registration
    env = make_atari_env("PongNoFrameskip-v4", n_envs, vec_env_cls=vec_env_cls, vec_env_kwargs=vec_env_kwargs)
    return VecFrameStack(env, n_stack=4)


class FootballEnv(gym.Env[Any, Any]):
    """Google Research Football's ``academy_3_vs_1_with_keeper``, brought from the old gym API to Gymnasium's."""

    def __init__(self) -> None:
        from gfootball.env import create_environment

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of gym's age
            self.env = create_environment(
                "academy_3_vs_1_with_keeper", representation="simple115v2", rewards="scoring,checkpoints"
            )
        self.observation_space = spaces.Box(-np.inf, np.inf, self.env.observation_space.shape, np.float32)
        self.action_space = spaces.Discrete(int(self.env.action_space.n))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.env.reset().astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, done, _ = self.env.step(action)
        return observation.astype(np.float32), float(reward), done, False, {}

    def close(self) -> None:
        self.env.close()


@dataclass(frozen=True)
class Workload:
    """One row of the table."""

    algorithm: str
    make_env: Callable[..., VecEnv]
    n_envs: int
    envs_per_group: int
    n_timesteps: int
    policy: str = "MlpPolicy"
    hyperparameters: dict[str, Any] = field(default_factory=dict)


PPO_SMALL = {"n_steps": 256, "batch_size": 256, "n_epochs": 10}
WORKLOADS = {
    "cartpole-a2c": Workload("a2c", partial(make_vec_env, "CartPole-v1"), 8, 8, 40_000),
    "cartpole-ppo": Workload("ppo", partial(make_vec_env, "CartPole-v1"), 8, 8, 61_440, hyperparameters=PPO_SMALL),
    "waiting": Workload("ppo", partial(make_vec_env, WaitingEnv), 16, 1, 8_192, hyperparameters={"n_steps": 32}),
    "football": Workload("ppo", partial(make_vec_env, FootballEnv), 8, 4, 12_288, hyperparameters=PPO_SMALL),
    "pong": Workload("ppo", make_pong, 8, 4, 10_240, "CnnPolicy", {"n_steps": 128, "batch_size": 256, "n_epochs": 4}),
}
CONTENDERS: dict[str, Any] = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv, "hts": HTSVecEnv}


class WaitingTime(Logger):
    """Adds up the time that the learner waited; a callback would do too, but make the pipeline wait for itself."""

    total = 0.0

    def record(self, key: str, value: Any, exclude: Any = None) -> None:
        if key == "hts/wait_time":
            self.total += value
        super().record(key, value, exclude)


@dataclass(frozen=True)
class Result:
    """Of one training.

    :param rate: Environment steps per second.
    :param idle: Share of the wall time in which the learner waited for a rollout.
    :param train: Share of the wall time spent in ``train()``.
    """

    rate: float
    idle: float
    train: float

    @property
    def overlap_bound(self) -> float:
        """Speed-up if the shorter of collection and training took no time."""
        return 1 / max(self.train, 1 - self.train)


class Training:
    """Adds up the time that a model spends in ``train()``."""

    def __init__(self, model: PPO | A2C) -> None:
        self.seconds = 0.0
        self._train = model.train
        model.train = self  # type: ignore[method-assign, assignment]

    def __call__(self) -> None:
        started = time.perf_counter()
        self._train()
        self.seconds += time.perf_counter() - started


def measure(workload: Workload, contender: str, seed: int) -> Result:
    """Train once."""
    classes = {"ppo": (PPO, HTSPPO), "a2c": (A2C, HTSA2C)}[workload.algorithm]
    hts = contender == "hts"
    layout = {"envs_per_group": workload.envs_per_group} if hts else {}
    env = workload.make_env(n_envs=workload.n_envs, vec_env_cls=CONTENDERS[contender], vec_env_kwargs=layout)
    model = classes[hts](workload.policy, env, seed=seed, device="cpu", **workload.hyperparameters)
    rollout = model.n_steps * workload.n_envs
    model.learn(2 * rollout)  # warm-up
    logger = WaitingTime(None, [])
    model.set_logger(logger)
    training = Training(model)
    started = time.perf_counter()
    model.learn(workload.n_timesteps)
    wall = time.perf_counter() - started
    env.close()
    return Result(model.num_timesteps / wall, logger.total / wall, training.seconds / wall)


def measure_alone(workload: Workload, contender: str, seed: int) -> Result:
    """The same in a process of its own, where nobody has left anything behind."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(measure, workload, contender, seed).result()


def compare(workload: Workload, contenders: list[str], repeats: int) -> str:
    """A row of the table."""
    turns = [{name: measure_alone(workload, name, seed) for name in contenders} for seed in range(repeats)]
    rates = [np.median([turn[name].rate for turn in turns]) for name in contenders]
    stock = max((name for name in contenders if name != "hts"), key=lambda name: rates[contenders.index(name)])
    ratios = [turn["hts"].rate / turn[stock].rate for turn in turns]
    idle = np.median([turn["hts"].idle for turn in turns])
    bound = np.median([turn[stock].overlap_bound for turn in turns])
    cells = [str(workload.envs_per_group), *(f"{rate:.0f}" for rate in rates)]
    return " | ".join(
        [*cells, f"{np.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})", f"{idle:.1%}", f"{bound:.2f}x"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(WORKLOADS), action="append", help="default: all")
    parser.add_argument("--stock", choices=["dummy", "subproc"], action="append", help="default: both")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    contenders = [*(args.stock or ["dummy", "subproc"]), "hts"]
    print(f"| workload | envs_per_group | {' | '.join(contenders)} | speed-up (spread) | idle | overlap bound |")
    print("|---|---" + "|---" * len(contenders) + "|---|---|---|")
    for name in args.workload or WORKLOADS:
        print(f"| {name} | {compare(WORKLOADS[name], contenders, args.repeats)} |", flush=True)


if __name__ == "__main__":
    main()
