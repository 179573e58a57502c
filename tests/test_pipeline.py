"""The life of a rollout: schedule, callbacks, stops, repeated ``learn()``, files."""

from __future__ import annotations

import copy
import csv
import io
import multiprocessing
import threading
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from envs import WalkEnv
from gymnasium import spaces
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper, VecMonitor

from sb3_hts import HTSA2C, HTSPPO, HTSVecEnv, ProtocolError
from sb3_hts import algorithm as pipeline
from sb3_hts.corrections import Collected
from sb3_hts.worker_collector import WorkerCollector

pytestmark = pytest.mark.usefixtures("inference")

N_ENVS, N_STEPS = 4, 8
ROLLOUT = N_ENVS * N_STEPS
KWARGS: dict[str, Any] = {"n_steps": N_STEPS, "policy_kwargs": {"net_arch": [8]}, "device": "cpu", "seed": 3}
PPO_KWARGS: dict[str, Any] = {**KWARGS, "batch_size": 16, "n_epochs": 2}


def make_model(algorithm: type[HTSPPO] | type[HTSA2C], env: Any, **kwargs: Any) -> HTSPPO | HTSA2C:
    defaults = PPO_KWARGS if issubclass(algorithm, HTSPPO) else KWARGS
    return algorithm("MlpPolicy", env, **{**defaults, **kwargs})


@pytest.fixture
def env() -> Any:
    with HTSVecEnv([WalkEnv] * N_ENVS, envs_per_group=2) as env:
        yield env


def parameters(model: Any) -> list[Any]:
    return [value.clone() for value in model.policy.state_dict().values()]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(th.equal(x, y) for x, y in zip(a, b, strict=True))


# --- schedule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "lag", "n_snapshots"), [(HTSPPO, 1, 1), (HTSPPO, 1, 4), (HTSPPO, 0, 4), (HTSA2C, 1, 1), (HTSA2C, 0, 1)]
)
def test_every_transition_was_made_by_the_policy_of_the_schedule(
    env: HTSVecEnv, monkeypatch: pytest.MonkeyPatch, algorithm: Any, lag: int, n_snapshots: int
) -> None:
    versions, lags = [], []
    wait = WorkerCollector.wait

    def recording_wait(self: WorkerCollector) -> Any:
        rollout = wait(self)
        versions.append(rollout.half.versions.copy())
        return rollout

    class Lags(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            lags.append(self.model.logger.name_to_value["hts/policy_lag"])

    monkeypatch.setattr(WorkerCollector, "wait", recording_wait)
    extra = {"n_snapshots": n_snapshots} if algorithm is HTSPPO else {}
    make_model(algorithm, env, policy_lag=lag, **extra).learn(5 * ROLLOUT, Lags())
    gradient_steps = 4 if algorithm is HTSPPO else 1
    for k, table in enumerate(versions):
        for t in range(N_STEPS):
            if lag == 0 or k == 0:
                expected = (k, 0)
            else:
                snapshot = t * n_snapshots // N_STEPS
                expected = (k - 1, snapshot * gradient_steps // n_snapshots)
            np.testing.assert_array_equal(table[t], [expected] * N_ENVS)
    late = 1 - np.mean([i * gradient_steps // n_snapshots for i in range(n_snapshots)]) / gradient_steps
    assert lags == pytest.approx([0] + [late if lag else 0] * 4)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("algorithm", "stock"), [(HTSPPO, PPO), (HTSA2C, A2C)])
@pytest.mark.parametrize("total", [1, ROLLOUT, 3 * ROLLOUT - 1, 3 * ROLLOUT + 1])
def test_as_many_steps_as_stock(env: HTSVecEnv, algorithm: Any, stock: Any, lag: int, total: int) -> None:
    model = make_model(algorithm, env, policy_lag=lag).learn(total)
    reference_env = DummyVecEnv([WalkEnv] * N_ENVS)
    reference = stock("MlpPolicy", reference_env, **(PPO_KWARGS if stock is PPO else KWARGS)).learn(total)
    assert model.num_timesteps == reference.num_timesteps
    assert env.get_attr("n_steps") == reference_env.get_attr("n_steps")
    assert model._n_updates == reference._n_updates


# --- callbacks ------------------------------------------------------------------------------------------------------


class Recorder(BaseCallback):
    """Writes down every event and what the model looks like then."""

    def __init__(self, stop_at: int = 10**9) -> None:
        super().__init__()
        self.stop_at = stop_at
        self.events: list[Any] = []

    def _note(self, event: str) -> None:
        model: Any = self.model
        self.events.append(
            {
                "event": event,
                "num_timesteps": model.num_timesteps,
                "callback_timesteps": self.num_timesteps,
                "n_calls": self.n_calls,
                "pos": model.rollout_buffer.pos,
                "full": model.rollout_buffer.full,
                "training": model.policy.training,
                "n_updates": model._n_updates,
                "progress": model._current_progress_remaining,
                "n_episodes": len(model.ep_info_buffer),
                "last_obs_shape": model._last_obs.shape,
                "locals": {
                    key: (type(value).__name__, getattr(value, "dtype", None), getattr(value, "shape", None))
                    for key, value in sorted(self.locals.items())
                    # loop variables of SB3's function
                    if key not in ("idx", "done", "terminal_obs", "terminal_value", "self", "env", "callback")
                },
            }
        )

    def _on_training_start(self) -> None:
        self._note("training_start")

    def _on_rollout_start(self) -> None:
        self._note("rollout_start")

    def _on_step(self) -> bool:
        self._note("step")
        return self.num_timesteps < self.stop_at

    def _on_rollout_end(self) -> None:
        self._note("rollout_end")

    def _on_training_end(self) -> None:
        self._note("training_end")


def record(algorithm: Any, vec_env_cls: Any, stop_at: int = 10**9, space: Any = None, **kwargs: Any) -> Any:
    env = make_vec_env(partial(WalkEnv, None, space), N_ENVS, vec_env_cls=vec_env_cls)
    recorder = Recorder(stop_at)
    defaults = PPO_KWARGS if issubclass(algorithm, PPO) else KWARGS
    model = algorithm("MlpPolicy", env, **defaults, **kwargs).learn(3 * ROLLOUT, recorder)
    env.close()
    return model, recorder.events


def without(events: list[Any], event: str) -> list[Any]:
    return [entry for entry in events if entry["event"] != event]


@pytest.mark.parametrize("stop_at", [10**9, ROLLOUT + 3 * N_ENVS, 2 * ROLLOUT])
@pytest.mark.parametrize(("algorithm", "stock"), [(HTSPPO, PPO), (HTSA2C, A2C)])
@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)], ids=["discrete", "box"])
def test_callbacks_see_what_they_see_in_stock(algorithm: Any, stock: Any, stop_at: int, space: Any) -> None:
    _, expected = record(stock, DummyVecEnv, stop_at, space)
    for event in expected:
        # The policies act differently, so other episodes end
        event.pop("n_episodes")
    for lag in (0, 1):
        model, events = record(algorithm, HTSVecEnv, stop_at, space, policy_lag=lag)
        for event in events:
            event.pop("n_episodes")
        if lag == 0:
            assert events == expected
        # The one difference: the next rollout's start comes before the update, not after it
        assert [event["event"] for event in events] == [event["event"] for event in expected]
        assert without(events, "rollout_start") == without(expected, "rollout_start")
        assert model.num_timesteps == min(stop_at, 3 * ROLLOUT)


