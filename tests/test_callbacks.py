"""The callbacks of SB3, rl_zoo3 and sb3-contrib: HTSPPO and HTSA2C side by side with stock PPO and A2C."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from envs import WalkEnv
from gymnasium import spaces
from rl_zoo3 import callbacks as zoo
from sb3_contrib.common.maskable.callbacks import MaskableEvalCallback
from stable_baselines3 import A2C, PPO
from stable_baselines3.common import callbacks as sb3
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, CheckpointCallback, ConvertCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import Logger, TensorBoardOutputFormat
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecNormalize

from sb3_hts import HTSA2C, HTSPPO, HTSVecEnv

pytestmark = pytest.mark.usefixtures("inference")

N_ENVS, N_STEPS = 4, 8
ROLLOUT = N_ENVS * N_STEPS
TOTAL = 4 * ROLLOUT
STOP_AT = ROLLOUT + 3 * N_ENVS
A2C_KWARGS: dict[str, Any] = {"n_steps": N_STEPS, "policy_kwargs": {"net_arch": [8]}, "device": "cpu", "seed": 3}
KWARGS: dict[Any, dict[str, Any]] = {A2C: A2C_KWARGS, PPO: {**A2C_KWARGS, "batch_size": 16, "n_epochs": 2}}
STOCK: dict[Any, Any] = {HTSPPO: PPO, HTSA2C: A2C}

algorithms_and_lags = pytest.mark.parametrize(("algorithm", "lag"), [(HTSPPO, 0), (HTSPPO, 1), (HTSA2C, 0), (HTSA2C, 1)])
some_algorithms_and_lags = pytest.mark.parametrize(("algorithm", "lag"), [(HTSPPO, 1), (HTSA2C, 0)])


class DriftEnv(WalkEnv):
    """Goes its way whatever the actions are: trainings that act differently see the same episodes."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(0)
        if terminated or truncated:
            info["is_success"] = self.truncates
        return observation, reward, terminated, truncated, info


# --- side by side ---------------------------------------------------------------------------------------------------


def family(callback: BaseCallback) -> Iterator[BaseCallback]:
    """A callback and those that it calls."""
    yield callback
    children = [getattr(callback, "callback_on_new_best", None), getattr(callback, "callback", None)]
    for child in [*children, *getattr(callback, "callbacks", [])]:
        if isinstance(child, BaseCallback):
            yield from family(child)


def model_state(model: Any) -> dict[str, Any]:
    """What callbacks, and those who load a file, see of a model, without what depends on actions."""
    return {
        "num_timesteps": model.num_timesteps,
        "n_updates": model._n_updates,
        "progress": model._current_progress_remaining,
        "episodes": [(episode["r"], episode["l"]) for episode in model.ep_info_buffer],
        "successes": list(model.ep_success_buffer),
        "last_obs": model._last_obs.tolist(),
        "last_episode_starts": model._last_episode_starts.tolist(),
    }


def file_content(path: Path) -> Any:
    match path.suffix:
        case ".npz":
            with np.load(path) as arrays:
                return {name: array.tolist() for name, array in arrays.items()}
        case ".zip":
            data, _, _ = load_from_zip_file(path)
            return model_state(SimpleNamespace(**(data or {})))
    return None


