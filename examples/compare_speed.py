"""How much faster than stock SB3? Steps per second, side by side in one run.

    python examples/compare_speed.py                 # every workload that is installed
    python examples/compare_speed.py --workload waiting --repeats 5

The contenders take turns (A B C A B C ...), each repeat is a ``learn()`` of its own on fresh environments after a warm-up, and
the speed-up is the median over repeats of HTS's steps per second over those of the faster stock contender of the same turn.
"idle" is the share of HTS's wall time in which the learner waited for a rollout.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
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
    "cartpole-a2c": Workload("a2c", partial(make_vec_env, "CartPole-v1"), 8, 8, 16_000),
    "cartpole-ppo": Workload("ppo", partial(make_vec_env, "CartPole-v1"), 8, 8, 20_480, hyperparameters=PPO_SMALL),
    "waiting": Workload("ppo", partial(make_vec_env, WaitingEnv), 16, 1, 8_192, hyperparameters={"n_steps": 32}),
    "pong": Workload("ppo", make_pong, 8, 4, 3_072, "CnnPolicy", {"n_steps": 128, "batch_size": 256, "n_epochs": 4}),
}
CONTENDERS: dict[str, Any] = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv, "hts": HTSVecEnv}


class WaitingTime(Logger):
    """Adds up the time that the learner waited; a callback would do too, but make the pipeline wait for itself."""

    total = 0.0

    def record(self, key: str, value: Any, exclude: Any = None) -> None:
        if key == "hts/wait_time":
            self.total += value
        super().record(key, value, exclude)


def measure(workload: Workload, contender: str, seed: int) -> tuple[float, float]:
    """Train once.

    :return: Steps per second, idle share of the wall time.
    """
    classes = {"ppo": (PPO, HTSPPO), "a2c": (A2C, HTSA2C)}[workload.algorithm]
    hts = contender == "hts"
    layout = {"envs_per_group": workload.envs_per_group} if hts else {}
    env = workload.make_env(n_envs=workload.n_envs, vec_env_cls=CONTENDERS[contender], vec_env_kwargs=layout)
    model = classes[hts](workload.policy, env, seed=seed, device="cpu", **workload.hyperparameters)
    rollout = model.n_steps * workload.n_envs
    model.learn(2 * rollout)  # warm-up
    logger = WaitingTime(None, [])
    model.set_logger(logger)
    started = time.perf_counter()
    model.learn(workload.n_timesteps)
    wall = time.perf_counter() - started
    env.close()
    return model.num_timesteps / wall, logger.total / wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(WORKLOADS), action="append", help="default: all")
    parser.add_argument("--contender", choices=list(CONTENDERS), action="append", help="default: all")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    contenders = args.contender or list(CONTENDERS)
    print(f"| workload | envs_per_group | {' | '.join(contenders)} | speed-up (spread) | idle |")
    print("|---|---" + "|---" * len(contenders) + "|---|---|")
    for name in args.workload or WORKLOADS:
        workload = WORKLOADS[name]
        turns = []
        for seed in range(args.repeats):
            turns.append({contender: measure(workload, contender, seed) for contender in contenders})
        rates = {contender: np.median([turn[contender][0] for turn in turns]) for contender in contenders}
        stock = [contender for contender in contenders if contender != "hts"]
        ratios = [turn["hts"][0] / max(turn[contender][0] for contender in stock) for turn in turns]
        idle = np.median([turn["hts"][1] for turn in turns])
        print(
            f"| {name} | {workload.envs_per_group} | " + " | ".join(f"{rate:.0f}" for rate in rates.values()) + " | "
            f"{np.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f}) | {idle:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