def test_arrays_given_to_callbacks_never_change(env: HTSVecEnv) -> None:
    names = ("new_obs", "rewards", "dones", "actions", "clipped_actions", "values", "log_probs", "obs_tensor")
    held: list[Any] = []

    def hold(locals_: dict[str, Any], _: dict[str, Any]) -> bool:
        for name in names:
            value = locals_[name]
            held.append((name, value, value.clone() if isinstance(value, th.Tensor) else value.copy()))
        return True

    make_model(HTSPPO, env).learn(6 * ROLLOUT, hold)
    assert len(held) == len(names) * 6 * N_STEPS
    for name, value, then in held:
        np.testing.assert_array_equal(value, then, err_msg=name)


def test_values_given_to_callbacks_belong_together(env: HTSVecEnv) -> None:
    """``new_obs`` of a step is what is stored for the next one; rewards, infos and dones are of the same step."""
    seen: list[dict[str, Any]] = []

    class Keep(BaseCallback):
        def _on_step(self) -> bool:
            seen.append(dict(self.locals))
            return True

        def _on_rollout_end(self) -> None:
            buffer = self.locals["rollout_buffer"]
            steps = seen[-N_STEPS:]
            for t in range(1, N_STEPS):
                np.testing.assert_array_equal(buffer.observations[t], steps[t - 1]["new_obs"])
                np.testing.assert_array_equal(buffer.episode_starts[t], steps[t - 1]["dones"])
            for t, step in enumerate(steps):
                np.testing.assert_array_equal(buffer.actions[t, :, 0], step["actions"])
                for i, info in enumerate(step["infos"]):
                    assert step["dones"][i] == ("terminal_observation" in info)
                    if "position" in info and not step["dones"][i]:
                        assert step["rewards"][i] == np.float32(-abs(info["position"]))
                    bootstrapped = info["TimeLimit.truncated"]
                    assert (buffer.rewards[t, i] != step["rewards"][i]) == bootstrapped

    make_model(HTSPPO, env).learn(4 * ROLLOUT, Keep())
    assert sum(info["TimeLimit.truncated"] for step in seen for info in step["infos"]) > 3


def test_without_callbacks_the_result_is_the_same(env: HTSVecEnv) -> None:
    """Without callbacks the next rollout is launched before the replay of the last; nobody can tell."""
    results = []
    for callback in (None, lambda *_: True):
        model = make_model(HTSPPO, env).learn(4 * ROLLOUT, callback)  # type: ignore[arg-type]
        results.append([*parameters(model), th.as_tensor(model._last_obs), th.as_tensor(model._last_episode_starts)])
    assert same(*results)


def test_changes_made_by_callbacks_hold_for_the_next_rollout(env: HTSVecEnv) -> None:
    """``set_attr`` and ``env_method`` act at once, with the environments at rest."""
    speeds: list[list[float]] = []

    class Curriculum(BaseCallback):
        def _on_step(self) -> bool:
            speeds.append(self.training_env.get_attr("speed"))
            return True

        def _on_rollout_end(self) -> None:
            self.training_env.set_attr("speed", self.num_timesteps / ROLLOUT)

    make_model(HTSPPO, env).learn(3 * ROLLOUT, Curriculum())
    assert speeds == [[1.0] * N_ENVS] * N_STEPS + [[1.0] * N_ENVS] * N_STEPS + [[2.0] * N_ENVS] * N_STEPS


class ScaledPolicy(ActorCriticPolicy):
    """Multiplies its actions by an attribute that is neither parameter nor buffer."""

    scale = 1.0

    def forward(self, obs: th.Tensor, deterministic: bool = False) -> Any:
        actions, values, log_probs = super().forward(obs, deterministic)
        return actions * 0 + self.scale, values, log_probs


