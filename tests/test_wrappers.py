"""SB3's vectorized wrappers inside the workers: files, warnings, statistics, and what users do with them in between."""

from __future__ import annotations

import csv
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from envs import WalkEnv
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecCheckNan,
    VecEnv,
    VecExtractDictObs,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    sync_envs_normalization,
)

from sb3_hts import HTSA2C, HTSPPO, HTSVecEnv, WorkerError
from sb3_hts.protocol import Activity
from sb3_hts.worker_collector import why_not_in_workers

pytestmark = pytest.mark.usefixtures("inference")

N_ENVS, N_STEPS = 4, 8
ROLLOUT = N_ENVS * N_STEPS
KWARGS: dict[str, Any] = {"n_steps": N_STEPS, "policy_kwargs": {"net_arch": [8]}, "device": "cpu", "seed": 3}
PPO_KWARGS: dict[str, Any] = {**KWARGS, "batch_size": 16, "n_epochs": 2}


def make_env(env_class: Any = WalkEnv, envs_per_group: int = 2, **kwargs: Any) -> HTSVecEnv:
    return HTSVecEnv([env_class] * N_ENVS, envs_per_group=envs_per_group, **kwargs)


def parameters(model: Any) -> list[Any]:
    return [value.clone() for value in model.policy.state_dict().values()]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(th.equal(x, y) for x, y in zip(a, b, strict=True))


class Recorder(BaseCallback):
    """Keeps what each step gave."""

    def __init__(self, at_end: Callable[[Any], None] = lambda _: None) -> None:
        super().__init__()
        self.at_end = at_end
        self.steps: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        self.steps.append({name: self.locals[name] for name in ("infos", "dones", "rewards", "new_obs")})
        return True

    def _on_rollout_end(self) -> None:
        self.at_end(self)


# --- VecMonitor -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("callback", [True, False])
def test_monitor_file_has_every_episode_in_order(tmp_path: Path, callback: bool) -> None:
    recorder = Recorder()
    env = VecMonitor(make_env(), str(tmp_path / "all"), info_keywords=("TimeLimit.truncated",))
    model = HTSPPO("MlpPolicy", env, **PPO_KWARGS).learn(4 * ROLLOUT, recorder if callback else None)
    episodes = [
        info["episode"] for step in recorder.steps for info, done in zip(step["infos"], step["dones"], strict=True) if done
    ]
    env.close()
    assert list(model.ep_info_buffer) == episodes or not callback  # type: ignore[arg-type]
    with open(tmp_path / "all.monitor.csv") as file:
        next(file)  # a comment
        written = list(csv.DictReader(file))
    assert len(written) == env.episode_count > 12
    expected = episodes if callback else list(model.ep_info_buffer)  # type: ignore[arg-type]
    assert written == [{name: str(value) for name, value in episode.items()} for episode in expected]
    assert list(written[0]) == ["r", "l", "t", "TimeLimit.truncated"]


class KeepingEnv(WalkEnv):
    """Returns one info dict for ever, and never clears it."""

    def __init__(self, space: Any = None) -> None:
        super().__init__(space)
        self.info: dict[str, Any] = {}

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], self.info

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        self.info.update(info)
        return observation, reward, terminated, truncated, self.info


def test_environments_may_keep_their_info(tmp_path: Path) -> None:
    space = spaces.Dict(a=spaces.Box(-1, 1, (3,)), b=spaces.Box(-1, 1, (2,)))
    env = VecMonitor(VecExtractDictObs(make_env(partial(KeepingEnv, space)), "a"), str(tmp_path / "all"))
    model = HTSPPO("MlpPolicy", env, **PPO_KWARGS).learn(4 * ROLLOUT)
    env.close()
    assert len((tmp_path / "all.monitor.csv").read_text().splitlines()) - 2 == env.episode_count
    assert len(model.ep_info_buffer) == env.episode_count > 12  # type: ignore[arg-type]


def test_monitor_file_has_the_episodes_of_a_cancelled_rollout(tmp_path: Path) -> None:
    class Exploding(HTSPPO):
        def train(self) -> None:
            if self._n_updates:
                raise Boom
            super().train()

    env = VecMonitor(make_env(n_workers=1), str(tmp_path / "all"))
    with pytest.raises(Boom):
        Exploding("MlpPolicy", env, **PPO_KWARGS).learn(4 * ROLLOUT)
    env.close()
    assert len((tmp_path / "all.monitor.csv").read_text().splitlines()) - 2 == env.episode_count


