"""Promise 2: bitwise the same parameters as stock SB3 in one process under the same schedule and noise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch as th
from envs import WalkEnv
from gymnasium import spaces
from oracle import GroupedNormalize, Oracle
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecCheckNan,
    VecEnv,
    VecEnvWrapper,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
    unwrap_vec_normalize,
)

import sb3_hts.algorithm
from sb3_hts import HTSA2C, HTSPPO, HTSVecEnv

pytestmark = pytest.mark.usefixtures("inference")

N_UPDATES = 10
N_ENVS = 4

DISCRETE = spaces.Discrete(3)
BOX = spaces.Box(-1, 1, (2,), np.float32)
IMAGE = spaces.Box(0, 255, (36, 36, 1), np.uint8)
DICT = spaces.Dict(
    {"position": spaces.Box(-1, 1, (3,), np.float32), "cell": spaces.Discrete(5), "flags": spaces.MultiBinary(4)}
)
SMALL = {"net_arch": [16]}


STOCK: dict[Any, Any] = {HTSPPO: PPO, HTSA2C: A2C}


def assert_equal_to_oracle(
    algorithm: Any,
    *,
    policy: Any = "MlpPolicy",
    observation_space: spaces.Space[Any] | None = None,
    action_space: spaces.Space[Any] = DISCRETE,
    group_size: int = 2,
    lag: int = 1,
    n_snapshots: int = 1,
    correction: str,
    wrap: Callable[..., VecEnv] = lambda env: env,
    wrap_oracle: Callable[..., VecEnv] | None = None,
    make_env: Callable[..., Any] = HTSVecEnv,
    env_class: Any = WalkEnv,
    oracle_class: Any = Oracle,
    central: dict[str, Any] | None = None,
    **kwargs: Any,
) -> None:
    """Train both ways and compare everything.

    :param wrap: Puts vectorized wrappers over the environments; ``wrap_oracle`` over the oracle's.
    :param make_env: With anything but ``HTSVecEnv`` there is one group.
    :param central: Arguments of the algorithm that concern central inference.
    """
    stock = STOCK.get(algorithm) or next(base for base in algorithm.__mro__ if not base.__module__.startswith("sb3_hts"))
    env_fns = [partial(env_class, observation_space, action_space) for _ in range(N_ENVS)]
    kwargs = {"n_steps": 8, "policy_kwargs": SMALL, "device": "cpu", **kwargs}
    oracle = oracle_class(
        stock,
        policy,
        env_fns,
        group_size=group_size,
        lag=lag,
        n_snapshots=n_snapshots,
        correction=correction,
        seed=7,
        wrap=wrap_oracle or wrap,
        **kwargs,
    )
    if make_env is HTSVecEnv:
        arguments = {"inference": "auto", "central_batch": "auto", **(central or {})}
        kind = algorithm.kind.actor_class
        where = sb3_hts.algorithm.choose(
            arguments["inference"], oracle.model.policy, kind, 1, None, arguments["central_batch"]
        )
        oracle.batch = "full" if where is not None and where.full_batch else "group"
    expected = oracle.learn(N_UPDATES)
    extra = {"n_snapshots": n_snapshots} if "n_epochs" in kwargs else {}
    layout = {"envs_per_group": group_size} if make_env is HTSVecEnv else {}
    env = wrap(make_env(env_fns, **layout))
    try:
        model = algorithm(policy, env, seed=7, policy_lag=lag, correction=correction, **extra, **(central or {}), **kwargs)
        model.learn(N_UPDATES * 8 * N_ENVS)
        assert_equal_stacks(model.get_env(), expected.get_env())
    finally:
        env.close()
    assert model.num_timesteps == expected.num_timesteps
    np.testing.assert_equal(model._last_obs, expected._last_obs)
    theirs = expected.policy.state_dict()
    for name, tensor in model.policy.state_dict().items():
        assert th.equal(tensor, theirs[name]), f"{name} differs by {(tensor - theirs[name]).abs().max()}"
    states = [m.policy.optimizer.state_dict()["state"] for m in (model, expected)]
    for ours, theirs_ in zip(states[0].values(), states[1].values(), strict=True):
        for name in ours:
            assert th.equal(th.as_tensor(ours[name]), th.as_tensor(theirs_[name])), name


def assert_equal_stacks(env: Any, expected: Any) -> None:
    """After training, the wrappers in the main process go on as if they had seen every step."""
    ours, theirs = unwrap_vec_normalize(env), unwrap_vec_normalize(expected)
    normalizing = ours is not None
    if normalizing:
        for name in ("obs_rms", "ret_rms"):
            np.testing.assert_equal(moments(vars(ours).get(name)), moments(vars(theirs).get(name)))
    actions = np.array([env.action_space.sample() for _ in range(N_ENVS)])
    for _ in range(12):
        if normalizing:
            np.testing.assert_equal(env.get_original_obs(), expected.get_original_obs())
            np.testing.assert_equal(env.get_original_reward().astype(np.float32), expected.get_original_reward())
        for got, wanted in zip(env.step(actions), expected.step(actions), strict=True):
            np.testing.assert_equal(comparable(got), comparable(wanted))
    np.testing.assert_equal(env.reset(), expected.reset())


def moments(rms: Any) -> Any:
    if isinstance(rms, dict):
        return {key: moments(part) for key, part in rms.items()}
    return rms and (rms.mean, rms.var, rms.count)


def comparable(value: Any) -> Any:
    """Without the wall-clock time of an episode; and ``SubprocVecEnv`` gives rewards of another type."""
    if isinstance(value, list):
        for info in value:
            info.get("episode", {}).pop("t", None)
    return value.astype(np.float32) if getattr(value, "dtype", None) == np.float64 and value.ndim == 1 else value


PPO_KWARGS = {"batch_size": 12, "n_epochs": 3}


@pytest.mark.parametrize("correction", ["proximal", "behaviour", "decoupled"])
@pytest.mark.parametrize(("lag", "n_snapshots"), [(0, 1), (1, 1), (1, 4)])
@pytest.mark.parametrize("action_space", [DISCRETE, BOX], ids=["discrete", "box"])
def test_ppo(correction: str, lag: int, n_snapshots: int, action_space: spaces.Space[Any]) -> None:
    assert_equal_to_oracle(
        HTSPPO, action_space=action_space, lag=lag, n_snapshots=n_snapshots, correction=correction, **PPO_KWARGS
    )


@pytest.mark.parametrize("correction", ["delayed_gradient", "none", "truncated_is"])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("action_space", [DISCRETE, BOX], ids=["discrete", "box"])
def test_a2c(correction: str, lag: int, action_space: spaces.Space[Any]) -> None:
    assert_equal_to_oracle(HTSA2C, action_space=action_space, lag=lag, correction=correction)


@pytest.mark.parametrize("group_size", [1, 4])
def test_group_sizes(group_size: int) -> None:
    assert_equal_to_oracle(HTSPPO, group_size=group_size, n_snapshots=4, correction="proximal", **PPO_KWARGS)
    assert_equal_to_oracle(HTSA2C, group_size=group_size, correction="delayed_gradient")


def test_cnn_with_frame_stack_and_transposed_images() -> None:
    cnn = {"policy": "CnnPolicy", "observation_space": IMAGE, "wrap": partial(VecFrameStack, n_stack=2)}
    kwargs = {"policy_kwargs": {"features_extractor_kwargs": {"features_dim": 16}}}
    assert_equal_to_oracle(HTSPPO, n_snapshots=4, correction="proximal", **PPO_KWARGS, **cnn, **kwargs)
    assert_equal_to_oracle(HTSA2C, correction="delayed_gradient", **cnn, **kwargs)


# --- wrappers -------------------------------------------------------------------------------------------------------

ORDERS: dict[str, Callable[..., VecEnv]] = {
    "normalize": lambda env, norm: norm(env),
    "without reward": lambda env, norm: norm(env, norm_reward=False, clip_obs=0.7, gamma=0.9),
    "without observations": lambda env, norm: norm(env, norm_obs=False, clip_reward=1.5, epsilon=1e-3),
    "fixed": lambda env, norm: norm(env, training=False),
    "normalize, stack": lambda env, norm: VecFrameStack(norm(env), 3),
    "stack, normalize": lambda env, norm: norm(VecFrameStack(env, 3)),
    "monitor, normalize, check, stack": lambda env, norm: VecFrameStack(VecCheckNan(norm(VecMonitor(env))), 2),
    "normalize, monitor": lambda env, norm: VecMonitor(norm(env), info_keywords=("TimeLimit.truncated",)),
}


def normalize_with(norm: Any, group_size: int) -> Any:
    """``GroupedNormalize`` for the oracle if there are several groups."""

    def make(env: VecEnv, **kwargs: Any) -> VecEnv:
        if group_size == N_ENVS or norm is VecNormalize:
            return VecNormalize(env, **kwargs)
        grouped = GroupedNormalize(env, **kwargs)
        grouped.group_size = group_size
        return grouped

    return make


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("group_size", [1, 2, N_ENVS])
def test_vec_normalize(order: str, group_size: int) -> None:
    wrap, wrap_oracle = (
        partial(ORDERS[order], norm=normalize_with(norm, group_size)) for norm in (VecNormalize, GroupedNormalize)
    )
    kwargs: dict[str, Any] = {"group_size": group_size, "wrap": wrap, "wrap_oracle": wrap_oracle}
    assert_equal_to_oracle(HTSPPO, n_snapshots=4, correction="proximal", **PPO_KWARGS, **kwargs)
    if "reward" in order:
        assert_equal_to_oracle(HTSA2C, correction="delayed_gradient", **kwargs)


@pytest.mark.parametrize("group_size", [2, N_ENVS])
@pytest.mark.parametrize("keys", [None, ["position"]], ids=["all", "some"])
def test_vec_normalize_of_dicts(group_size: int, keys: list[str] | None) -> None:
    space = spaces.Dict(position=spaces.Box(-1, 1, (3,), np.float32), picture=spaces.Box(0, 1, (2, 2), np.float64))
    wrap, wrap_oracle = (
        partial(normalize_with(norm, group_size), norm_obs_keys=keys) for norm in (VecNormalize, GroupedNormalize)
    )
    assert_equal_to_oracle(
        HTSPPO,
        policy="MultiInputPolicy",
        observation_space=space,
        group_size=group_size,
        wrap=wrap,
        wrap_oracle=wrap_oracle,
        n_snapshots=4,
        correction="proximal",
        **PPO_KWARGS,
    )


@pytest.mark.parametrize("group_size", [2, N_ENVS])
@pytest.mark.parametrize("shape", [(36, 36, 1), (12,)], ids=["image", "bytes"])
def test_vec_normalize_of_bytes(group_size: int, shape: tuple[int, ...]) -> None:
    """What comes out is not of the space's dtype."""
    image = len(shape) == 3
    wrap, wrap_oracle = (normalize_with(norm, group_size) for norm in (VecNormalize, GroupedNormalize))
    assert_equal_to_oracle(
        HTSA2C,
        policy="CnnPolicy" if image else "MlpPolicy",
        observation_space=spaces.Box(0, 255, shape, np.uint8),
        group_size=group_size,
        wrap=lambda env: wrap(VecTransposeImage(env) if image else env),
        wrap_oracle=lambda env: wrap_oracle(VecTransposeImage(env) if image else env),
        correction="delayed_gradient",
        policy_kwargs={"normalize_images": False, "features_extractor_kwargs": {"features_dim": 16}} if image else SMALL,
    )