class Trace(TensorBoardOutputFormat):
    """What is called and logged in what order, and what the model looks like then; what callbacks and files say at the end."""

    # What an event may see differently, because ...
    untold: dict[str, tuple[str, ...]] = {  # noqa: RUF012
        # ... it comes before an update in the one case, after it in the other
        "rollout_start": ("n_updates", "progress", "pos", "full"),
        # ... when a callback stops the training, the environments have finished the rollout
        "training_end": ("last_obs", "last_episode_starts"),
    }

    def __init__(self) -> None:
        self.events: list[Any] = []

    def follow(self, callback: BaseCallback) -> None:
        for member in family(callback):
            for event in ("training_start", "rollout_start", "step", "rollout_end", "training_end"):
                method = getattr(member, f"_on_{event}")
                setattr(member, f"_on_{event}", partial(self._call, event, member, method))

    def _call(self, event: str, callback: BaseCallback, method: Callable[[], Any]) -> Any:
        seen = self.look(callback.model) | {"n_calls": callback.n_calls, "callback_timesteps": callback.num_timesteps}
        if event == "step" and "rewards" in callback.locals:
            seen |= {name: callback.locals[name].tolist() for name in ("rewards", "dones", "new_obs")}
        told = {name: value for name, value in seen.items() if name not in self.untold.get(event, ())}
        result = method()
        self.events.append((event, type(callback).__name__, result, told))
        return result

    def look(self, model: Any) -> dict[str, Any]:
        buffer = model.rollout_buffer
        return model_state(model) | {"training": model.policy.training, "pos": buffer.pos, "full": buffer.full}

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, Any], step: int = 0) -> None:
        # Names are compared of all, values of those that do not depend on actions or the clock
        varying = ("train/", "time/fps", "time/time_elapsed")
        kept = {key: value for key, value in key_values.items() if not key.startswith("hts/")}
        self.events.append(("log", step, {k: None if k.startswith(varying) else v for k, v in kept.items()}))

    def conclude(self, callback: BaseCallback, path: Path) -> None:
        self.callbacks = []
        for member in family(callback):
            kept = {k: v for k, v in vars(member).items() if isinstance(v, (bool, int, float, list)) and k != "callbacks"}
            if isinstance(member, sb3.ProgressBarCallback):
                kept["pbar"] = (member.pbar.n, member.pbar.total)
            self.callbacks.append(kept)
        self.files = {str(file.relative_to(path)): file_content(file) for file in sorted(path.rglob("*.*"))}


def with_early_starts(events: list[Any]) -> list[Any]:
    """The one difference that a lag makes: the next rollout starts before the log of and the update on the last one."""
    result: list[Any] = []
    place = 0
    for event in events:
        if event[0] == "rollout_start":
            result.insert(place, event)
            place += 1
        else:
            result.append(event)
            place = len(result) if event[0] in ("training_start", "rollout_end") else place
    return result


Build = Callable[[Path, Any], BaseCallback]
"""Makes a callback, given a folder for files and a function that makes an evaluation environment."""


def run(algorithm: Any, build: Build, path: Path, eval_env_cls: Any = None, wrapper: Any = None, **kwargs: Any) -> Trace:
    trace = Trace()
    stock = STOCK.get(algorithm, algorithm)
    path.mkdir()

    class Traced(algorithm):
        def train(self) -> None:
            trace.events.append(("train", trace.look(self)))
            super().train()

    with ExitStack() as scope:

        def make_env(cls: Any, n_envs: int, seed: int | None = None) -> VecEnv:
            vec_env_cls = partial(cls, envs_per_group=2) if cls is HTSVecEnv else cls
            return scope.enter_context(closing(make_vec_env(DriftEnv, n_envs, seed, vec_env_cls=vec_env_cls)))

        callback = build(path, partial(make_env, eval_env_cls or DummyVecEnv, 2, seed=8))
        trace.follow(callback)
        env = make_env(DummyVecEnv if stock is algorithm else HTSVecEnv, N_ENVS)
        model = Traced("MlpPolicy", wrapper(env) if wrapper else env, **KWARGS[stock], **kwargs)
        model.set_logger(Logger(None, [trace]))
        # Not a multiple of the rollout
        model.learn(TOTAL - 1, callback)
    trace.conclude(callback, path)
    return trace


def evaluating(path: Path, make_env: Any, **kwargs: Any) -> EvalCallback:
    # Not a divisor of the rollout
    return EvalCallback(make_env(), eval_freq=3, n_eval_episodes=3, log_path=str(path), verbose=0, **kwargs)


def reward_threshold(path: Path, make_env: Any) -> BaseCallback:
    return evaluating(path, make_env, callback_on_new_best=sb3.StopTrainingOnRewardThreshold(-5.0))