def test_a_monitor_file_that_is_closed_too_early_keeps_no_memory(tmp_path: Path) -> None:
    """What a failed ``learn()`` leaves behind cannot be written down, but the rest of the cleaning up takes place."""

    class Closing(HTSPPO):
        def train(self) -> None:
            while base.workforce.pool.status.read(0)[0] is not Activity.AWAITING_SNAPSHOT:
                pass  # until episodes have ended in the next rollout
            assert env.results_writer is not None
            env.results_writer.close()
            raise Boom

    with make_env(n_workers=1) as base:
        env = VecMonitor(base, str(tmp_path / "all"))
        with pytest.raises(ValueError, match="closed file"):
            Closing("MlpPolicy", env, policy_lag=1, n_steps=64, batch_size=64).learn(10_000)
        assert base.workforce._owner is None
        assert base.get_attr("speed") == [1.0] * base.num_envs


def test_monitor_returns_are_the_raw_ones_below_normalize(tmp_path: Path) -> None:
    recorder = Recorder()
    env = VecNormalize(VecMonitor(make_env()), gamma=0.9)
    HTSA2C("MlpPolicy", env, **KWARGS).learn(4 * ROLLOUT, recorder)
    env.close()
    # Rewards are normalised, so returns cannot be their sums
    returns, sums = [], np.zeros(N_ENVS)
    for step in recorder.steps:
        sums += step["rewards"]
        for i in np.flatnonzero(step["dones"]):
            returns.append((step["infos"][i]["episode"]["r"], sums[i]))
            sums[i] = 0
    raw, normalised = np.array(returns).T
    assert len(raw) > 10
    assert (np.abs(raw - normalised) > 1e-3).all()


def test_a_missing_keyword_is_the_error_that_it_is_in_stock() -> None:
    env = VecMonitor(make_env(), info_keywords=("nothing",))
    with pytest.raises(WorkerError, match="KeyError: 'nothing'"):
        HTSA2C("MlpPolicy", env, **KWARGS).learn(4 * ROLLOUT)
    env.close()


# --- VecCheckNan ----------------------------------------------------------------------------------------------------


class NanEnv(WalkEnv):
    """Gives a reward that is no number at each fifth step."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, np.nan if self.n_steps % 5 == 0 else reward, terminated, truncated, info


@pytest.mark.parametrize("warn_once", [True, False])
def test_the_main_process_warns_of_nan(warn_once: bool) -> None:
    env = VecCheckNan(make_env(NanEnv), warn_once=warn_once)
    model = HTSA2C("MlpPolicy", env, **KWARGS)
    counts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.learn(ROLLOUT, lambda *_: bool(counts.append(len(caught)) or True))
    env.close()
    messages = [str(warning.message) for warning in caught]
    assert all(message.startswith("found nan in rewards") for message in messages)
    assert len(messages) == (1 if warn_once else 2), "steps 5 of both groups; the update stops at NaN weights"
    assert counts[0] == len(messages), "before the first callback"
    assert env._user_warned


def test_checking_for_nan_may_raise() -> None:
    env = VecCheckNan(make_env(NanEnv), raise_exception=True)
    with pytest.raises(WorkerError, match="ValueError: found nan in rewards"):
        HTSA2C("MlpPolicy", env, **KWARGS).learn(4 * ROLLOUT)
    env.close()


# --- VecNormalize ---------------------------------------------------------------------------------------------------


class Discounted:
    """Recomputes from raw data what ``VecNormalize`` should know.

    Observations and rewards are noted inside the environments (:class:`NotingEnv`).
    """

    def __init__(self, histories: list[list[Any]], first_obs: list[Any], gamma: float) -> None:
        self.observations = np.array([*first_obs, *(obs for history in histories for _, obs, _, _ in history)])
        returns = []
        for history in histories:
            total = 0.0
            for reward, _, done, _ in history:
                total = total * gamma + np.float32(reward)
                returns.append(total)
                total *= not done
        self.returns = np.array(returns)


class NotingEnv(WalkEnv):
    """Writes down what it gives; the observation after a step is that of the reset, if one follows."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[list[Any]] = []
        self.first: Any = None

    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        if self.history:
            self.history[-1][1] = observation
        else:
            self.first = observation
        return observation, info

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        self.history.append([reward, observation, terminated or truncated, truncated])
        return observation, reward, terminated, truncated, info


def assert_statistics(env: VecNormalize, epsilon: float = 1e-4) -> None:
    data = Discounted(env.get_attr("history"), env.get_attr("first"), env.gamma)
    for rms, seen in ((env.obs_rms, data.observations), (env.ret_rms, data.returns)):
        # SB3 begins with mean 0 and variance 1 of weight epsilon
        count = len(seen) + epsilon
        mean = seen.sum(axis=0) / count
        variance = (((seen - mean) ** 2).sum(axis=0) + epsilon * (1 + mean**2)) / count
        assert rms.count == pytest.approx(count, rel=1e-12)  # type: ignore[union-attr]
        np.testing.assert_allclose(rms.mean, mean, rtol=1e-6)  # type: ignore[union-attr]
        np.testing.assert_allclose(rms.var, variance, rtol=1e-6)  # type: ignore[union-attr]


