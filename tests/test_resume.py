"""Files, further calls of ``learn()``, logs and bad input, side by side with stock SB3."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from envs import WalkEnv
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sb3_hts import HTSA2C, HTSPPO, HTSVecEnv

N_ENVS, N_STEPS = 4, 8
ROLLOUT = N_ENVS * N_STEPS
both_algorithms = pytest.mark.parametrize(("ours", "stock"), [(HTSPPO, PPO), (HTSA2C, A2C)])


@pytest.fixture
def make_env() -> Any:
    """Makes environments of the kind that goes with an algorithm, and closes them; ``Monitor`` records the episodes."""
    with ExitStack() as stack:

        def make_env(algorithm: Any, n_envs: int = N_ENVS, **kwargs: Any) -> VecEnv:
            workers: Any = {"vec_env_cls": HTSVecEnv, "vec_env_kwargs": {"envs_per_group": 2}}
            env = make_vec_env(partial(WalkEnv, **kwargs), n_envs, **(workers if algorithm in (HTSPPO, HTSA2C) else {}))
            stack.callback(env.close)
            return env

        yield make_env


def falling(progress_remaining: float) -> float:
    """A learning rate that shows which share of the run is left."""
    return 1e-2 * progress_remaining


def make(algorithm: Any, env: Any, **kwargs: Any) -> Any:
    defaults: dict[str, Any] = {"n_steps": N_STEPS, "policy_kwargs": {"net_arch": [8]}, "device": "cpu", "seed": 3}
    defaults |= {"batch_size": 16, "n_epochs": 2} if issubclass(algorithm, PPO) else {}
    return algorithm("MlpPolicy", env, **{"learning_rate": falling, **defaults, **kwargs})


def saved(model: Any, **kwargs: Any) -> io.BytesIO:
    file = io.BytesIO()
    model.save(file, **kwargs)
    return file


def learned(model: Any) -> list[th.Tensor]:
    """Parameters and the optimizer's state."""
    moments = [value for entry in model.policy.optimizer.state_dict()["state"].values() for value in entry.values()]
    return [th.as_tensor(tensor).clone() for tensor in [*model.policy.state_dict().values(), *moments]]


def state(model: Any) -> list[th.Tensor]:
    """What is learned, and where the environments are."""
    return [*learned(model), th.as_tensor(model._last_obs).clone(), th.as_tensor(model._last_episode_starts).clone()]


def same(a: list[th.Tensor], b: list[th.Tensor]) -> bool:
    return all(th.equal(x, y) for x, y in zip(a, b, strict=True))


def facts(model: Any) -> dict[str, Any]:
    """What does not depend on how the policy acts, and so must be as in stock SB3."""
    optimizer = model.policy.optimizer.state_dict()
    return {
        "counters": (model.num_timesteps, model._total_timesteps, model._num_timesteps_at_start, model._n_updates),
        "progress": model._current_progress_remaining,
        "optimizer": optimizer["param_groups"],
        "optimizer_steps": [float(entry["step"]) for entry in optimizer["state"].values()],
        "optimizer_state": [tensor.shape for tensor in learned(model)],
        "buffer": (model.rollout_buffer.observations.shape, model.rollout_buffer.full, model.rollout_buffer.pos),
        "window": model.ep_info_buffer.maxlen,
    }


def predictions(model: Any) -> list[Any]:
    obs = np.linspace(-1, 1, 30, dtype=np.float32).reshape(10, 3)
    policy = getattr(model, "policy", model)
    return [model.predict(obs, deterministic=True)[0].tolist(), policy.predict_values(th.as_tensor(obs)).tolist()]


# --- learn, save, load, learn -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1])
@both_algorithms
def test_counters_schedules_and_optimizer_go_on_as_in_stock(make_env: Any, ours: Any, stock: Any, lag: int) -> None:
    histories = []
    for algorithm in (ours, stock):
        env = make_env(algorithm)
        model = make(algorithm, env, **({"policy_lag": lag} if algorithm is ours else {})).learn(3 * ROLLOUT)
        loaded = algorithm.load(saved(model), env=env)
        history = [facts(model), facts(loaded)]
        # Less than a rollout, nothing at all, more of the same, and twice from the start
        for total, reset in ((1, False), (0, False), (2 * ROLLOUT, False), (ROLLOUT + 1, True), (0, True)):
            history.append(facts(loaded.learn(total, reset_num_timesteps=reset)))
        histories.append(history)
    assert histories[0] == histories[1]
    assert histories[0][-3]["counters"][0] == 6 * ROLLOUT