def no_improvement(path: Path, make_env: Any) -> BaseCallback:
    return evaluating(path, make_env, callback_after_eval=sb3.StopTrainingOnNoModelImprovement(2, min_evals=1))


def max_episodes(*_: Any) -> BaseCallback:
    return CallbackList([sb3.ProgressBarCallback(), sb3.StopTrainingOnMaxEpisodes(3)])


def all_together(path: Path, make_env: Any) -> BaseCallback:
    children = {
        "callback_on_new_best": CheckpointCallback(1, str(path / "new_best")),
        "callback_after_eval": CallbackList([sb3.StopTrainingOnNoModelImprovement(99), ConvertCallback(lambda *_: True)]),
    }
    evaluation = evaluating(path, make_env, best_model_save_path=str(path / "best"), **children)
    checkpoints = [CheckpointCallback(3, str(path), f"{with_}", True, save_vecnormalize=with_) for with_ in (False, True)]
    events = [sb3.EveryNTimesteps(28, CheckpointCallback(1, str(path / "every_28"))), sb3.LogEveryNTimesteps(20)]
    return CallbackList([sb3.ProgressBarCallback(), CallbackList([evaluation, *checkpoints]), *events])


def from_zoo_and_contrib(path: Path, make_env: Any) -> BaseCallback:
    evaluation = MaskableEvalCallback(make_env(), eval_freq=3, log_path=str(path), verbose=0, use_masking=False)
    return CallbackList([zoo.RawStatisticsCallback(), evaluation])


def pruned_trial(path: Path, make_env: Any) -> BaseCallback:
    reports: list[Any] = []
    trial = SimpleNamespace(report=lambda *report: reports.append(report), should_prune=lambda: len(reports) == 4)
    return zoo.TrialEvalCallback(make_env(), trial, 3, eval_freq=3, best_model_save_path=str(path), log_path=str(path))


@pytest.mark.filterwarnings("ignore:rich is experimental")
@algorithms_and_lags
@pytest.mark.parametrize(
    ("build", "eval_env_cls", "n_files", "stop_at"),
    [
        (all_together, DummyVecEnv, 31, TOTAL),
        (all_together, HTSVecEnv, 31, TOTAL),
        (reward_threshold, DummyVecEnv, 1, 48),
        (no_improvement, DummyVecEnv, 1, 120),
        (max_episodes, DummyVecEnv, 0, 72),
        (from_zoo_and_contrib, DummyVecEnv, 1, TOTAL),
        (pruned_trial, DummyVecEnv, 2, 48),
    ],
)
def test_shipped_callbacks_do_what_they_do_in_stock(
    tmp_path: Path, build: Build, eval_env_cls: Any, n_files: int, stop_at: int, algorithm: Any, lag: int
) -> None:
    expected = run(STOCK[algorithm], build, tmp_path / "stock")
    actual = run(algorithm, build, tmp_path / "hts", eval_env_cls, policy_lag=lag)
    assert actual.events == (with_early_starts(expected.events) if lag else expected.events)
    assert actual.callbacks == expected.callbacks
    assert actual.files == expected.files
    assert (len(actual.files), actual.events[-1][-1]["num_timesteps"]) == (n_files, stop_at)


@some_algorithms_and_lags
@pytest.mark.parametrize("answer", [False, None, 0, "", np.False_, "no"], ids=repr)
def test_what_a_plain_function_returns_counts_as_in_stock(tmp_path: Path, answer: Any, algorithm: Any, lag: int) -> None:
    def build(*_: Any) -> BaseCallback:
        return ConvertCallback(lambda locals_, _: answer if locals_["self"].num_timesteps == STOP_AT else True)

    expected = run(STOCK[algorithm], build, tmp_path / "stock")
    actual = run(algorithm, build, tmp_path / "hts", policy_lag=lag)
    assert actual.events == (with_early_starts(expected.events) if lag else expected.events)
    assert actual.callbacks[0]["num_timesteps"] == (TOTAL if answer else STOP_AT)