def test_structure_that_a_callback_changes_acts_with_the_next_learn() -> None:
    space = spaces.Box(-9, 9, (2,), np.float32)
    seen: list[float] = []

    class Rescale(BaseCallback):
        def _on_step(self) -> bool:
            seen.append(float(self.locals["actions"][0, 0]))
            return True

        def _on_rollout_end(self) -> None:
            self.model.policy.scale = 2.0

    with HTSVecEnv([partial(WalkEnv, None, space)] * 2) as env:
        model = HTSPPO(ScaledPolicy, env, **PPO_KWARGS)
        model.learn(3 * 2 * N_STEPS, Rescale())
        assert seen == [1.0] * 3 * N_STEPS
        seen.clear()
        model.learn(2 * N_STEPS, Rescale())
    assert seen == [2.0] * N_STEPS


@pytest.mark.filterwarnings("ignore:rich is experimental")
def test_progress_bar(env: HTSVecEnv) -> None:
    model = make_model(HTSPPO, env).learn(2 * ROLLOUT, progress_bar=True)
    assert model.num_timesteps == 2 * ROLLOUT


# --- asking the environments while a rollout is in flight ----------------------------------------------------------


def test_environment_call_inside_of_train_cannot_deadlock(env: HTSVecEnv) -> None:
    """The workers wait for snapshots that only ``train`` can publish, and ``train`` waits for the workers."""
    counts: list[list[int]] = []

    class Curious(HTSPPO):
        def train(self) -> None:
            original = self.policy.optimizer.zero_grad

            def zero_grad(*args: Any, **kwargs: Any) -> None:
                counts.append(env.get_attr("n_steps"))
                original(*args, **kwargs)

            self.policy.optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
            super().train()
            del self.policy.optimizer.zero_grad

    make_model(Curious, env, n_snapshots=4).learn(3 * ROLLOUT)
    # During the first two updates the next rollout was complete by the time of the answer
    assert counts == [[16] * N_ENVS] * 4 + [[24] * N_ENVS] * 8


def test_another_thread_waits_for_the_end_of_the_rollout(env: HTSVecEnv) -> None:
    asking, answers = threading.Event(), []

    def ask() -> None:
        asking.set()
        answers.append(env.get_attr("n_steps"))

    class Asked(HTSPPO):
        def train(self) -> None:
            thread = threading.Thread(target=ask)
            thread.start()
            asking.wait()
            super().train()
            thread.join()
            asking.clear()

    make_model(Asked, env).learn(3 * ROLLOUT)
    assert answers == [[16] * N_ENVS, [24] * N_ENVS, [24] * N_ENVS]


# --- ways to end ----------------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


def explode_in_callback(model: Any) -> None:
    def callback(*_: Any) -> bool:
        if model.num_timesteps >= 2 * ROLLOUT:
            raise Boom
        return True

    model.learn(4 * ROLLOUT, callback)