# --- the thread collector -------------------------------------------------------------------------------------------


class Unknown(VecEnvWrapper):
    """Nothing that could be known to run inside the workers."""

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        return self.venv.step_wait()


THREAD: dict[str, dict[str, Any]] = {
    "dummy": {"make_env": DummyVecEnv},
    "subproc": {"make_env": SubprocVecEnv},
    "unknown wrapper": {"wrap": Unknown},
    "under known wrappers": {"wrap": lambda env: VecFrameStack(VecNormalize(VecMonitor(Unknown(env))), 2)},
}


@pytest.mark.parametrize("where", THREAD)
@pytest.mark.parametrize(("lag", "n_snapshots"), [(0, 1), (1, 1), (1, 4)])
def test_thread_collector(where: str, lag: int, n_snapshots: int) -> None:
    kwargs = {"group_size": N_ENVS, "lag": lag, **THREAD[where]}
    assert_equal_to_oracle(HTSPPO, n_snapshots=n_snapshots, correction="proximal", **PPO_KWARGS, **kwargs)
    if n_snapshots == 1:
        assert_equal_to_oracle(HTSA2C, correction="delayed_gradient", action_space=BOX, **kwargs)


def test_thread_collector_of_other_policies_and_spaces() -> None:
    kwargs: dict[str, Any] = {"make_env": DummyVecEnv, "group_size": N_ENVS, "n_snapshots": 4, "correction": "proximal"}
    for action_space in (spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(3)):
        assert_equal_to_oracle(HTSPPO, action_space=action_space, **PPO_KWARGS, **kwargs)
    assert_equal_to_oracle(HTSPPO, policy=BatchNormPolicy, **PPO_KWARGS, **kwargs)
    assert_equal_to_oracle(HTSPPO, action_space=BOX, use_sde=True, sde_sample_freq=3, **PPO_KWARGS, **kwargs)
    assert_equal_to_oracle(HTSPPO, policy="MultiInputPolicy", observation_space=DICT, **PPO_KWARGS, **kwargs)
    cnn = {"policy_kwargs": {"features_extractor_kwargs": {"features_dim": 16}}}
    assert_equal_to_oracle(HTSPPO, policy="CnnPolicy", observation_space=IMAGE, **PPO_KWARGS, **kwargs, **cnn)


