"""``HTSVecEnv`` as a ``VecEnv``: everything as ``DummyVecEnv``, step by step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from envs import ReusingEnv, WalkEnv
from gymnasium import spaces
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_hts import HTSPPO, ClosedError, HTSVecEnv, ProtocolError, WorkerRaised

OBSERVATION_SPACES = {
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "float64": spaces.Box(-1, 1, (2, 2), np.float64),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "discrete": spaces.Discrete(5),
    "multibinary": spaces.MultiBinary(4),
    "multidiscrete": spaces.MultiDiscrete([3, 4]),
    "image": spaces.Box(0, 255, (6, 5, 3), np.uint8),
    "dict": spaces.Dict({"a": spaces.Box(-1, 1, (3,), np.float32), "b": spaces.Discrete(4)}),
    "tuple": spaces.Tuple((spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4))),
}
ACTION_SPACES = {
    "discrete": spaces.Discrete(3),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "multidiscrete": spaces.MultiDiscrete([3, 2]),
    "multibinary": spaces.MultiBinary(3),
}


def assert_same_rollout(env_fns: list[Callable[[], gym.Env[Any, Any]]], n_steps: int = 40, **kwargs: Any) -> None:
    with HTSVecEnv(env_fns, **kwargs) as ours:
        theirs = DummyVecEnv(env_fns)
        assert ours.observation_space == theirs.observation_space
        assert ours.action_space == theirs.action_space
        ours.seed(11)
        theirs.seed(11)
        np.testing.assert_equal(ours.reset(), theirs.reset())
        np.testing.assert_equal(ours.reset_infos, theirs.reset_infos)
        ours.action_space.seed(0)
        n_dones = 0
        for _ in range(n_steps):
            actions = np.array([ours.action_space.sample() for _ in env_fns])
            (obs, rewards, dones, infos), expected = ours.step(actions), theirs.step(actions)
            np.testing.assert_equal(obs, expected[0])
            np.testing.assert_equal(infos, expected[3])
            for array, reference in ((rewards, expected[1]), (dones, expected[2])):
                np.testing.assert_array_equal(array, reference)
                assert array.dtype == reference.dtype
            np.testing.assert_equal(ours.reset_infos, theirs.reset_infos)
            n_dones += int(dones.sum())
        assert n_dones > 4, "the test must see episode ends"


@pytest.mark.parametrize("space", list(OBSERVATION_SPACES))
def test_observation_spaces(space: str) -> None:
    assert_same_rollout([partial(WalkEnv, OBSERVATION_SPACES[space]) for _ in range(3)])


@pytest.mark.parametrize("space", list(ACTION_SPACES))
def test_action_spaces(space: str) -> None:
    assert_same_rollout([partial(WalkEnv, None, ACTION_SPACES[space]) for _ in range(3)])


@pytest.mark.parametrize(("n_workers", "envs_per_group"), [(1, 1), (2, 1), (3, 2), (2, 2), (1, 6)])
def test_layouts(n_workers: int, envs_per_group: int) -> None:
    assert_same_rollout([WalkEnv] * 6, n_workers=n_workers, envs_per_group=envs_per_group)


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_start_methods(start_method: str) -> None:
    assert_same_rollout([WalkEnv] * 2, start_method=start_method)


def test_environment_that_reuses_its_arrays_and_dicts() -> None:
    """Compared with an environment that does not, since ``DummyVecEnv`` shows the reset observation as the terminal one."""
    with HTSVecEnv([ReusingEnv]) as ours:
        theirs = DummyVecEnv([WalkEnv])
        ours.seed(3)
        theirs.seed(3)
        np.testing.assert_array_equal(ours.reset(), theirs.reset())
        held: list[Any] = []
        for step in range(40):
            action = np.array([step % 3])
            (obs, rewards, dones, (info,)), expected = ours.step(action), theirs.step(action)
            assert info.pop("history") == [step + 1]
            np.testing.assert_equal([obs, rewards, dones, info], [*expected[:3], expected[3][0]])
            held.append((obs, obs.copy(), info, dict(info)))
        for obs, obs_then, info, info_then in held:
            np.testing.assert_array_equal(obs, obs_then)
            np.testing.assert_equal(info, info_then)


def test_reset_options_and_seeds_are_used_once() -> None:
    with HTSVecEnv([WalkEnv] * 2) as env:
        env.seed(5)
        env.set_options([{"start": 100.0}, {}])
        env.reset()
        first, second = (info["start"] for info in env.reset_infos)
        assert first > 90 > second
        env.reset()
        assert env.reset_infos[0]["start"] < 90


def test_attributes_and_methods() -> None:
    with HTSVecEnv([WalkEnv] * 4, n_workers=2) as env:
        env.reset()
        assert env.get_attr("speed") == [1.0] * 4
        env.set_attr("speed", 3.0, indices=[1, 2])
        assert env.get_attr("speed", indices=[2, 0, 2]) == [3.0, 1.0, 3.0]
        assert env.get_attr("speed", indices=-2) == [3.0]
        assert env.get_attr("speed", indices=[]) == []
        positions = env.get_attr("position")
        assert env.env_method("get_position", 2.0, indices=3) == [2 * positions[3]]
        assert env.env_method("get_position", factor=-1.0) == [-position for position in positions]
        assert env.has_attr("speed")
        assert not env.has_attr("no_such_thing")
        assert env.env_is_wrapped(gym.Wrapper) == [False] * 4
        with pytest.raises(AttributeError):
            env.get_attr("no_such_thing")
        with pytest.raises(KeyError, match="oh no") as caught:
            env.env_method("fail", "oh no", indices=1)
        assert "in fail" in str(caught.value.__cause__)
        # An exception of a method is the caller's problem; the environments go on
        assert env.get_attr("speed", indices=1) == [3.0]


def test_lambdas_and_local_classes_travel_by_value() -> None:
    class Local(gym.Wrapper[Any, Any, Any, Any]):
        secret = 42

    with HTSVecEnv([lambda: Local(WalkEnv())]) as env:
        assert env.env_is_wrapped(Local) == [True]
        assert env.get_attr("secret") == [42]
        env.set_attr("secret", lambda: 43)
        assert env.env_method("secret") == [43]


def test_registrations_of_the_main_process_reach_the_workers() -> None:
    class Registered(WalkEnv):
        pass

    gym.register("Walk-v0", lambda **_: Registered())
    gym.register("Unpicklable-v0", WalkEnv, kwargs={"lock": threading.Lock()})
    try:
        with make_vec_env("Walk-v0", 2, vec_env_cls=HTSVecEnv) as env:  # type: ignore[arg-type, attr-defined]
            assert env.get_attr("speed") == [1.0] * 2
    finally:
        del gym.registry["Walk-v0"], gym.registry["Unpicklable-v0"]


def test_images() -> None:
    with HTSVecEnv([WalkEnv] * 4) as env:
        env.reset()
        assert env.render_mode == "rgb_array"
        images = env.get_images()
        positions = env.get_attr("position")
        assert [int(image[0, 0, 0]) for image in images] == [int(abs(p) * 20) % 256 for p in positions]  # type: ignore[index]
        assert env.render().shape == (4, 6, 3)  # type: ignore[union-attr]


def test_make_vec_env_and_stock_algorithms() -> None:
    for algorithm, n_envs, kwargs in (
        (PPO, 2, {"n_steps": 16, "batch_size": 16}),
        (A2C, 2, {}),
        (DQN, 1, {"learning_starts": 8}),
    ):
        results = []
        for vec_env_cls in (HTSVecEnv, DummyVecEnv):
            env: VecEnv = make_vec_env("CartPole-v1", n_envs, vec_env_cls=vec_env_cls)  # type: ignore[arg-type]
            model = algorithm("MlpPolicy", env, seed=1, device="cpu", **kwargs).learn(64)
            results.append([value.numpy() for value in model.policy.state_dict().values()])
            env.close()
        np.testing.assert_equal(results[0], results[1])


def test_phases() -> None:
    env = HTSVecEnv([WalkEnv] * 2)
    env.reset()
    with pytest.raises(ProtocolError, match=r"without step_async"):
        env.step_wait()
    env.step_async(np.zeros(2, int))
    assert env.get_attr("n_steps") == [1, 1], "a call in the middle of a step waits for it and drops it"
    env.step_async(np.zeros(2, int))
    env.close()
    env.close()
    with pytest.raises(ClosedError, match="have been closed"):
        env.reset()


def test_one_action_per_environment() -> None:
    with HTSVecEnv([WalkEnv] * 2) as env:
        env.reset()
        with pytest.raises(ValueError, match="one action for each of the 2 environments, got 1"):
            env.step(np.zeros(1, int))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"n_workers": 0}, "n_workers must be a positive integer, not 0"),
        ({"n_workers": 5}, "n_workers=5 is more than there are groups of environments, 4"),
        ({"n_workers": 1.5}, "n_workers must be a positive integer"),
        ({"envs_per_group": 3}, "envs_per_group=3 does not divide the number of environments, 4"),
        ({"envs_per_group": True}, "envs_per_group must be a positive integer"),
        ({"start_method": "magic"}, "start_method must be one of"),
        ({"step_timeout": -1}, "step_timeout must be a positive, finite number of seconds or None, not -1"),
        ({"step_timeout": float("inf")}, "step_timeout must be a positive"),
        ({"step_timeout": float("nan")}, "step_timeout must be a positive"),
        ({"step_timeout": True}, "step_timeout must be a positive"),
        ({"step_timeout": "5"}, "step_timeout must be a positive"),
        ({"step_timeout": [5]}, "step_timeout must be a positive"),
        ({"on_worker_failure": "ignore"}, "on_worker_failure must be"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HTSVecEnv([WalkEnv] * 4, **kwargs)


def test_bad_environments() -> None:
    with pytest.raises(ValueError, match="env_fns is empty"):
        HTSVecEnv([])
    with pytest.raises(ValueError, match=r"env_fns\[1\] is a WalkEnv, not a function"):
        HTSVecEnv([WalkEnv, WalkEnv()])  # type: ignore[list-item]
    other = partial(WalkEnv, spaces.Discrete(4))
    for layout in ({}, {"n_workers": 1}, {"envs_per_group": 3}):
        with pytest.raises(ValueError, match=r"Environment 2 has .* must have spaces of the same form"):
            HTSVecEnv([WalkEnv, WalkEnv, other], **layout)


@pytest.mark.parametrize(
    "space", [spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(-1, 1, (2,), np.float32)), spaces.Tuple([spaces.Discrete(3)] * 2)]
)
@pytest.mark.parametrize("layout", [{}, {"n_workers": 1}, {"envs_per_group": 3}])
def test_actions_that_are_not_arrays(space: spaces.Space[Any], layout: dict[str, int]) -> None:
    env_fns = [partial(WalkEnv, None, space)] * 3
    with HTSVecEnv(env_fns, **layout) as ours:
        theirs = DummyVecEnv(env_fns)  # type: ignore[arg-type]
        ours.seed(1)
        theirs.seed(1)
        np.testing.assert_array_equal(ours.reset(), theirs.reset())
        for _ in range(10):
            actions: Any = [ours.action_space.sample() for _ in env_fns]
            np.testing.assert_equal(ours.step(actions), theirs.step(actions))
        with pytest.raises(AssertionError, match="The algorithm only supports"):
            HTSPPO("MlpPolicy", ours)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Dict(a=spaces.Dict(b=spaces.Discrete(2))),
        spaces.Tuple([spaces.Tuple([spaces.Discrete(2)])]),
        spaces.Text(5),
        spaces.Dict(a=spaces.Text(5)),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Discrete(2), None),
    ],
    ids=["dict", "tuple", "text", "dict-text", "sequence", "graph"],
)
def test_observation_spaces_that_sb3_does_not_support(space: spaces.Space[Any]) -> None:
    with pytest.raises(NotImplementedError, match="not supported"):
        HTSVecEnv([partial(WalkEnv, space)] * 2)


def test_bounds_may_differ() -> None:
    """As in SB3, the spaces of environment 0 count."""
    assert_same_rollout([partial(WalkEnv, spaces.Box(-bound, bound, (3,))) for bound in (1, 2, 3)])
    assert_same_rollout([partial(WalkEnv, spaces.Dict(a=spaces.Discrete(n), b=spaces.Box(-1, n, (2,)))) for n in (4, 3, 2)])


def test_closed_and_waiting() -> None:
    env = HTSVecEnv([WalkEnv])
    env.reset()
    assert (env.closed, env.waiting) == (False, False)
    env.step_async(np.zeros(1, int))
    assert env.waiting
    env.step_wait()
    assert not env.waiting
    env.close()
    assert env.closed


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**32, 2**70])
def test_seeds_of_any_size(seed: int) -> None:
    with HTSVecEnv([WalkEnv] * 2) as ours:
        theirs = DummyVecEnv([WalkEnv] * 2)
        assert ours.seed(seed) == theirs.seed(seed)
        np.testing.assert_array_equal(ours.reset(), theirs.reset())


def test_one_environment_under_two_names() -> None:
    env = WalkEnv()
    with pytest.raises(WorkerRaised, match="returned the same instance"):
        HTSVecEnv([lambda: env] * 2, envs_per_group=2)


def test_environments_may_keep_their_action() -> None:
    with HTSVecEnv([partial(WalkEnv, None, ACTION_SPACES["box"])] * 2, envs_per_group=2) as env:
        env.reset()
        env.step(np.full((2, 2), 0.5, np.float32))
        kept = env.get_attr("last_action", indices=0)[0].copy()
        env.env_method("remember_action")
        env.step(np.full((2, 2), -0.5, np.float32))
        np.testing.assert_array_equal(env.get_attr("remembered_action")[0], kept)