def explode_in_train(model: Any, error: type[BaseException] = Boom) -> None:
    """In the middle of an update, with workers waiting for a snapshot."""
    step, calls = model.policy.optimizer.step, []

    def failing_step(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == (6 if isinstance(model, PPO) else 2):
            raise error
        return step(*args, **kwargs)

    model.policy.optimizer.step = failing_step
    try:
        model.learn(4 * ROLLOUT)
    finally:
        del model.policy.optimizer.step


def explode_in_dump_logs(model: Any) -> None:
    def dump_logs(*_: Any) -> None:
        raise Boom

    model.dump_logs = dump_logs
    try:
        model.learn(4 * ROLLOUT, log_interval=2)
    finally:
        del model.dump_logs


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("algorithm", [HTSPPO, HTSA2C])
@pytest.mark.parametrize(
    "explode",
    [explode_in_callback, explode_in_train, partial(explode_in_train, error=KeyboardInterrupt), explode_in_dump_logs],
    ids=["callback", "train", "interrupt", "dump_logs"],
)
def test_an_exception_leaves_nothing_in_flight_and_nothing_lost(
    env: HTSVecEnv, tmp_path: Path, algorithm: Any, lag: int, explode: Any
) -> None:
    model = make_model(algorithm, env, policy_lag=lag)
    n_threads = th.get_num_threads()
    with pytest.raises((Boom, KeyboardInterrupt)):
        explode(model)
    assert model._run is None
    assert th.get_num_threads() == n_threads
    model.save(tmp_path / "model")
    # The last observation is the environments' present one
    positions = env.get_attr("position")
    np.testing.assert_allclose(model._last_obs[:, 0], np.sin(positions), rtol=1e-5)
    fresh = [taken == 0 for taken in env.get_attr("n_since_reset")]
    np.testing.assert_array_equal(model._last_episode_starts, fresh)
    before = model.num_timesteps
    model.learn(2 * ROLLOUT, reset_num_timesteps=False)
    assert model.num_timesteps == before + 2 * ROLLOUT
    loaded = algorithm.load(tmp_path / "model")
    assert loaded.num_timesteps == before


@pytest.mark.parametrize("algorithm", [HTSPPO, HTSA2C])
def test_episodes_are_noted_without_a_callback_too(algorithm: Any) -> None:
    episodes = []
    for callback in (None, lambda *_: True):
        model = make_model(algorithm, "CartPole-v1", n_envs=N_ENVS)
        model.learn(8 * ROLLOUT, callback)
        episodes.append([(episode["r"], episode["l"]) for episode in model.ep_info_buffer])
        model.env.close()
    assert len(episodes[0]) > 4
    assert episodes[0] == episodes[1]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("algorithm", [HTSPPO, HTSA2C])
def test_what_makes_updates_cheaper_is_in_use(
    env: HTSVecEnv, monkeypatch: pytest.MonkeyPatch, algorithm: Any, lag: int
) -> None:
    active, seen = [], []

    def spying(function: Any) -> Any:
        @contextmanager
        def spy(*args: Any) -> Any:
            with function(*args):
                active.append(function.__name__)
                yield
                active.remove(function.__name__)

        return spy

    for name in ("keeping_freed_memory", "beside_workers", "lean_training"):
        monkeypatch.setattr(pipeline, name, spying(getattr(pipeline, name)))
    stock = algorithm.__mro__[2]
    train = stock.train
    monkeypatch.setattr(stock, "train", lambda self: (seen.append(set(active)), train(self)))
    make_model(algorithm, env, policy_lag=lag).learn(2 * ROLLOUT)
    expected = {"keeping_freed_memory", "lean_training"} | ({"beside_workers"} if lag else set())
    assert seen == [expected] * 2
    assert active == []


def test_delayed_gradient_puts_the_parameters_back_after_an_error(env: HTSVecEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_use(model: Any) -> list[Any]:
        # state_dict() tells what will be, for those who save
        return [parameter.detach().clone() for parameter in model.policy.parameters()]

    model = make_model(HTSA2C, env)
    seen: list[Any] = []
    evaluate = ActorCriticPolicy.evaluate_actions

    def failing_evaluate(*args: Any) -> Any:
        seen.append(in_use(model))
        if len(seen) == 3:
            raise Boom
        return evaluate(*args)

    after: list[Any] = []

    def note(*_: Any) -> bool:
        after.append(in_use(model))
        return True

    monkeypatch.setattr(ActorCriticPolicy, "evaluate_actions", failing_evaluate)
    with pytest.raises(Boom):
        model.learn(4 * ROLLOUT, note)
    assert same(seen[2], seen[1]) is False
    assert not same(seen[2], in_use(model)), "the gradient is taken at older parameters"
    assert same(after[-1], in_use(model)), "which are not those that remain"


def test_stop_by_callback_keeps_the_true_last_observation(env: HTSVecEnv) -> None:
    model = make_model(HTSPPO, env)
    model.learn(4 * ROLLOUT, lambda *_: model.num_timesteps < ROLLOUT + 2 * N_ENVS)  # type: ignore[arg-type]
    assert model.num_timesteps == ROLLOUT + 2 * N_ENVS
    assert model.rollout_buffer.pos == 1
    np.testing.assert_allclose(model._last_obs[:, 0], np.sin(env.get_attr("position")), rtol=1e-5)  # type: ignore[index, call-overload]
    assert env.get_attr("n_steps") == [2 * N_STEPS] * N_ENVS, "the environments have finished the rollout"


def test_a_second_learn_continues(env: HTSVecEnv) -> None:
    model = make_model(HTSPPO, env)
    model.learn(2 * ROLLOUT)
    resets = env.get_attr("n_resets")
    model.learn(2 * ROLLOUT, reset_num_timesteps=False)
    assert model.num_timesteps == 4 * ROLLOUT
    assert model._global_step == 4 * N_STEPS
    model.learn(ROLLOUT)
    assert model.num_timesteps == ROLLOUT
    assert model._global_step == 5 * N_STEPS, "the noise never starts again"
    assert all(after > before for after, before in zip(env.get_attr("n_resets"), resets, strict=True))


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "stock"), [(HTSPPO, PPO), (HTSA2C, A2C)])
def test_save_and_load(env: HTSVecEnv, tmp_path: Path, algorithm: Any, stock: Any) -> None:
    model = make_model(algorithm, env, policy_lag=0)
    model.learn(2 * ROLLOUT)
    model.save(tmp_path / "model")
    for cls in (algorithm, stock):
        loaded = cls.load(tmp_path / "model")
        assert same(parameters(loaded), parameters(model))
        obs = np.ones(3, np.float32)
        assert loaded.predict(obs, deterministic=True)[0] == model.predict(obs, deterministic=True)[0]
    loaded = algorithm.load(tmp_path / "model", env=env)
    assert loaded.policy_lag == 0
    assert (loaded._global_step, loaded._noise_key) == (2 * N_STEPS, 3)
    loaded.learn(ROLLOUT, reset_num_timesteps=False)
    with HTSVecEnv([WalkEnv] * 2) as smaller:
        loaded = algorithm.load(tmp_path / "model", env=smaller, policy_lag=1)
        assert loaded.policy_lag == 1
        loaded.learn(4 * ROLLOUT)
        assert loaded.num_timesteps == 4 * ROLLOUT
    stock_model = stock("MlpPolicy", DummyVecEnv([WalkEnv]), **KWARGS)
    stock_model.save(tmp_path / "stock")
    algorithm.load(tmp_path / "stock", env=env).learn(2 * ROLLOUT)


def test_saving_in_a_callback_does_not_disturb(env: HTSVecEnv) -> None:
    results = []
    for saving in (False, True):
        model = make_model(HTSPPO, env)

        def callback(*_: Any, saving: bool = saving, model: Any = model) -> bool:
            if saving:
                file = io.BytesIO()
                model.save(file)
            return True

        results.append(parameters(model.learn(3 * ROLLOUT, callback)))  # type: ignore[arg-type]
    assert same(*results)


def test_set_env(env: HTSVecEnv) -> None:
    model = make_model(HTSPPO, env).learn(ROLLOUT)
    with HTSVecEnv([WalkEnv] * N_ENVS) as other:
        model.set_env(other)
        model.learn(2 * ROLLOUT)
        assert other.get_attr("n_steps") == [2 * N_STEPS] * N_ENVS


def test_load_checks_what_it_changes(env: HTSVecEnv, tmp_path: Path) -> None:
    make_model(HTSPPO, env).save(tmp_path / "model")
    with pytest.raises(ValueError, match="policy_lag must be 0"):
        HTSPPO.load(tmp_path / "model", policy_lag=2)
    with pytest.raises(ValueError, match="n_envs=3 does not fit the environment, which has 4"):
        HTSPPO.load(tmp_path / "model", env=env, n_envs=3)