def test_dict_observations() -> None:
    kwargs = {"policy": "MultiInputPolicy", "observation_space": DICT}
    assert_equal_to_oracle(HTSPPO, n_snapshots=2, correction="proximal", **PPO_KWARGS, **kwargs)
    assert_equal_to_oracle(HTSA2C, correction="delayed_gradient", **kwargs)


@pytest.mark.parametrize(
    "action_space",
    [spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(3), spaces.Box(-2, 3, (2,), np.float64)],
    ids=["multidiscrete", "multibinary", "box64"],
)
def test_action_spaces(action_space: spaces.Space[Any]) -> None:
    assert_equal_to_oracle(HTSPPO, action_space=action_space, n_snapshots=4, correction="proximal", **PPO_KWARGS)


@pytest.mark.parametrize(
    "observation_space",
    [spaces.Discrete(6), spaces.MultiBinary(5), spaces.MultiDiscrete([4, 3]), spaces.Box(-1, 1, (2, 3), np.float64)],
    ids=["discrete", "multibinary", "multidiscrete", "box64"],
)
def test_observation_spaces(observation_space: spaces.Space[Any]) -> None:
    assert_equal_to_oracle(HTSPPO, observation_space=observation_space, n_snapshots=4, correction="proximal", **PPO_KWARGS)