def statistics(path: Path, _: Any) -> BaseCallback:
    return CheckpointCallback(N_STEPS, str(path), save_vecnormalize=True)


def zoo_statistics(path: Path, _: Any) -> BaseCallback:
    return CallbackList([zoo.SaveVecNormalizeCallback(N_STEPS, str(path), prefix) for prefix in (None, "stats")])


@some_algorithms_and_lags
@pytest.mark.parametrize(("build", "n_files"), [(statistics, 8), (zoo_statistics, 5)])
def test_normalisation_statistics_saved_at_the_end_of_a_rollout_are_those_of_stock(
    tmp_path: Path, build: Build, n_files: int, algorithm: Any, lag: int
) -> None:
    expected = run(STOCK[algorithm], build, tmp_path / "stock", wrapper=VecNormalize)
    actual = run(algorithm, build, tmp_path / "hts", wrapper=VecNormalize, policy_lag=lag)
    assert list(actual.files) == list(expected.files)
    assert len(actual.files) == n_files
    for name in [name for name in actual.files if name.endswith(".pkl")]:
        mine, theirs = (pickle.loads((tmp_path / side / name).read_bytes()) for side in ("hts", "stock"))
        for a, b in ((mine.obs_rms, theirs.obs_rms), (mine.ret_rms, theirs.ret_rms)):
            for moment in ("mean", "var", "count"):
                np.testing.assert_allclose(getattr(a, moment), getattr(b, moment))


# --- curriculum -----------------------------------------------------------------------------------------------------


class LessonEnv(WalkEnv):
    """Remembers with what settings it was stepped, and where it went."""

    def __init__(self, jitter: float) -> None:
        super().__init__(jitter=jitter)
        self.tilt = 0
        self.history: list[tuple[float, int, float]] = []

    def raise_tilt(self, by: int) -> None:
        self.tilt += by

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = super().step(action)
        self.history.append((self.speed, self.tilt, self.position))
        return result