# --- callbacks that change what they see ------------------------------------------------------------------------------


class Changing(BaseCallback):
    """Halves the rewards in place, as a callback for reward shaping may, and looks at the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.expected: list[Any] = []
        self.stored: list[Any] = []

    def _on_step(self) -> bool:
        buffer = self.locals["rollout_buffer"]
        assert not buffer.rewards[buffer.pos :].any(), "the future must not be there yet"
        self.locals["rewards"] *= 0.5
        self.expected.append(self.locals["rewards"].copy())
        return True

    def _on_rollout_end(self) -> None:
        self.stored += list(self.locals["rollout_buffer"].rewards)


@pytest.mark.parametrize("algorithm", [HTSPPO, HTSA2C])
def test_rewards_may_be_changed_in_place(algorithm: Any) -> None:
    callback = Changing()
    with HTSVecEnv([partial(CountingRewardEnv, 100)] * 2) as env:
        make_model(algorithm, env).learn(3 * 2 * N_STEPS, callback)
    assert len(callback.stored) == 3 * N_STEPS
    np.testing.assert_array_equal(callback.stored, callback.expected)


@pytest.mark.parametrize("lag", [0, 1])
def test_dones_may_be_changed_in_place(lag: int) -> None:
    """An episode of the callback's making: starts, returns and what the model begins the next rollout with follow."""
    starts: dict[Any, list[Any]] = {}

    class Cut(BaseCallback):
        def _on_step(self) -> bool:
            if self.n_calls % 4 == 0:
                self.locals["dones"][:] = True
            return True

        def _on_rollout_end(self) -> None:
            starts.setdefault(type(self.model), []).append(self.model.rollout_buffer.episode_starts.copy())  # type: ignore[attr-defined]

    reference = PPO("MlpPolicy", DummyVecEnv([partial(CountingRewardEnv, 100)] * 2), **PPO_KWARGS).learn(
        3 * 2 * N_STEPS, Cut()
    )
    with HTSVecEnv([partial(CountingRewardEnv, 100)] * 2) as env:
        model = make_model(HTSPPO, env, policy_lag=lag).learn(3 * 2 * N_STEPS, Cut())
    np.testing.assert_array_equal(starts[HTSPPO], starts[PPO])
    np.testing.assert_array_equal(model._last_episode_starts, reference._last_episode_starts)  # type: ignore[arg-type]