def split_run(make_env: Any, algorithm: Any, by_file: bool, force_reset: bool, **kwargs: Any) -> list[th.Tensor]:
    env = make_env(algorithm)
    model = make(algorithm, env, **kwargs).learn(3 * ROLLOUT)
    if by_file:
        model = algorithm.load(saved(model), env=env, force_reset=force_reset)
    else:
        # All else that load() does, to the model and to the environments
        model.set_env(env, force_reset=force_reset)
        model.set_random_seed(model.seed)
    # load() draws initial parameters, so stock's generators stand elsewhere
    set_random_seed(11)
    return state(model.learn(3 * ROLLOUT, reset_num_timesteps=False))


@pytest.mark.parametrize("force_reset", [False, True])
@pytest.mark.parametrize(
    ("algorithm", "kwargs"),
    [(PPO, {}), (A2C, {}), *((ours, {"policy_lag": lag}) for ours in (HTSPPO, HTSA2C) for lag in (0, 1))],
)
def test_a_file_between_two_learns_changes_nothing(make_env: Any, algorithm: Any, kwargs: Any, force_reset: bool) -> None:
    expected = split_run(make_env, algorithm, False, force_reset, **kwargs)
    assert same(split_run(make_env, algorithm, True, force_reset, **kwargs), expected)


@pytest.mark.parametrize("algorithm", [HTSPPO, HTSA2C])
def test_split_runs_repeat(make_env: Any, algorithm: Any) -> None:
    results = []
    for seed in (3, 3, 4):
        env = make_env(algorithm)
        model = algorithm.load(saved(make(algorithm, env, seed=seed).learn(2 * ROLLOUT)), env=env)
        results.append(state(model.learn(2 * ROLLOUT, reset_num_timesteps=False)))
    assert same(results[0], results[1])
    assert not same(results[0], results[2])


@pytest.mark.parametrize("way", ["load", "set_random_seed"])
@pytest.mark.parametrize("algorithm", [HTSPPO, PPO])
def test_another_seed_means_other_actions(make_env: Any, algorithm: Any, way: str) -> None:
    # The observation is always the same, so nothing but the policy's noise can make a difference
    env = make_env(algorithm, observation_space=spaces.Discrete(1))
    file, actions = saved(make(algorithm, env)), []
    for seed in (5, 5, 6):
        model = algorithm.load(file, env=env, **({"seed": seed} if way == "load" else {}))
        if way == "set_random_seed":
            model.set_random_seed(seed)
        actions.append(model.learn(1).rollout_buffer.actions.flatten().tolist())
    assert actions[0] == actions[1]
    assert actions[0] != actions[2]


@both_algorithms
def test_another_number_of_environments(make_env: Any, ours: Any, stock: Any) -> None:
    """``set_env`` refuses it, ``load`` does not: as in stock."""
    results = []
    for algorithm in (ours, stock):
        env, smaller = make_env(algorithm), make_env(algorithm, 2)
        model = make(algorithm, env).learn(ROLLOUT)
        with pytest.raises(AssertionError, match="number of environments to be set is different") as caught:
            model.set_env(smaller)
        result: list[Any] = [str(caught.value).replace(algorithm.__name__, "ALGORITHM")]
        for its_env in (env, smaller, env):
            model = algorithm.load(saved(model), env=its_env)
            result.append(facts(model.learn(2 * ROLLOUT, reset_num_timesteps=False)))
        model = algorithm.load(saved(model))
        with pytest.raises(AssertionError):
            model.learn(ROLLOUT)  # a file brings no environments along
        model.set_env(env)
        results.append([*result, facts(model.learn(ROLLOUT, reset_num_timesteps=False))])
    assert results[0] == results[1]


@both_algorithms
def test_files_go_from_one_to_the_other_and_back(make_env: Any, ours: Any, stock: Any) -> None:
    env = {algorithm: make_env(algorithm) for algorithm in (ours, stock)}
    model = make(stock, env[stock]).learn(ROLLOUT)
    for hop, algorithm in enumerate((ours, stock, ours, stock), start=2):
        loaded = algorithm.load(saved(model), env=env[algorithm])
        assert type(loaded) is algorithm
        assert predictions(loaded) == predictions(model)
        assert same(learned(loaded), learned(model))
        if algorithm is ours:
            assert (loaded.policy_lag, loaded.n_snapshots, loaded.inference) == (1, 4 if ours is HTSPPO else 1, "auto")
        model = loaded.learn(ROLLOUT, reset_num_timesteps=False)
        assert model.num_timesteps == hop * ROLLOUT
    assert model._global_step == 2 * N_STEPS, "stock's files keep our place in the noise"