@pytest.mark.parametrize("sde_sample_freq", [-1, 3])
@pytest.mark.parametrize("squash_output", [False, True], ids=["clipped", "squashed"])
def test_gsde(sde_sample_freq: int, squash_output: bool) -> None:
    kwargs = {
        "action_space": BOX,
        "use_sde": True,
        "sde_sample_freq": sde_sample_freq,
        "policy_kwargs": {**SMALL, "squash_output": squash_output},
    }
    assert_equal_to_oracle(HTSPPO, n_snapshots=4, correction="proximal", **PPO_KWARGS, **kwargs)
    assert_equal_to_oracle(HTSA2C, correction="delayed_gradient", **kwargs)


def test_early_stop_by_target_kl_publishes_the_final_parameters() -> None:
    kwargs = {**PPO_KWARGS, "target_kl": 1e-4, "learning_rate": 3e-3}
    assert_equal_to_oracle(HTSPPO, n_snapshots=4, correction="proximal", **kwargs)


def test_fewer_gradient_steps_than_snapshots() -> None:
    assert_equal_to_oracle(HTSPPO, n_snapshots=8, correction="proximal", batch_size=32, n_epochs=3)


class BatchNormPolicy(ActorCriticPolicy):
    """Has buffers, so every snapshot must carry those too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, features_extractor_class=BatchNormExtractor, **kwargs)


class BatchNormExtractor(BaseFeaturesExtractor):
    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        super().__init__(observation_space, 3)
        self.norm = th.nn.BatchNorm1d(3)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return self.norm(observations)


def test_batch_norm() -> None:
    assert_equal_to_oracle(HTSPPO, policy=BatchNormPolicy, n_snapshots=4, correction="proximal", **PPO_KWARGS)
    assert_equal_to_oracle(HTSA2C, policy=BatchNormPolicy, correction="delayed_gradient")