class CountingRewardEnv(WalkEnv):
    """Never ends, so that no bootstrap is added to the rewards."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def reset(self, **kwargs: Any) -> Any:
        result = super().reset(**kwargs)
        self.remaining = self.length
        return result


class AtRolloutEnd(BaseCallback):
    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.change(self.locals["rollout_buffer"])


@pytest.mark.parametrize(
    ("algorithm", "kwargs"),
    [(HTSPPO, {"correction": "proximal"}), (HTSPPO, {"correction": "behaviour"}), (HTSA2C, {"correction": "none"})],
)
@pytest.mark.parametrize("name", ["advantages", "returns"])
def test_advantages_and_returns_that_a_callback_changes_stay(
    env: HTSVecEnv, monkeypatch: pytest.MonkeyPatch, algorithm: Any, kwargs: dict[str, Any], name: str
) -> None:
    seen = []
    model = make_model(algorithm, env, **kwargs)
    stock_train = (PPO if algorithm is HTSPPO else A2C).train

    def train(self: Any) -> None:
        seen.append(getattr(self.rollout_buffer, name).copy())
        stock_train(self)

    monkeypatch.setattr(PPO if algorithm is HTSPPO else A2C, "train", train)
    changed = np.random.default_rng(0).normal(size=(N_STEPS, N_ENVS)).astype(np.float32)
    model.learn(3 * ROLLOUT, AtRolloutEnd(lambda buffer: setattr(buffer, name, changed.copy())))
    assert len(seen) == 3
    for array in seen:
        np.testing.assert_array_equal(array, changed)


@pytest.mark.parametrize("observation_space", [None, spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(-1, 1, (2, 3)))])
def test_reading_the_buffer_in_a_callback_changes_nothing(observation_space: Any) -> None:
    def read(buffer: RolloutBuffer) -> None:
        state = np.random.get_state()
        for _ in range(2):
            assert sum(len(batch.actions) for batch in buffer.get(5)) == ROLLOUT
        np.random.set_state(state)

    policy = "MlpPolicy" if observation_space is None else "MultiInputPolicy"
    results = []
    for change in (read, lambda _: None):
        with HTSVecEnv([partial(WalkEnv, observation_space)] * N_ENVS, envs_per_group=2) as env:
            model = HTSPPO(policy, env, **PPO_KWARGS)
            results.append(parameters(model.learn(4 * ROLLOUT, AtRolloutEnd(change))))
    assert same(*results)


@pytest.mark.parametrize("correction", ["proximal", "decoupled"])
def test_a_callback_may_start_each_rollout_anew(monkeypatch: pytest.MonkeyPatch, correction: str) -> None:
    """What it makes the model see next is not what the last rollout ended with."""
    ends: list[Any] = []

    def recording(_: Any, policy: Any, buffer: Any, collected: Collected, *others: Any) -> None:
        ends.append((np.copy(collected.end.observations), collected.end.episode_starts.copy()))

    class Restart(BaseCallback):
        def __init__(self) -> None:
            super().__init__()
            self.ends: list[Any] = []

        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            self.ends.append((self.locals["new_obs"].copy(), self.locals["dones"].copy()))
            self.model._last_obs = self.training_env.reset()
            self.model._last_episode_starts = np.ones(N_ENVS, bool)

    monkeypatch.setattr("sb3_hts.algorithm.correct_rollout", recording)
    with HTSVecEnv([WalkEnv] * N_ENVS) as env:
        callback = Restart()
        make_model(HTSPPO, env, correction=correction).learn(3 * ROLLOUT, callback)
    assert len(ends) == 2
    np.testing.assert_equal(ends, callback.ends[1:])


# --- subclasses -----------------------------------------------------------------------------------------------------


class OwnTrain(HTSPPO):
    """Does not know of ours."""

    def train(self) -> None:
        PPO.train(self)


def test_a_train_of_ones_own(env: HTSVecEnv) -> None:
    model = OwnTrain("MlpPolicy", env, **PPO_KWARGS).learn(4 * ROLLOUT)
    assert model._n_updates == 4 * 2


@pytest.mark.parametrize(
    ("algorithm", "kwargs"), [(HTSPPO, {}), (HTSPPO, {"correction": "decoupled"}), (HTSA2C, {"correction": "truncated_is"})]
)
def test_training_may_read_the_buffer_first_or_happen_twice(env: HTSVecEnv, algorithm: Any, kwargs: Any) -> None:
    class Reading(algorithm):
        def train(self) -> None:
            state = np.random.get_state()
            assert sum(len(batch.actions) for batch in self.rollout_buffer.get(5)) == ROLLOUT
            np.random.set_state(state)
            super().train()

    class Twice(algorithm):
        def train(self) -> None:
            super().train()
            super().train()

    results = [parameters(make_model(cls, env, **kwargs).learn(4 * ROLLOUT)) for cls in (Reading, algorithm)]
    assert same(*results)
    assert make_model(Twice, env, **kwargs).learn(3 * ROLLOUT)._n_updates == 2 * 3 * (2 if algorithm is HTSPPO else 1)


@pytest.mark.parametrize("vec_env_cls", [HTSVecEnv, DummyVecEnv])
def test_a_callback_may_call_learn(vec_env_cls: Any) -> None:
    counts = []
    for cls in (HTSPPO, PPO):
        env = vec_env_cls([WalkEnv] * N_ENVS)
        model = cls("MlpPolicy", env, **PPO_KWARGS)
        nested: list[Any] = []

        def nest(_: Any, model: Any = model, nested: list[Any] = nested) -> None:
            if not nested:
                nested.append(None)
                model.learn(ROLLOUT, reset_num_timesteps=False)

        model.learn(4 * ROLLOUT, AtRolloutEnd(nest))
        counts.append((model.num_timesteps, model._n_updates, env.get_attr("n_steps")))
        env.close()
    assert counts[0] == counts[1]


def test_rollouts_without_training(env: HTSVecEnv) -> None:
    model = make_model(HTSPPO, env)
    _, callback = model._setup_learn(100 * ROLLOUT)
    with model._pipeline():
        for _ in range(3):
            assert model.collect_rollouts(env, callback, model.rollout_buffer, N_STEPS)
        with pytest.raises(ValueError, match="n_rollout_steps=3 must be the model's n_steps=8"):
            model.collect_rollouts(env, callback, model.rollout_buffer, 3)
    assert model.num_timesteps == 3 * ROLLOUT


def test_two_models_do_not_share_environments_at_the_same_time(env: HTSVecEnv) -> None:
    inner = make_model(HTSPPO, env)
    outer = make_model(HTSPPO, env)
    with pytest.raises(ProtocolError, match="Another model has begun to train on these environments"):
        outer.learn(3 * ROLLOUT, AtRolloutEnd(lambda _: inner.learn(ROLLOUT)))
    outer.learn(ROLLOUT)
    assert env.get_attr("speed") == [1.0] * N_ENVS


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "kwargs", "message"),
    [
        (HTSPPO, {"policy_lag": 2}, "policy_lag must be 0 .* or 1 .*, not 2"),
        (HTSPPO, {"correction": "magic"}, r"correction must be one of \['behaviour', 'decoupled', 'proximal'\], not 'magic'"),
        (HTSA2C, {"correction": "proximal"}, r"correction must be one of \['delayed_gradient', 'none', 'truncated_is'\]"),
        (HTSPPO, {"inference": "remote"}, "inference must be"),
        (HTSPPO, {"n_snapshots": 9}, "n_snapshots=9 is more than n_steps=8"),
        (HTSPPO, {"n_snapshots": 0}, "n_snapshots must be a positive integer"),
        (HTSPPO, {"n_snapshots": "4"}, "n_snapshots must be a positive integer"),
        (HTSPPO, {"correction": ["proximal"]}, "correction must be one of"),
        (HTSPPO, {"n_envs": 4}, "n_envs=4 goes with the name of an environment only: leave it out"),
    ],
)
def test_bad_arguments(env: HTSVecEnv, algorithm: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model(algorithm, env, **kwargs)


def test_a_process_that_must_not_have_children_trains_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those of ``multiprocessing.Pool``."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    model = HTSPPO("MlpPolicy", "CartPole-v1", n_envs=2, n_steps=16, batch_size=16, device="cpu").learn(64)
    assert type(model.get_env()) is DummyVecEnv


def test_a_name_makes_an_hts_vec_env() -> None:
    model = HTSPPO("MlpPolicy", "CartPole-v1", n_envs=2, n_steps=16, batch_size=16, device="cpu")
    assert type(model.get_env()) is HTSVecEnv
    assert model.get_env().env_is_wrapped.__self__.num_envs == 2  # type: ignore[union-attr]
    model.learn(64)
    model.get_env().close()  # type: ignore[union-attr]


def test_spaces_that_sb3_refuses_leave_no_worker_behind() -> None:
    with pytest.raises(AssertionError, match="only supports"):
        HTSPPO("MlpPolicy", DummyVecEnv([partial(WalkEnv, None, spaces.Tuple((spaces.Discrete(2),)))]))
    with (
        pytest.raises(ValueError, match="MultiInputPolicy"),
        HTSVecEnv([partial(WalkEnv, spaces.Dict(a=spaces.Discrete(2)))]) as env,
    ):
        HTSPPO("MlpPolicy", env)


def test_an_unknown_name_is_the_error_that_gymnasium_raises() -> None:
    for name, error in (("NoSuchGame-v0", gym.error.NameNotFound), ("CartPole-v99", gym.error.VersionNotFound)):
        with pytest.raises(error):
            HTSPPO("MlpPolicy", name, n_envs=2)


@pytest.mark.parametrize("n_envs", [0, -1, 1.5, True, "2"])
def test_bad_numbers_of_environments(n_envs: Any) -> None:
    with pytest.raises(ValueError, match="n_envs must be a positive integer"):
        HTSPPO("MlpPolicy", "CartPole-v1", n_envs=n_envs)


def test_short_rollouts_have_fewer_snapshots(env: HTSVecEnv) -> None:
    assert make_model(HTSPPO, env).n_snapshots == 4
    model = make_model(HTSPPO, env, n_steps=2, batch_size=8)
    assert model.n_snapshots == 2
    model.learn(5 * 2 * N_ENVS)
    with pytest.raises(ValueError, match="n_snapshots=4 is more than n_steps=2"):
        make_model(HTSPPO, env, n_steps=2, batch_size=8, n_snapshots=4)


def test_a_failing_constructor_closes_the_environment_that_it_made() -> None:
    with pytest.raises(ValueError, match="policy_lag"):
        HTSPPO("MlpPolicy", "CartPole-v1", n_envs=2, policy_lag=3)


# --- other environments, buffers, logs ------------------------------------------------------------------------------


class Unknown(VecEnvWrapper):
    """No wrapper that the package knows."""

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        return self.venv.step_wait()


@pytest.mark.parametrize(
    ("wrap", "reason"),
    [
        (None, "DummyVecEnv is not an HTSVecEnv"),
        (Unknown, "the wrapper Unknown cannot run inside the workers"),
        (lambda env: VecMonitor(VecMonitor(env)), "there is more than one VecMonitor"),
    ],
)
def test_says_once_which_collector_is_used_and_why(
    capsys: pytest.CaptureFixture[str], env: HTSVecEnv, wrap: Any, reason: str
) -> None:
    model = make_model(HTSPPO, wrap(env) if wrap else DummyVecEnv([WalkEnv] * N_ENVS), verbose=1)
    model.learn(3 * ROLLOUT)
    out = capsys.readouterr().out
    sentence = f"HTS: a thread of this process steps all environments in lockstep, because {reason}, policy lag 1"
    assert out.count("HTS: ") == out.count(sentence) == 1
    assert model.num_timesteps == 3 * ROLLOUT


class ParametrizedExtractor(FlattenExtractor):
    """torch refuses to pickle parametrizations."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__(observation_space)
        self.normed = th.nn.utils.parametrizations.weight_norm(th.nn.Linear(3, 3))

    def forward(self, observations: Any) -> Any:
        return self.normed(super().forward(observations))