def teach(locals_: dict[str, Any], _: Any) -> bool:
    n_changes, rest = divmod(locals_["self"].num_timesteps // N_ENVS, 5)
    if rest == 0:
        locals_["env"].set_attr("speed", 1 + n_changes)
        locals_["env"].env_method("raise_tilt", by=10, indices=[0, 2])
    return True


@algorithms_and_lags
def test_a_curriculum_acts_at_the_same_boundary_in_every_run(algorithm: Any, lag: int) -> None:
    """Each rollout is made with what was set during the replay of the one before it."""
    results = []
    for n_workers, jitter in ((1, 0.0), (2, 0.001), (4, 0.0), (4, 0.001)):
        with HTSVecEnv([partial(LessonEnv, jitter)] * N_ENVS, n_workers=n_workers, envs_per_group=1) as env:
            model = algorithm("MlpPolicy", env, **KWARGS[STOCK[algorithm]], policy_lag=lag)
            model.learn(TOTAL, teach)
            results.append((env.get_attr("history"), [value.tolist() for value in model.policy.parameters()]))
    n_changes = [rollout * N_STEPS // 5 for rollout in range(4) for _ in range(N_STEPS)]
    for index, history in enumerate(results[0][0]):
        expected = [(1 + n, 10 * n if index in (0, 2) else 0) for n in n_changes]
        assert [(speed, tilt) for speed, tilt, _ in history] == expected
    for result in results[1:]:
        assert result == results[0]


# --- evaluation -----------------------------------------------------------------------------------------------------


class RepeatingEnv(WalkEnv):
    """Each episode has the same course of chance, so that only the policy makes a difference."""

    def __init__(self) -> None:
        super().__init__(action_space=spaces.Box(-1, 1, (2,), np.float32))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=11, options=options)


@algorithms_and_lags
def test_a_logged_score_is_that_of_the_checkpoint(tmp_path: Path, algorithm: Any, lag: int) -> None:
    trace = Trace()
    after_eval = CheckpointCallback(1, str(tmp_path), "after")
    before_eval = CheckpointCallback(3, str(tmp_path), "before")
    with (
        HTSVecEnv([RepeatingEnv] * N_ENVS, 2, 2) as env,
        closing(make_vec_env(RepeatingEnv, 2, vec_env_cls=HTSVecEnv)) as test_env,
    ):
        model = algorithm("MlpPolicy", env, **KWARGS[STOCK[algorithm]], learning_rate=0.01, policy_lag=lag)
        model.set_logger(Logger(None, [trace]))
        evaluation = EvalCallback(test_env, None, after_eval, 2, 3, best_model_save_path=str(tmp_path), verbose=0)
        model.learn(TOTAL, [before_eval, evaluation])
    scores = {event[1]: event[2]["eval/mean_reward"] for event in trace.events if "eval/mean_reward" in event[2]}
    assert list(scores) == [3 * N_ENVS * n for n in range(1, 11)]
    assert len(set(scores.values())) == 4, "one policy per rollout"

    def score(name: str, cls: Any) -> Any:
        return evaluate_policy(cls.load(tmp_path / name), make_vec_env(RepeatingEnv, 2), 2)[0]

    for step, logged in scores.items():
        assert score(f"before_{step}_steps", algorithm) == score(f"after_{step}_steps", STOCK[algorithm]) == logged
    assert score("best_model", algorithm) == evaluation.best_mean_reward == max(scores.values())


class Speaker(BaseCallback):
    def _init_callback(self) -> None:
        warnings.warn("heed me", stacklevel=1)

    def _on_step(self) -> bool:
        return True


def stacked(env: VecEnv) -> VecEnv:
    return VecFrameStack(env, 2)


def test_a_warning_is_shown_once_although_learn_is_called_again() -> None:
    def warn(*_: Any) -> bool:
        warnings.warn("once", stacklevel=1)
        return True

    with HTSVecEnv([DriftEnv]) as env, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        model = HTSA2C("MlpPolicy", env, device="cpu")
        for _ in range(3):
            model.learn(5, warn)
    assert [str(warning.message) for warning in caught] == ["once"]


@pytest.mark.parametrize(
    ("algorithm", "env_cls", "wrap", "eval_env_cls", "wrap_eval", "differ"),
    [
        (HTSPPO, HTSVecEnv, None, DummyVecEnv, None, False),
        (HTSA2C, HTSVecEnv, None, DummyVecEnv, None, False),
        (HTSPPO, HTSVecEnv, None, SubprocVecEnv, None, False),
        (HTSPPO, HTSVecEnv, None, HTSVecEnv, None, False),
        (HTSPPO, HTSVecEnv, stacked, DummyVecEnv, stacked, False),
        (HTSPPO, HTSVecEnv, None, DummyVecEnv, VecNormalize, True),
        (HTSA2C, HTSVecEnv, None, HTSVecEnv, VecNormalize, True),
        (HTSPPO, HTSVecEnv, VecNormalize, DummyVecEnv, None, True),
        (HTSPPO, HTSVecEnv, stacked, SubprocVecEnv, None, True),
        (HTSPPO, DummyVecEnv, None, SubprocVecEnv, None, True),
    ],
)
def test_eval_callback_warns_of_a_real_difference_only(
    algorithm: Any, env_cls: Any, wrap: Any, eval_env_cls: Any, wrap_eval: Any, differ: bool
) -> None:
    with closing(env_cls([DriftEnv])) as env, closing(eval_env_cls([DriftEnv])) as eval_env:
        env, eval_env = (wrap(env) if wrap else env), (wrap_eval(eval_env) if wrap_eval else eval_env)
        one, two, three = (EvalCallback(eval_env) for _ in range(3))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            callbacks = [one, CallbackList([two]), sb3.EveryNTimesteps(10**9, three), Speaker()]
            algorithm("MlpPolicy", env, n_steps=4, device="cpu").learn(4, callbacks)
    messages = [str(warning.message) for warning in caught]
    assert sum("Training and eval env are not of the same type" in message for message in messages) == 3 * differ
    assert messages.count("heed me") == 1
