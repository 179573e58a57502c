"""The README's code and the examples run as they stand, and real tasks are learned."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_hts import HTSA2C, HTSPPO, HTSVecEnv

ROOT = Path(__file__).parent.parent


def run(*args: str, cwd: Path = ROOT, timeout: int = 280) -> str:
    result = subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=timeout, cwd=cwd)
    assert result.returncode == 0, result.stderr
    assert "already in registry" not in result.stderr, "a worker must not warn of what was registered for it"
    return result.stdout


def test_readme_code(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        run("-c", block, cwd=tmp_path)
    assert (tmp_path / "cartpole.zip").exists()


def test_the_tests_that_the_readme_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", (ROOT / "README.md").read_text()))
    assert len(named) > 20
    for file, function in named:
        assert f"def {function or 'test_'}" in (ROOT / "tests" / file).read_text(), (file, function)


def test_readme_diff_applies_to_an_sb3_script(tmp_path: Path) -> None:
    """A stock script with exactly the README's changed lines."""
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    new_lines = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    body = """
from stable_baselines3.common.env_util import make_vec_env
if __name__ == "__main__":
    env = make_vec_env("CartPole-v1", n_envs=2, vec_env_cls=SubprocVecEnv)
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=32)
    print(model.learn(128).num_timesteps)
"""
    (tmp_path / "script.py").write_text("\n".join(new_lines) + body)
    assert run(str(tmp_path / "script.py")) == "128\n"


@pytest.mark.timeout(300)
def test_custom_env_example() -> None:
    mean_return = float(re.findall(r"mean episode return: (\S+)", run("examples/custom_env.py"))[0])
    assert mean_return > 0.4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("algorithm", ["ppo", "a2c"])
def test_pong_example(algorithm: str, tmp_path: Path) -> None:
    file = tmp_path / "pong.zip"
    out = run("examples/pong.py", "--algorithm", algorithm, "--timesteps", "2048", "--save", str(file))
    assert "correction" in out
    model: Any = (HTSPPO if algorithm == "ppo" else HTSA2C).load(file)
    assert model.num_timesteps >= 2048
    assert model.policy.action_space.n == 6


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("compare_speed.py --workload cartpole-a2c --repeats 1", "| cartpole-a2c | 8 |"),
        ("compare_inference.py --policy mlp --simulator busy --n-envs 4 --repeats 1", "| mlp | 4 busy |"),
        ("compare_scores.py --help", "Does HTSPPO reach PPO's score"),
    ],
)
def test_comparison_scripts_run(arguments: str, words: str) -> None:
    script, *others = arguments.split()
    assert words in run(f"examples/{script}", *others)


class StopWhenSolved(BaseCallback):
    """Stops once the latest 100 episodes average 475."""

    def _on_step(self) -> bool:
        episodes = self.model.ep_info_buffer
        assert episodes is not None
        return len(episodes) < 100 or sum(episode["r"] for episode in episodes) / len(episodes) < 475


@pytest.mark.timeout(300)
@pytest.mark.parametrize("algorithm", [HTSPPO, HTSA2C])
def test_cartpole_is_solved(algorithm: Any) -> None:
    env = make_vec_env("CartPole-v1", 8, vec_env_cls=HTSVecEnv, vec_env_kwargs={"envs_per_group": 8})  # type: ignore[arg-type]
    kwargs: dict[str, Any] = {"n_steps": 8, "gae_lambda": 0.95, "learning_rate": 2e-3, "normalize_advantage": True}
    if algorithm is HTSPPO:
        kwargs = {"n_steps": 32, "gamma": 0.98, "gae_lambda": 0.8, "learning_rate": 1e-3, "batch_size": 256, "n_epochs": 20}
    model = algorithm("MlpPolicy", env, seed=0, device="cpu", **kwargs)
    model.learn(300_000, StopWhenSolved())
    env.close()
    evaluation_env = make_vec_env("CartPole-v1", 1, vec_env_cls=DummyVecEnv, seed=1)
    assert evaluate_policy(model, evaluation_env, n_eval_episodes=20)[0] >= 475