@pytest.mark.parametrize("way", ["keyword", "custom_objects"])
@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        (HTSPPO, {"policy_lag": "1"}, "policy_lag must be 0"),
        (HTSPPO, {"n_snapshots": 9}, "n_snapshots=9 is more than n_steps=8"),
        (HTSPPO, {"n_snapshots": 2.5}, "n_snapshots must be a positive integer, not 2.5"),
        (HTSPPO, {"n_steps": 2, "n_snapshots": 3}, "n_snapshots=3 is more than n_steps=2"),
        (HTSPPO, {"n_steps": 0}, "n_steps must be a positive integer, not 0"),
        (HTSPPO, {"correction": "delayed_gradient"}, "correction must be one of .*'proximal'"),
        (HTSA2C, {"correction": None}, "correction must be one of .*'delayed_gradient'"),
        (HTSA2C, {"inference": "remote"}, "inference must be"),
    ],
)
def test_load_checks_every_argument(algorithm: Any, changes: dict[str, Any], message: str, way: str) -> None:
    file = saved(make(algorithm, DummyVecEnv([WalkEnv] * N_ENVS)))
    with pytest.raises(ValueError, match=message):
        algorithm.load(file, **(changes if way == "keyword" else {"custom_objects": changes}))


def test_a_default_that_depends_on_another_argument_follows_it() -> None:
    file = saved(make(HTSPPO, DummyVecEnv([WalkEnv] * N_ENVS)))
    for n_steps, n_snapshots in ((2, 2), (3, 3), (64, 4)):
        assert HTSPPO.load(file, n_steps=n_steps).n_snapshots == n_snapshots
        file.seek(0)


def test_another_number_of_environments_needs_a_reset() -> None:
    with HTSVecEnv([WalkEnv] * 2) as env:
        file = saved(make(HTSPPO, DummyVecEnv([WalkEnv] * N_ENVS)).learn(1))
        model = HTSPPO.load(file, env=env, force_reset=False)
        with pytest.raises(
            ValueError, match="The model stopped in 4 environments, but now there are 2: load it with force_reset"
        ):
            model.learn(8, reset_num_timesteps=False)
        model.learn(8)


@both_algorithms
def test_load_takes_what_stock_takes(make_env: Any, ours: Any, stock: Any) -> None:
    """Any keyword becomes an attribute; ``custom_objects`` take the place of what is in the file."""
    results = []
    for algorithm in (ours, stock):
        env = make_env(algorithm)
        file = saved(make(algorithm, env).learn(ROLLOUT))
        custom = {"learning_rate": 5e-4, "lr_schedule": None, "policy_lag": 0, "not_in_the_file": 1}
        model = algorithm.load(file, env=env, custom_objects=custom, no_such_argument=7, gamma=0.5, n_steps=4)
        assert (model.no_such_argument, model.rollout_buffer.gamma, getattr(model, "policy_lag", 0)) == (7, 0.5, 0)
        assert not hasattr(model, "not_in_the_file")
        results.append(facts(model.learn(ROLLOUT, reset_num_timesteps=False)))
        with pytest.raises(ValueError, match="policy kwargs do not equal"):
            algorithm.load(file, policy_kwargs={"net_arch": [9]})
    assert results[0] == results[1]
    assert results[0]["optimizer"][0]["lr"] == 5e-4


@both_algorithms
def test_what_a_file_holds(make_env: Any, ours: Any, stock: Any, tmp_path: Path) -> None:
    contents = []
    for algorithm in (ours, stock):
        env = make_env(algorithm)
        model = make(algorithm, env).learn(ROLLOUT)
        model.save(str(tmp_path / "string"))
        model.save(tmp_path / "path.zip")
        for name in ("string.zip", "path.zip"):
            assert predictions(algorithm.load(tmp_path / name)) == predictions(model)
        contents.append(load_from_zip_file(tmp_path / "string.zip")[0])
        # Some more than usual, some less, which then has its default
        file = saved(model, include=["rollout_buffer"], exclude=["policy_lag", "correction", "_noise_key", "_last_obs"])
        np.testing.assert_array_equal(load_from_zip_file(file)[0]["rollout_buffer"].actions, model.rollout_buffer.actions)
        algorithm.load(file, env=env).learn(ROLLOUT)
    numbers = ("policy_lag", "n_snapshots", "n_actors", "_noise_key", "_global_step", "_n_trained")
    own: dict[str, type] = {**dict.fromkeys(numbers, int), "correction": str, "inference": str, "central_batch": str}
    own["actor_device"] = type(None)
    if ours is HTSPPO:
        own["_default_snapshots"] = int
    assert set(contents[0]) == set(contents[1]) | set(own)
    assert {name: type(contents[0][name]) for name in own} == own


