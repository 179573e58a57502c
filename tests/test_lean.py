"""What makes training cheaper changes no bit of it, and leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_hts.heap import keeping_freed_memory
from sb3_hts.lean_policy import lean_evaluation, lean_forward
from sb3_hts.lean_training import lean_training
from sb3_hts.threads import beside_workers

ACTION_SPACES = [spaces.Discrete(5), spaces.Box(-1, 1, (3,))]


def make_policy(
    policy_class: type[ActorCriticPolicy] = ActorCriticPolicy, action_space: Any = ACTION_SPACES[0], **kwargs: Any
) -> Any:
    return policy_class(spaces.Box(-1, 1, (3,)), action_space, lambda _: 1e-3, **kwargs)


# --- policy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action_space", ACTION_SPACES, ids=["discrete", "box"])
@pytest.mark.parametrize("shared", [True, False])
def test_the_forward_is_bitwise_the_same(action_space: Any, shared: bool) -> None:
    policy = make_policy(action_space=action_space, share_features_extractor=shared)
    forward = lean_forward(policy)
    assert forward is not policy
    for seed in range(20):
        obs = th.randn(7, 3)
        results = []
        for function in (policy, forward):
            th.manual_seed(seed)
            with th.no_grad():
                results.append([*function(obs), th.rand(1)])
        assert all(th.equal(a, b) and a.dtype == b.dtype for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("action_space", ACTION_SPACES, ids=["discrete", "box"])
@pytest.mark.parametrize("shared", [True, False])
def test_evaluations_and_their_gradients_are_bitwise_the_same(action_space: Any, shared: bool) -> None:
    policy = make_policy(action_space=action_space, share_features_extractor=shared)
    evaluation = lean_evaluation(policy)
    assert evaluation != policy.evaluate_actions
    for batch in (1, 7, 64):
        obs = th.randn(batch, 3)
        actions = policy(obs)[0].detach() * 3
        if isinstance(action_space, spaces.Discrete):
            actions = actions % 5
        weights = th.randn(3, batch)
        results = []
        for function in (policy.evaluate_actions, evaluation):
            values, log_probs, entropies = function(obs, actions)
            policy.zero_grad()
            (weights[0] * values.flatten() + weights[1] * log_probs.exp() + weights[2] * entropies).sum().backward()
            gradients = [parameter.grad.clone() for parameter in policy.parameters()]
            results.append([values, log_probs, entropies, *gradients])
        assert all(th.equal(a, b) and a.dtype == b.dtype for a, b in zip(*results, strict=True))


class OwnMethods(ActorCriticPolicy):
    def forward(self, obs: Any, deterministic: bool = False) -> Any:
        return super().forward(obs, deterministic)

    def evaluate_actions(self, obs: Any, actions: th.Tensor) -> Any:
        return super().evaluate_actions(obs, actions)


class OwnDistribution(ActorCriticPolicy):
    def _get_action_dist_from_latent(self, latent_pi: th.Tensor) -> Any:
        return super()._get_action_dist_from_latent(latent_pi * 2)


@pytest.mark.parametrize("policy_class", [OwnMethods, OwnDistribution])
def test_what_is_overridden_is_called(policy_class: Any) -> None:
    policy = make_policy(policy_class)
    assert lean_forward(policy) is policy
    assert lean_evaluation(policy) == policy.evaluate_actions


def test_other_policies_are_called_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = make_policy()
    hooked.register_forward_hook(lambda *_: None)
    assert lean_forward(hooked) is hooked
    patched = make_policy()
    patched.forward = patched.evaluate_actions = lambda *_: None
    assert lean_forward(patched) is patched
    assert lean_evaluation(patched) is patched.evaluate_actions
    binary = make_policy(action_space=spaces.MultiBinary(3))
    assert lean_forward(binary) is binary
    assert lean_evaluation(binary) == binary.evaluate_actions
    monkeypatch.setattr(ActorCriticPolicy, "evaluate_actions", lambda *_: None)
    late = make_policy()
    assert lean_evaluation(late) == late.evaluate_actions


@pytest.mark.parametrize("action_space", ACTION_SPACES, ids=["discrete", "box"])
def test_a_policy_that_has_become_nan_is_an_error(action_space: Any) -> None:
    policy = make_policy(action_space=action_space)
    policy.action_net.weight.data.fill_(float("nan"))
    with pytest.raises((ValueError, RuntimeError)), th.no_grad():
        lean_forward(policy)(th.zeros(1, 3))
    actions = th.zeros(1, *action_space.shape)
    with pytest.raises(ValueError, match="Expected parameter") as stock:
        policy.evaluate_actions(th.zeros(1, 3), actions)
    with pytest.raises(ValueError, match="Expected parameter") as lean:
        lean_evaluation(policy)(th.zeros(1, 3), actions)
    assert str(lean.value) == str(stock.value)


# --- training -------------------------------------------------------------------------------------------------------

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (th.optim.Adam, {}),
    (th.optim.Adam, {"amsgrad": True, "weight_decay": 0.01}),
    (th.optim.AdamW, {"weight_decay": 0.1}),
    (th.optim.RMSprop, {"alpha": 0.99, "eps": 1e-5}),
    (th.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (th.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (th.optim.Adam, {"foreach": False}),
    (th.optim.Adamax, {}),
]


def flat(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    if isinstance(value, list):
        return [flat(item) for item in value]
    return value.tolist() if isinstance(value, th.Tensor) else value


@pytest.mark.parametrize(("optimizer_class", "kwargs"), OPTIMIZERS)
@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_training_is_bitwise_the_same(algorithm: Any, optimizer_class: Any, kwargs: dict[str, Any]) -> None:
    states = []
    for lean in (False, True):
        policy_kwargs = {"optimizer_class": optimizer_class, "optimizer_kwargs": kwargs}
        model = algorithm("MlpPolicy", "CartPole-v1", n_steps=32, seed=0, device="cpu", policy_kwargs=policy_kwargs)
        model.learn(32)
        for _ in range(5):
            if lean:
                with lean_training(model.policy):
                    model.train()
            else:
                model.train()
        states.append(flat([dict(model.policy.state_dict()), model.policy.optimizer.state_dict()]))
    assert states[0] == states[1]


class NoisyNetwork(th.nn.Linear):
    """Stays in training mode, and says so."""

    modes: tuple[bool, ...] = ()

    def train(self, mode: bool = True) -> Any:
        self.modes += (mode,)
        return super().train(True)


def test_training_mode_and_parameters_are_those_of_the_policy() -> None:
    policy = make_policy()
    policy.extra = th.nn.Sequential(th.nn.Dropout(), th.nn.Linear(2, 2), th.nn.BatchNorm1d(2))
    policy.extra.append(policy.extra[1])  # shared
    expected = list(policy.parameters())
    with lean_training(policy):
        parameters = list(policy.parameters())
        assert len(parameters) == len(expected)
        assert all(a is b for a, b in zip(parameters, expected, strict=True))
        for mode in (False, True, False):
            policy.set_training_mode(mode)
            assert {module.training for module in policy.modules()} == {mode}
        assert list(policy.parameters(recurse=False)) == list(policy._parameters.values())
    policy.noisy = NoisyNetwork(2, 2)
    with lean_training(policy):
        policy.set_training_mode(False)
    assert policy.noisy.modes == (False,)
    assert policy.noisy.training


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("convert", [th.jit.script, partial(th.compile, backend="eager")])
def test_modules_that_keep_their_mode_elsewhere(convert: Any) -> None:
    policy = make_policy()
    policy.extra = convert(th.nn.Dropout())
    for mode in (False, True, False):
        with lean_training(policy):
            policy.set_training_mode(mode)
        dropped = bool((policy.extra(th.ones(100)) == 0).any())
        assert dropped is mode


def test_nothing_is_left_behind_after_an_error() -> None:
    policy = make_policy()
    before = dict(vars(policy))
    groups = flat(policy.optimizer.state_dict())
    with suppress(KeyboardInterrupt), lean_training(policy):
        assert vars(policy).keys() > before.keys()
        raise KeyboardInterrupt
    assert vars(policy) == before
    assert flat(policy.optimizer.state_dict()) == groups


# --- threads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_threads", [1, 2])
def test_the_second_team_lasts_as_long_as_the_block(n_threads: int) -> None:
    before = th.get_num_threads()
    th.set_num_threads(n_threads)
    try:
        with suppress(KeyboardInterrupt), beside_workers(th.nn.Conv2d(1, 1, 1)):
            assert th.get_num_threads() == n_threads
            assert ("second-team" in [thread.name for thread in threading.enumerate()]) is (n_threads > 1)
            raise KeyboardInterrupt
        assert "second-team" not in [thread.name for thread in threading.enumerate()]
        assert th.get_num_threads() == n_threads
    finally:
        th.set_num_threads(before)


# --- memory ---------------------------------------------------------------------------------------------------------


MEASUREMENT = """
import resource, sys
from contextlib import nullcontext

