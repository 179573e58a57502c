"""Your own environment and network, defined in the script itself. There is no ``if __name__ == "__main__":`` guard on purpose.

python examples/custom_env.py
"""

import gymnasium as gym
import numpy as np
import torch as th
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

from sb3_hts import HTSPPO, HTSVecEnv


class Corridor(gym.Env):
    """Walk to the right end of a corridor; each step costs a little."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int = 10) -> None:
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = int(self.np_random.integers(self.length // 2))
        self.steps = 0
        return self._observation(), {}

    def step(self, action):
        self.position = max(0, self.position + (1 if action else -1))
        self.steps += 1
        done = self.position >= self.length
        return self._observation(), 1.0 if done else -0.05, done, self.steps >= 50, {}

    def _observation(self):
        return np.array([self.position / self.length], np.float32)


class Features(BaseFeaturesExtractor):
    def __init__(self, observation_space):
        super().__init__(observation_space, features_dim=8)
        self.net = th.nn.Sequential(th.nn.Linear(1, 8), th.nn.Tanh())

    def forward(self, observations):
        return self.net(observations)


env = make_vec_env(Corridor, n_envs=4, vec_env_cls=HTSVecEnv, env_kwargs={"length": 12})
model = HTSPPO(
    "MlpPolicy",
    env,
    n_steps=64,
    batch_size=64,
    policy_kwargs={"features_extractor_class": Features},
    seed=0,
    device="cpu",
)
model.learn(10_000)
env.close()
print(f"mean episode return: {np.mean([episode['r'] for episode in model.ep_info_buffer]):.2f} (the best is about 0.6)")