def test_policies_that_cannot_be_sent_act_in_a_thread(env: HTSVecEnv) -> None:
    kwargs: dict[str, Any] = {**PPO_KWARGS, "policy_kwargs": {"features_extractor_class": ParametrizedExtractor}}
    model = HTSPPO("MlpPolicy", env, **kwargs)
    with pytest.warns(UserWarning, match=r"because policy.features_extractor.normed cannot be pickled .*parametrized"):
        model.learn(3 * ROLLOUT)
    assert model.num_timesteps == 3 * ROLLOUT
    reference = HTSPPO("MlpPolicy", DummyVecEnv([WalkEnv] * N_ENVS), **kwargs).learn(3 * ROLLOUT)
    assert same(parameters(model), parameters(reference))


class LockedExtractor(FlattenExtractor):
    def __init__(self, observation_space: Any) -> None:
        super().__init__(observation_space)
        self.lock = threading.Lock()


def test_policies_that_cannot_even_be_copied_are_run_by_sb3s_own_loop() -> None:
    results = []
    for algorithm in (HTSPPO, PPO):
        kwargs: dict[str, Any] = {**PPO_KWARGS, "policy_kwargs": {"features_extractor_class": LockedExtractor}}
        model = algorithm("MlpPolicy", DummyVecEnv([WalkEnv] * N_ENVS), **kwargs)
        with nullcontext() if algorithm is PPO else pytest.warns(UserWarning, match=r"cannot be copied: .*lock"):
            model.learn(3 * ROLLOUT)
        results.append(parameters(model))
    assert same(*results)


class CountingBuffer(RolloutBuffer):
    adds = 0

    def add(self, *args: Any, **kwargs: Any) -> None:
        type(self).adds += 1
        super().add(*args, **kwargs)


def test_a_buffer_subclass_gets_every_step_by_add(env: HTSVecEnv) -> None:
    CountingBuffer.adds = 0
    results = [
        parameters(make_model(HTSPPO, env, rollout_buffer_class=cls).learn(3 * ROLLOUT)) for cls in (None, CountingBuffer)
    ]
    assert CountingBuffer.adds == 3 * N_STEPS
    assert same(*results)