import psutil
import torch as th
from sb3_hts.heap import keeping_freed_memory

with keeping_freed_memory() if sys.argv[1] == "kept" else nullcontext():
    # Several, as what others allocate in between may take a place
    faults = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        th.ones(2**24).sum()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    kept = psutil.Process().memory_info().rss
print(min(faults), kept - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
def test_freed_memory_is_kept_within_the_block_only() -> None:
    """In a process of its own: what lies on top of a used heap decides what goes back to the system."""
    tuning = ("MALLOC_", "GLIBC_TUNABLES")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(tuning)}

    def measure(how: str) -> list[int]:
        command = [sys.executable, "-c", MEASUREMENT, how]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100, env=environment)
        return [int(word) for word in result.stdout.split()]

    n_faults, given_back = measure("kept")
    n_faults_without, _ = measure("not kept")
    assert n_faults < n_faults_without / 10
    assert given_back > 2**26 / 2


class Recorder:
    """A C library that notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def mallopt(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return 1

    def malloc_trim(self, pad: int) -> int:
        self.calls.append(pad)
        return 1


@pytest.mark.parametrize("variable", [None, ("MALLOC_ARENA_MAX", "2"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")])
def test_what_the_user_has_tuned_stays(monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str] | None) -> None:
    libc = Recorder()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: libc)
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if variable is not None:
        monkeypatch.setenv(*variable)
    with keeping_freed_memory():
        pass
    assert bool(libc.calls) is (variable is None)


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    with keeping_freed_memory():
        pass
