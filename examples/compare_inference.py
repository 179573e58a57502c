"""Local or central inference? Steps per second of HTSPPO, side by side in one run.

    python examples/compare_inference.py
    python examples/compare_inference.py --policy cnn --simulator waiting --n-envs 64 --repeats 5

The contenders take turns, each training is in a process of its own, and a ratio is the median over turns of a contender's
steps per second over those of local inference in the same turn. Environments that wait have a process each; those that keep a
core busy share one process per core. PPO takes one epoch only, so that collection is what is measured.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from sb3_hts import HTSPPO, HTSVecEnv

OBSERVATIONS = {"mlp": spaces.Box(-1, 1, (8,), np.float32), "cnn": spaces.Box(0, 255, (4, 84, 84), np.uint8)}
CONTENDERS: dict[str, dict[str, Any]] = {
    "local": {"inference": "local"},
    "full": {"inference": "central", "central_batch": "full"},
    "group": {"inference": "central", "central_batch": "group"},
}


class SyntheticEnv(gym.Env[Any, Any]):
    """Each step waits Exp(5 ms) without using the CPU, or keeps it busy for 0.5 ms."""

    action_space = spaces.Discrete(4)

    def __init__(self, policy: str, simulator: str) -> None:
        self.observation_space = OBSERVATIONS[policy]
        self.waits = simulator == "waiting"
        self.observation = self.observation_space.sample()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.waits:
            time.sleep(self.np_random.exponential(0.005))
        else:
            end = time.thread_time() + 0.0005
            while time.thread_time() < end:
                pass
        return self.observation, 0.0, bool(self.np_random.random() < 0.01), False, {}


def measure(policy: str, simulator: str, n_envs: int, contender: str, seed: int) -> float:
    """Steps per second of one training."""
    n_cores = os.cpu_count() or 1
    layout = {} if simulator == "waiting" else {"envs_per_group": max(1, n_envs // n_cores)}
    with HTSVecEnv([partial(SyntheticEnv, policy, simulator)] * n_envs, **layout) as env:
        model = HTSPPO(
            "MlpPolicy" if policy == "mlp" else "CnnPolicy",
            env,
            n_steps=1024 // n_envs,
            batch_size=256,
            n_epochs=1,
            seed=seed,
            device="cpu",
            **CONTENDERS[contender],
        )
        model.learn(2048)  # warm-up
        n_timesteps = 16_384 if policy == "mlp" else 4_096
        started = time.perf_counter()
        model.learn(n_timesteps)
        return n_timesteps / (time.perf_counter() - started)


def measure_alone(*args: Any) -> float:
    """The same in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(measure, *args).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=list(OBSERVATIONS), action="append", help="default: both")
    parser.add_argument("--simulator", choices=["busy", "waiting"], action="append", help="default: both")
    parser.add_argument("--n-envs", type=int, action="append", help="default: 16 and 64")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    others = [name for name in CONTENDERS if name != "local"]
    print(f"| policy | environments | local, steps/s | {' | '.join(others)} |\n|---|---|---" + "|---" * len(others) + "|")
    cells = itertools.product(args.policy or OBSERVATIONS, args.simulator or ["busy", "waiting"], args.n_envs or [16, 64])
    for policy, simulator, n_envs in cells:
        turns = [
            {name: measure_alone(policy, simulator, n_envs, name, seed) for name in CONTENDERS} for seed in range(args.repeats)
        ]
        row = [policy, f"{n_envs} {simulator}", f"{np.median([turn['local'] for turn in turns]):.0f}"]
        for name in others:
            ratios = [turn[name] / turn["local"] for turn in turns]
            row.append(f"{np.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})")
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
