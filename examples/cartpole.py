"""Train HTSPPO on CartPole until it is solved (a mean return of at least 475), in well under a minute.

python examples/cartpole.py
"""

from __future__ import annotations

import argparse

from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_hts import HTSPPO, HTSVecEnv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timesteps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    # A step of CartPole takes microseconds, so all environments form one group: one worker, one forward per step
    env = make_vec_env("CartPole-v1", n_envs=8, vec_env_cls=HTSVecEnv, vec_env_kwargs={"envs_per_group": 8})  # type: ignore[arg-type]
    model = HTSPPO(
        "MlpPolicy",
        env,
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        learning_rate=LinearSchedule(1e-3, 0.0, 1.0),
        clip_range=LinearSchedule(0.2, 0.0, 1.0),
        seed=args.seed,
        device="cpu",
        verbose=1,
    )
    model.learn(args.timesteps, log_interval=50)
    env.close()

    evaluation_env = make_vec_env("CartPole-v1", n_envs=1, vec_env_cls=DummyVecEnv, seed=1)
    mean_return, _ = evaluate_policy(model, evaluation_env, n_eval_episodes=20)
    print(f"mean return over 20 episodes: {mean_return:.0f}" + (" (solved)" if mean_return >= 475 else ""))


if __name__ == "__main__":
    main()