class BonusBuffer(RolloutBuffer):
    """Adds to rewards when returns are computed, the usual place for intrinsic ones."""

    def compute_returns_and_advantage(self, *args: Any, **kwargs: Any) -> None:
        self.rewards += 1.0
        super().compute_returns_and_advantage(*args, **kwargs)


def test_a_buffer_that_adds_to_rewards_adds_once(env: HTSVecEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards: list[Any] = []
    train = PPO.train

    def noting(self: Any) -> None:
        rewards.append(self.rollout_buffer.rewards - bonus_free[-1])
        train(self)

    bonus_free: list[Any] = []

    def note(locals_: dict[str, Any], _: Any) -> bool:
        if locals_["n_steps"] == N_STEPS - 1:
            bonus_free.append(locals_["rollout_buffer"].rewards.copy())
        return True

    monkeypatch.setattr(PPO, "train", noting)
    make_model(HTSPPO, env, rollout_buffer_class=BonusBuffer).learn(3 * ROLLOUT, note)
    for added in rewards:
        np.testing.assert_allclose(added[: N_STEPS - 1], 1.0, rtol=1e-5)


class CompressingBuffer(RolloutBuffer):
    """Stores observations as bytes."""

    def reset(self) -> None:
        super().reset()
        self.observations = np.empty((self.buffer_size, self.n_envs), object)

    def add(self, obs: Any, *args: Any, **kwargs: Any) -> None:
        kept, t = self.observations, self.pos
        self.observations = np.zeros((self.buffer_size, self.n_envs, *self.obs_shape), np.float32)
        super().add(obs, *args, **kwargs)
        for i, row in enumerate(self.observations[t]):
            kept[t, i] = row.tobytes()
        self.observations = kept

    def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
        kept = self.observations
        self.observations = np.stack([np.frombuffer(row[0], np.float32) for row in kept])
        try:
            return super()._get_samples(batch_inds, env)
        finally:
            self.observations = kept


def test_a_buffer_may_store_observations_in_its_own_way(env: HTSVecEnv) -> None:
    results = [
        parameters(make_model(HTSPPO, env, rollout_buffer_class=cls).learn(3 * ROLLOUT)) for cls in (None, CompressingBuffer)
    ]
    assert same(*results)


def test_copies_made_during_an_update_stand_alone(env: HTSVecEnv) -> None:
    model = make_model(HTSPPO, env)
    copies: list[Any] = []
    model.policy.optimizer.register_step_post_hook(lambda *_: copies or copies.append(copy.deepcopy(model.policy)))
    model.learn(2 * ROLLOUT)
    live = {id(parameter) for parameter in model.policy.parameters()}
    assert not live & {id(parameter) for parameter in copies[0].parameters()}
    model.policy.set_training_mode(True)
    copies[0].set_training_mode(False)
    assert model.policy.mlp_extractor.training
    assert not copies[0].mlp_extractor.training


def test_an_overridden_info_buffer_sees_every_step(env: HTSVecEnv) -> None:
    class Noting(HTSPPO):
        n_noted = 0

        def _update_info_buffer(self, infos: Any, dones: Any = None) -> None:
            self.n_noted += 1
            super()._update_info_buffer(infos, dones)

    assert make_model(Noting, env).learn(3 * ROLLOUT).n_noted == 3 * N_STEPS  # type: ignore[union-attr]


def test_log_keys(env: HTSVecEnv, tmp_path: Path) -> None:
    keys = []
    for algorithm, vec_env in ((HTSPPO, env), (PPO, DummyVecEnv([WalkEnv] * N_ENVS))):
        model = algorithm("MlpPolicy", vec_env, **PPO_KWARGS)
        model.set_logger(configure(str(tmp_path / algorithm.__name__), ["csv", "tensorboard"]))
        model.learn(3 * ROLLOUT)
        model.logger.close()
        keys.append(set((tmp_path / algorithm.__name__ / "progress.csv").read_text().splitlines()[0].split(",")))
    assert keys[0] - keys[1] == {"hts/policy_lag", "hts/rollout_time", "hts/wait_time", "hts/overlap"}
    assert keys[1] <= keys[0]


def test_what_callbacks_dump_does_not_take_the_rollouts_statistics_away(env: HTSVecEnv, tmp_path: Path) -> None:
    model = make_model(HTSPPO, env)
    model.set_logger(configure(str(tmp_path), ["csv"]))
    model.learn(3 * ROLLOUT, lambda *_: model.logger.dump(model.num_timesteps) or True)
    model.logger.close()
    with open(tmp_path / "progress.csv") as file:
        rows = list(csv.DictReader(file))
    assert all(bool(row["hts/overlap"]) == bool(row["time/iterations"]) for row in rows)
    assert sum(bool(row["hts/overlap"]) for row in rows) == 3


def test_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with HTSVecEnv([WalkEnv] * 2) as env:
        make_model(HTSPPO, env, verbose=1).learn(ROLLOUT)
    out = capsys.readouterr().out
    assert "HTS: 2 workers, 2 groups of 1, inference " in out
    assert ", 0.0 MiB shared, policy lag 1, correction 'proximal'." in out


@pytest.mark.parametrize(("limit", "envs_per_group", "hint"), [(1e9, 1, True), (0.0, 1, False), (1e9, 2, False)])
def test_recommends_groups_for_cheap_environments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, limit: float, envs_per_group: int, hint: bool
) -> None:
    monkeypatch.setattr("sb3_hts.worker_collector.CHEAP_STEP", limit)
    with HTSVecEnv([WalkEnv] * 2, envs_per_group=envs_per_group) as env:
        make_model(HTSPPO, env, verbose=1).learn(3 * ROLLOUT)
    assert capsys.readouterr().out.count("envs_per_group=2) in make_vec_env()") == hint
