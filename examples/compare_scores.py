"""Does HTSPPO reach PPO's score at equal steps? Trains both on several tasks and seeds and prints a table.

    python examples/compare_scores.py                     # everything: hours
    python examples/compare_scores.py --task CartPole-v1 --seeds 2

HalfCheetah and Hopper need ``pip install ".[mujoco]"``. Each cell is
"mean return over the last 10 % of the steps / over the whole run", averaged over the seeds.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_hts import HTSPPO, HTSVecEnv

TASKS = {"CartPole-v1": 50_000, "Acrobot-v1": 80_000, "HalfCheetah-v5": 100_000, "Hopper-v5": 100_000}
N_ENVS = 8
HYPERPARAMETERS: dict[str, Any] = {"n_steps": 256, "batch_size": 128, "n_epochs": 10, "device": "cpu"}
CONTENDERS: dict[str, dict[str, Any] | None] = {
    "PPO": None,
    "HTSPPO proximal": {"correction": "proximal"},
    "HTSPPO decoupled": {"correction": "decoupled"},
    "HTSPPO behaviour, 1 snapshot": {"correction": "behaviour", "n_snapshots": 1},
}


class EpisodeReturns(BaseCallback):
    """Collects ``(timestep, return)`` of every finished episode."""

    def __init__(self) -> None:
        super().__init__()
        self.episodes: list[tuple[int, float]] = []

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self.episodes.append((self.num_timesteps, info["episode"]["r"]))
        return True


def score(contender: dict[str, Any] | None, task: str, n_steps: int, seed: int) -> tuple[float, float]:
    """Train once; mean return over the last tenth, and over all."""
    returns = EpisodeReturns()
    if contender is None:
        env = make_vec_env(task, N_ENVS, vec_env_cls=DummyVecEnv)
        PPO("MlpPolicy", env, seed=seed, **HYPERPARAMETERS).learn(n_steps, returns)
    else:
        env = make_vec_env(task, N_ENVS, vec_env_cls=HTSVecEnv, vec_env_kwargs={"envs_per_group": N_ENVS})  # type: ignore[arg-type]
        HTSPPO("MlpPolicy", env, seed=seed, **HYPERPARAMETERS, **contender).learn(n_steps, returns)
    env.close()
    steps, values = np.array(returns.episodes).T
    return float(values[steps > 0.9 * n_steps].mean()), float(values.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), action="append", help="default: all")
    parser.add_argument("--contender", choices=list(CONTENDERS), action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    names = args.contender or list(CONTENDERS)
    print("| task, steps | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for task in args.task or TASKS:
        cells = []
        for name in names:
            scores = [score(CONTENDERS[name], task, TASKS[task], seed) for seed in range(args.seeds)]
            last, whole = np.mean(scores, axis=0)
            cells.append(f"{last:.0f} / {whole:.0f}")
        print(f"| {task}, {TASKS[task] // 1000}k | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