@pytest.mark.parametrize("envs_per_group", [1, 2, 4])
@pytest.mark.parametrize("stack", [False, True])
def test_statistics_are_the_moments_of_exactly_the_data_seen(envs_per_group: int, stack: bool) -> None:
    env = VecNormalize(make_env(NotingEnv, envs_per_group))
    model = HTSPPO("MlpPolicy", VecFrameStack(env, 2) if stack else env, **PPO_KWARGS)
    model.learn(5 * ROLLOUT, Recorder(lambda _: assert_statistics(env)))
    assert_statistics(env)
    env.step(np.zeros(N_ENVS, int))
    assert_statistics(env)
    model.learn(2 * ROLLOUT, reset_num_timesteps=False)
    assert_statistics(env)
    env.close()


class Boom(Exception):
    pass


def test_a_cancelled_rollout_counts_for_the_statistics_as_far_as_it_went() -> None:
    """The environments have taken those steps, although nobody learns from them."""

    class Exploding(HTSPPO):
        def train(self) -> None:
            if self._n_updates:
                raise Boom
            super().train()

    env = VecNormalize(make_env(NotingEnv, n_workers=1))
    with pytest.raises(Boom):
        Exploding("MlpPolicy", env, **PPO_KWARGS).learn(4 * ROLLOUT)
    assert_statistics(env)
    env.close()


def test_statistics_that_are_fixed_stay_and_settings_may_change_in_between() -> None:
    env = VecNormalize(make_env(NotingEnv))
    model = HTSPPO("MlpPolicy", env, **PPO_KWARGS).learn(2 * ROLLOUT)
    before = env.obs_rms.mean.copy(), env.ret_rms.var.copy()  # type: ignore[union-attr]
    env.training = False
    env.norm_reward = False
    recorder = Recorder()
    model.learn(2 * ROLLOUT, recorder, reset_num_timesteps=False)
    np.testing.assert_array_equal(env.obs_rms.mean, before[0])  # type: ignore[union-attr]
    np.testing.assert_array_equal(env.ret_rms.var, before[1])
    for history, column in zip(env.get_attr("history"), range(N_ENVS), strict=True):
        raw = [np.float32(reward) for reward, *_ in history[2 * N_STEPS :]]
        np.testing.assert_array_equal([step["rewards"][column] for step in recorder.steps], raw)
    env.close()


def test_a_callback_may_change_settings_for_the_next_rollout() -> None:
    env = VecNormalize(make_env())
    recorder = Recorder(lambda _: setattr(env, "clip_obs", 0.25))
    HTSPPO("MlpPolicy", env, **PPO_KWARGS).learn(3 * ROLLOUT, recorder)
    largest = [max(np.abs(step["new_obs"]).max() for step in recorder.steps[k : k + N_STEPS]) for k in (0, 8, 16)]
    env.close()
    assert largest[0] > 0.25
    assert largest[1:] == [0.25, 0.25]


def test_statistics_of_an_older_version() -> None:
    """Which has not yet known keys."""
    env = VecNormalize(make_env())
    del env.norm_obs_keys
    HTSPPO("MlpPolicy", env, **PPO_KWARGS).learn(2 * ROLLOUT)
    env.close()


def test_save_load_and_sync(tmp_path: Path) -> None:
    env = VecNormalize(make_env())
    HTSPPO("MlpPolicy", env, **PPO_KWARGS).learn(3 * ROLLOUT)
    env.save(str(tmp_path / "statistics.pkl"))
    fresh = VecNormalize(DummyVecEnv([WalkEnv]), training=False)
    sync_envs_normalization(env, fresh)
    observations = np.linspace(-2, 2, 3, dtype=np.float32)
    other = make_env()
    loaded = VecNormalize.load(str(tmp_path / "statistics.pkl"), other)
    for wrapper in (fresh, loaded):
        np.testing.assert_array_equal(wrapper.normalize_obs(observations), env.normalize_obs(observations))
    assert type(loaded.obs_rms).__module__.startswith("stable_baselines3")
    model = HTSPPO("MlpPolicy", loaded, **PPO_KWARGS).learn(2 * ROLLOUT)
    assert loaded.obs_rms.count > env.obs_rms.count  # type: ignore[union-attr]
    model.save(tmp_path / "model")
    assert HTSPPO.load(tmp_path / "model", env=loaded).get_vec_normalize_env() is loaded
    for open_env in (env, other):
        open_env.close()


