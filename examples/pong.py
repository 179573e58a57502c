"""Train on Pong through SB3's own Atari wrappers, with HTSPPO or HTSA2C.

    python examples/pong.py                          # a few thousand steps: shows that it runs
    python examples/pong.py --timesteps 10_000_000   # a full run

Needs ``pip install ".[atari]"``.
"""

from __future__ import annotations

import argparse

import ale_py
import gymnasium as gym
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecFrameStack

from sb3_hts import HTSA2C, HTSPPO, HTSVecEnv

gym.register_envs(ale_py)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=["ppo", "a2c"], default="ppo")
    parser.add_argument("--timesteps", type=int, default=4096)
    parser.add_argument("--n-envs", type=int, default=8)
    parser.add_argument("--envs-per-group", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", help="file for the trained model")
    args = parser.parse_args()

    # The only line that differs from a stock SB3 script, apart from the import
    layout = {"envs_per_group": args.envs_per_group}
    env = make_atari_env("PongNoFrameskip-v4", args.n_envs, vec_env_cls=HTSVecEnv, vec_env_kwargs=layout)  # type: ignore[arg-type]
    env = VecFrameStack(env, n_stack=4)
    if args.algorithm == "ppo":
        model: HTSPPO | HTSA2C = HTSPPO(
            "CnnPolicy",
            env,
            n_steps=128,
            batch_size=256,
            n_epochs=4,
            learning_rate=LinearSchedule(2.5e-4, 0.0, 1.0),
            clip_range=LinearSchedule(0.1, 0.0, 1.0),
            ent_coef=0.01,
            seed=args.seed,
            verbose=1,
        )
    else:
        model = HTSA2C(
            "CnnPolicy",
            env,
            ent_coef=0.01,
            vf_coef=0.25,
            policy_kwargs={"optimizer_kwargs": {"eps": 1e-5}},
            seed=args.seed,
            verbose=1,
        )
    model.learn(args.timesteps)
    if args.save:
        model.save(args.save)
    env.close()


if __name__ == "__main__":
    main()