# --- saving while training --------------------------------------------------------------------------------------------


class Saving(BaseCallback):
    """Saves at every event."""

    def __init__(self, save: Callable[[], None]) -> None:
        super().__init__()
        self.save = save

    def _on_step(self) -> bool:
        self.save()
        return True

    _on_training_start = _on_rollout_start = _on_rollout_end = _on_training_end = _on_step  # type: ignore[assignment]


def before_each_gradient_step(model: Any, function: Callable[[], None]) -> None:
    """Call the function with a rollout in flight, whose workers may be waiting for a snapshot."""
    zero_grad = model.policy.optimizer.zero_grad
    model.policy.optimizer.zero_grad = lambda: (function(), zero_grad())


@pytest.mark.parametrize("where", ["callback", "train", "thread"])
@both_algorithms
def test_saving_at_any_time_does_not_disturb(make_env: Any, ours: Any, stock: Any, where: str) -> None:
    env = make_env(ours)
    expected = state(make(ours, env).learn(4 * ROLLOUT))
    model = make(ours, env)
    files: list[io.BytesIO] = []

    def save() -> None:
        files.append(saved(model))

    def save_in_a_thread() -> None:
        with ThreadPoolExecutor() as pool:
            pool.submit(save).result()

    if where != "callback":
        before_each_gradient_step(model, save if where == "train" else save_in_a_thread)
    model.learn(4 * ROLLOUT, Saving(save) if where == "callback" else None)
    assert same(state(model), expected)
    for file in (files[0], files[len(files) // 2], files[-1]):
        for algorithm in (ours, stock):
            loaded = algorithm.load(file, env=env)
            before = loaded.num_timesteps
            assert loaded.learn(ROLLOUT, reset_num_timesteps=False).num_timesteps == before + ROLLOUT


@pytest.mark.parametrize("what", ["learned", "settings"])
@both_algorithms
def test_a_file_saved_in_the_middle_of_an_update_holds_what_stocks_does(
    make_env: Any, ours: Any, stock: Any, what: str
) -> None:
    """The newest parameters, and the optimizer as it was made: the handler of a signal may save at any moment."""
    settings = []
    for algorithm in (ours, stock):
        model = make(algorithm, make_env(algorithm))
        newest, files = [learned(model)], []
        before_each_gradient_step(model, lambda model=model, files=files: files.append(saved(model)))
        model.policy.optimizer.register_step_post_hook(lambda *_, m=model, newest=newest: newest.append(learned(m)))
        model.learn(4 * ROLLOUT)
        loaded = [algorithm.load(file) for file in files]
        assert len(newest) - 1 == len(files) == (16 if issubclass(algorithm, PPO) else 4)
        if what == "learned":
            assert [same(learned(a), b) for a, b in zip(loaded, newest[:-1], strict=True)] == [True] * len(files)
        settings.append([entry.policy.optimizer.state_dict()["param_groups"] for entry in loaded])
    assert what == "learned" or settings[0] == settings[1]


# --- between two calls of learn ---------------------------------------------------------------------------------------


@both_algorithms
def test_evaluation_on_the_training_environments(make_env: Any, ours: Any, stock: Any) -> None:
    """As in stock, the next rollout begins with the observation from before the evaluation: nobody tells the model."""
    results = []
    for algorithm in (ours, ours, stock):
        env = make_env(algorithm)
        model = make(algorithm, env).learn(2 * ROLLOUT)
        before = model._last_obs.copy(), model._last_episode_starts.copy()
        evaluate_policy(model, model.get_env(), n_eval_episodes=5)
        model.learn(ROLLOUT, reset_num_timesteps=False)
        # train() has flattened the observations, one environment after the other
        np.testing.assert_array_equal(model.rollout_buffer.observations[::N_STEPS], before[0])
        np.testing.assert_array_equal(model.rollout_buffer.episode_starts[0], before[1])
        np.testing.assert_allclose(model._last_obs[:, 0], np.sin(env.get_attr("position")), rtol=1e-5)
        results.append((state(model), facts(model)))
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[2][1]


@pytest.mark.parametrize("way", ["dictionary", "file", "policy"])
@pytest.mark.parametrize(("algorithm", "correction"), [(HTSPPO, "behaviour"), (HTSA2C, "none")])
def test_workers_act_with_parameters_that_were_set(
    make_env: Any, algorithm: Any, correction: str, way: str, tmp_path: Path
) -> None:
    env = make_env(algorithm)
    source = make(algorithm, env, seed=8).learn(2 * ROLLOUT)
    source.policy.save(tmp_path / "policy")
    # Nothing is learned, so the log-probabilities in the buffer must be those of the parameters that were set
    model = make(algorithm, env, learning_rate=0.0, correction=correction).learn(ROLLOUT)
    match way:
        case "dictionary":
            model.set_parameters(source.get_parameters())
        case "file":
            model.set_parameters(saved(source))
        case "policy":
            policy = ActorCriticPolicy.load(tmp_path / "policy", device="cpu")
            assert predictions(policy) == predictions(source)
            model.policy.load_state_dict(policy.state_dict())
    model.learn(ROLLOUT, reset_num_timesteps=False)
    for batch in model.rollout_buffer.get():
        log_probs = source.policy.evaluate_actions(batch.observations, batch.actions.long().flatten())[1]
        th.testing.assert_close(batch.old_log_prob, log_probs)
    for bad, message in (({"policy": {}}, "Missing key"), ({"nothing": {}}, "nothing is an invalid object name")):
        with pytest.raises((ValueError, RuntimeError), match=message):
            model.set_parameters(bad)


# --- logs -------------------------------------------------------------------------------------------------------------


@both_algorithms
def test_what_is_logged(make_env: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ours: Any, stock: Any) -> None:
    # Every learn() begins at 0 s and logs at 1 s, so that the speed is its number of steps
    monkeypatch.setattr("stable_baselines3.common.base_class.time", SimpleNamespace(time_ns=lambda: 0))
    monkeypatch.setattr("stable_baselines3.common.on_policy_algorithm.time", SimpleNamespace(time_ns=lambda: 10**9))
    names = ("time/fps", "time/total_timesteps", "time/iterations", "train/n_updates", "train/learning_rate")
    logs, keys = [], []
    for algorithm in (ours, stock):
        env, folder = make_env(algorithm), tmp_path / algorithm.__name__
        logger = configure(str(folder), ["csv", "json", "tensorboard", "log"])
        model = make(algorithm, env, stats_window_size=2)
        for reset, reload in ((True, False), (False, False), (False, True), (True, False)):
            model = algorithm.load(saved(model), env=env) if reload else model
            model.set_logger(logger)
            model.learn(3 * ROLLOUT, log_interval=1, reset_num_timesteps=reset)
            rows = [json.loads(line) for line in (folder / "progress.json").read_text().splitlines()]
            assert len(model.ep_info_buffer) == 2
            assert rows[-1]["rollout/ep_rew_mean"] == pytest.approx(
                np.mean([episode["r"] for episode in model.ep_info_buffer])
            )
        logger.close()
        table = (folder / "progress.csv").read_text().splitlines()
        scalars = EventAccumulator(str(folder)).Reload().Tags()["scalars"]
        keys.append([set(table[0].split(",")), *map(set, rows), set(scalars)])
        logs.append([[row.get(name) for name in names] for row in rows])
    assert logs[0] == logs[1]
    steps = [ROLLOUT, 2 * ROLLOUT, 3 * ROLLOUT]
    assert [row[0] for row in logs[0]] == 4 * steps
    assert [row[1] for row in logs[0]] == [*range(ROLLOUT, 10 * ROLLOUT, ROLLOUT), *steps]
    own = {f"hts/{name}" for name in ("policy_lag", "rollout_time", "wait_time", "overlap")}
    assert keys[0] == [theirs | own for theirs in keys[1]]


@both_algorithms
def test_folders_of_tensorboard_logs(make_env: Any, ours: Any, stock: Any, tmp_path: Path) -> None:
    for algorithm in (ours, stock):
        env, name = make_env(algorithm), algorithm.__name__
        model = make(algorithm, env, tensorboard_log=str(tmp_path / name))
        folders = []
        for kwargs in ({}, {"tb_log_name": "run"}, {"tb_log_name": "run"}, {}, {"tb_log_name": "other"}):
            for reset in (True, False):
                model.learn(ROLLOUT, reset_num_timesteps=reset, log_interval=1, **kwargs)
                model.logger.close()
                folders.append(Path(model.logger.get_dir()).name)
        model = algorithm.load(saved(model), env=env).learn(ROLLOUT, tb_log_name="run", reset_num_timesteps=False)
        model.logger.close()
        folders.append(Path(model.logger.get_dir()).name)
        assert folders == [f"{name}_1"] * 2 + ["run_1"] * 2 + ["run_2"] * 2 + [f"{name}_2"] * 2 + ["other_1"] * 2 + ["run_2"]
        assert {path.name for path in (tmp_path / name).iterdir()} == set(folders)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env_fns",
    [None, 5, WalkEnv(), WalkEnv, lambda: WalkEnv(), "CartPole-v1", [None], ["CartPole-v1"], [WalkEnv()], {"a": WalkEnv}],
    ids=["none", "number", "env", "class", "function", "name", "nones", "names", "envs", "dict"],
)
def test_env_fns_of_a_wrong_type_are_named_before_any_worker_starts(monkeypatch: pytest.MonkeyPatch, env_fns: Any) -> None:
    monkeypatch.delattr("sb3_hts.vec_env.Workforce")
    with pytest.raises((TypeError, ValueError), match=r"env_fns.* function"):
        HTSVecEnv(env_fns)


@pytest.mark.parametrize("make_other", [lambda: None, lambda: "CartPole-v1", lambda: DummyVecEnv([WalkEnv])])
def test_functions_that_make_something_else_are_named(make_other: Any) -> None:
    message = r"^Environment 1 .* constructing the environment: ValueError: The environment is of type .*, not a Gymnasium env"
    with pytest.raises(RuntimeError, match=message):
        HTSVecEnv([WalkEnv, make_other])


@pytest.mark.parametrize(
    ("algorithm", "kwargs", "message"),
    [
        *((HTSPPO, {"policy_lag": lag}, "policy_lag must be 0") for lag in (True, False, "1", 0.5, [1], np.array([0, 1]))),
        # Nobody has said anything about snapshots; HTSA2C does not even have that argument
        *((algorithm, {"n_steps": 0}, r"^(?!.*n_snapshots).*n_steps") for algorithm in (HTSPPO, HTSA2C)),
    ],
    ids=repr,
)
def test_bad_arguments_are_named(algorithm: Any, kwargs: dict[str, Any], message: str) -> None:
    env = DummyVecEnv([WalkEnv] * N_ENVS)
    assert type(make(algorithm, env, policy_lag=np.int64(1)).policy_lag) is int
    with pytest.raises((AssertionError, ValueError), match=message):
        make(algorithm, env, **kwargs)


def outcome(algorithm: Any, name: str, **kwargs: Any) -> list[Any]:
    """The error of the constructor, or its warnings. By name, since then the environments are the algorithm's to close."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            make(algorithm, name, **kwargs).get_env().close()
        except (AssertionError, ValueError, NotImplementedError) as error:
            return [type(error), str(error)]
    return [(warning.category, str(warning.message)) for warning in caught]


SPACES = [spaces.Dict(a=spaces.Discrete(2)), spaces.Text(4), spaces.Box(-np.inf, np.inf, (2,)), spaces.MultiBinary([2, 2])]


@pytest.mark.parametrize(
    ("ours", "stock", "kwargs", "space"),
    [
        *((HTSPPO, PPO, {"batch_size": size}, None) for size in (12, 100, 1, 0, -4)),
        (HTSPPO, PPO, {"n_steps": 1}, None),
        *((ours, stock, {}, space) for ours, stock in ((HTSPPO, PPO), (HTSA2C, A2C)) for space in SPACES),
    ],
)
def test_what_stock_warns_of_or_refuses(
    monkeypatch: pytest.MonkeyPatch, ours: Any, stock: Any, kwargs: Any, space: Any
) -> None:
    spec = EnvSpec("Odd-v0", entry_point=partial(WalkEnv, None, space), disable_env_checker=True)
    monkeypatch.setitem(gym.registry, "Odd-v0", spec)
    expected = outcome(stock, "Odd-v0", **kwargs)
    assert expected
    assert outcome(ours, "Odd-v0", **kwargs) == expected