@pytest.mark.parametrize("eval_env_class", [DummyVecEnv, HTSVecEnv])
def test_evaluation_is_normalised_as_training_is(eval_env_class: Any) -> None:
    env = VecNormalize(make_env())
    eval_env = VecNormalize(eval_env_class([WalkEnv]), training=False, norm_reward=False)
    seen: list[Any] = []

    class Compare(EvalCallback):
        def _on_step(self) -> bool:
            result = super()._on_step()
            if self.n_calls % self.eval_freq == 0:
                seen.append((env.obs_rms.mean.copy(), eval_env.obs_rms.mean.copy()))  # type: ignore[union-attr]
            return result

    HTSPPO("MlpPolicy", env, **PPO_KWARGS).learn(3 * ROLLOUT, Compare(eval_env, eval_freq=5, n_eval_episodes=2, warn=False))
    for open_env in (env, eval_env):
        open_env.close()
    assert len(seen) == 4
    for ours, theirs in seen:
        np.testing.assert_array_equal(ours, theirs)


def test_timing_and_workers_do_not_matter() -> None:
    results = []
    for n_workers, jitter in ((1, 0.0), (2, 0.003), (4, 0.003)):
        env = VecFrameStack(VecNormalize(make_env(partial(WalkEnv, jitter=jitter), 1, n_workers=n_workers)), 2)
        model = HTSPPO("MlpPolicy", env, **PPO_KWARGS).learn(5 * ROLLOUT)
        statistics: Any = model.get_vec_normalize_env().obs_rms  # type: ignore[union-attr]
        results.append([*parameters(model), th.tensor(statistics.mean), th.tensor(statistics.var)])
        env.close()
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_two_normalizations_keep_apart() -> None:
    """The outer one without statistics of observations must not take the inner one's for its own."""
    inner = VecNormalize(make_env(NotingEnv), norm_reward=False)
    env = VecNormalize(inner, norm_obs=False)
    assert why_not_in_workers(env) is None
    HTSPPO("MlpPolicy", env, **PPO_KWARGS).learn(2 * ROLLOUT)
    assert "obs_rms" not in vars(env)
    assert_statistics(inner)
    env.close()


@pytest.mark.parametrize("keys", [None, []])
def test_normalization_of_observations_may_be_switched_on_later(keys: list[str] | None) -> None:
    """Then they are no longer of the space's dtype."""
    space: Any = spaces.Box(0, 255, (6,), np.uint8)
    if keys is not None:
        space = spaces.Dict(a=space, b=spaces.Discrete(4))
    env = VecNormalize(make_env(partial(WalkEnv, space)), norm_obs_keys=keys)
    env.norm_obs = False
    model = HTSPPO("MlpPolicy" if keys is None else "MultiInputPolicy", env, **PPO_KWARGS).learn(ROLLOUT)
    env.norm_obs = True
    recorder = Recorder()
    model.learn(2 * ROLLOUT, recorder, reset_num_timesteps=False)
    last = recorder.steps[-1]["new_obs"]
    if keys is None:
        assert last.dtype == np.float32
        assert (last % 1 != 0).any()
    else:
        assert (last["a"].dtype, last["b"].dtype) == (np.uint8, np.int64)
    env.close()


# --- what is known ----------------------------------------------------------------------------------------------------


def test_subclasses_of_wrappers_are_not_taken_for_them() -> None:
    class Mine(VecNormalize):
        pass

    env = make_env()
    for wrap, known in ((VecNormalize, True), (Mine, False), (lambda env: VecCheckNan(VecMonitor(env)), True)):
        wrapped: VecEnv = wrap(env)  # type: ignore[operator]
        assert (why_not_in_workers(wrapped) is None) == known
    env.close()


class Forgetful(RunningMeanStd):
    def update(self, arr: Any) -> None:
        self.mean = 0.9 * self.mean + 0.1 * arr.mean(axis=0)


def test_what_users_put_into_a_wrapper_may_keep_it_out_of_the_workers() -> None:
    env = make_env()
    normalize, locked = VecNormalize(env), VecFrameStack(env, 2)
    normalize.obs_rms = Forgetful(shape=(3,))  # type: ignore[assignment]
    locked.lock = threading.Lock()  # type: ignore[attr-defined]
    assert why_not_in_workers(normalize) == "the statistics of VecNormalize are of another class (Forgetful)"
    assert str(why_not_in_workers(locked)).startswith("VecFrameStack cannot be sent to the workers (cannot pickle")
    for wrapped in (normalize, locked):
        HTSPPO("MlpPolicy", wrapped, **PPO_KWARGS).learn(2 * ROLLOUT)
    env.close()
