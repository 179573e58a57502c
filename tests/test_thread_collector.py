"""The thread collector: any environment and wrapper, with its own copy of the policy, and nothing left behind."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from envs import WalkEnv
from gymnasium import spaces
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecEnvWrapper, VecVideoRecorder

from sb3_hts import HTSA2C, HTSPPO, ClosedError, HTSVecEnv

N_ENVS, N_STEPS = 4, 8
ROLLOUT = N_ENVS * N_STEPS
KWARGS: dict[str, Any] = {"n_steps": N_STEPS, "policy_kwargs": {"net_arch": [8]}, "device": "cpu", "seed": 3}
PPO_KWARGS: dict[str, Any] = {**KWARGS, "batch_size": 16, "n_epochs": 2}


def make_model(algorithm: Any, env: Any, **kwargs: Any) -> Any:
    return algorithm("MlpPolicy", env, **{**(PPO_KWARGS if issubclass(algorithm, PPO) else KWARGS), **kwargs})


def parameters(model: Any) -> list[Any]:
    return [value.clone() for value in model.policy.state_dict().values()]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(th.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(autouse=True)
def _no_thread_left() -> Any:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("collector")] == []


class Unknown(VecEnvWrapper):
    """Nothing that the package knows; notes which threads step it."""

    def __init__(self, env: VecEnv) -> None:
        super().__init__(env)
        self.threads: set[threading.Thread] = set()

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        self.threads.add(threading.current_thread())
        return self.venv.step_wait()


# --- any environment ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [HTSPPO, HTSA2C])
def test_a_bare_environment(algorithm: Any) -> None:
    model = make_model(algorithm, WalkEnv()).learn(4 * N_STEPS)
    assert model.num_timesteps == 4 * N_STEPS
    assert model.get_env().get_attr("n_steps") == [4 * N_STEPS]


@pytest.mark.parametrize("lag", [0, 1])
def test_who_steps_the_environments(lag: int) -> None:
    """Without a lag nothing is to be gained by a thread, and some environments need the main one."""
    env = Unknown(DummyVecEnv([WalkEnv] * N_ENVS))
    make_model(HTSPPO, env, policy_lag=lag).learn(3 * ROLLOUT)
    assert len(env.threads) == 1
    assert (threading.current_thread() in env.threads) == (lag == 0)


class ReusingVecEnv(DummyVecEnv):
    """Hands out the same arrays and the same info dicts at each step."""

    def __init__(self, env_fns: Any) -> None:
        super().__init__(env_fns)
        self.kept: Any = None

    def step_wait(self) -> Any:
        observations, rewards, dones, infos = super().step_wait()
        if self.kept is None:
            self.kept = observations, rewards, dones, [dict(info) for info in infos]
        for old, new in zip(self.kept[:3], (observations, rewards, dones), strict=True):
            old[...] = new
        for old, new in zip(self.kept[3], infos, strict=True):
            old.clear()
            old.update(new)
        return self.kept


def test_environments_that_reuse_what_they_return() -> None:
    results = []
    for cls in (DummyVecEnv, ReusingVecEnv):
        seen: list[Any] = []

        def note(locals_: dict[str, Any], _: Any, seen: list[Any] = seen) -> bool:
            seen.append([dict(info) for info in locals_["infos"]])
            return True

        results.append((parameters(make_model(HTSPPO, cls([WalkEnv] * N_ENVS)).learn(4 * ROLLOUT, note)), seen))
    assert same(results[0][0], results[1][0])
    np.testing.assert_equal(results[0][1], results[1][1])


class UnsortedVecEnv(DummyVecEnv):
    """Gives the parts of observations in another order than the space, as third-party environments may."""

    def unsort(self, observations: Any) -> Any:
        return {key: observations[key] for key in reversed(observations)}

    def reset(self) -> Any:
        return self.unsort(super().reset())

    def step_wait(self) -> Any:
        observations, *others = super().step_wait()
        return self.unsort(observations), *others


def test_the_order_of_observations_keys_does_not_matter() -> None:
    space = spaces.Dict(a=spaces.Box(0, 255, (4,), np.uint8), b=spaces.Box(-1, 1, (4,), np.float32))
    results = []
    for cls in (DummyVecEnv, UnsortedVecEnv):
        model = HTSPPO("MultiInputPolicy", cls([partial(WalkEnv, space)] * 2), **PPO_KWARGS).learn(3 * 2 * N_STEPS)
        results.append(parameters(model))
    assert same(*results)


class LockVecEnv(DummyVecEnv):
    def step_wait(self) -> Any:
        observations, rewards, dones, infos = super().step_wait()
        infos[0]["lock"] = threading.Lock()
        return observations, rewards, dones, infos


def test_infos_that_cannot_be_copied_are_passed_on() -> None:
    locks: list[Any] = []

    def note(locals_: dict[str, Any], _: Any) -> bool:
        locks.append(locals_["infos"][0]["lock"])
        return True

    make_model(HTSA2C, LockVecEnv([WalkEnv] * 2)).learn(4 * N_STEPS, note)
    assert len(set(map(id, locks))) == 2 * N_STEPS


class PictureEnv(WalkEnv):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def render(self) -> Any:
        return np.full((64, 64, 3), int(abs(self.position) * 20) % 256, np.uint8)


def test_videos_are_recorded(tmp_path: Path) -> None:
    with HTSVecEnv([PictureEnv] * 2) as env:
        recorder = VecVideoRecorder(env, str(tmp_path), lambda step: step == 3, video_length=5)
        make_model(HTSPPO, recorder).learn(3 * ROLLOUT)
    assert [file.name for file in tmp_path.glob("*.mp4")] == ["rl-video-step-3-to-step-8.mp4"]


# --- its own copy ---------------------------------------------------------------------------------------------------


class ModeNoting(th.nn.Module):
    """Passes its input on, and notes mode and thread."""

    seen: set[tuple[bool, bool]] = set()  # noqa: RUF012

    def forward(self, inputs: th.Tensor) -> th.Tensor:
        self.seen.add((self.training, threading.current_thread() is threading.main_thread()))
        return inputs


class DropoutPolicy(ActorCriticPolicy):
    def _build_mlp_extractor(self) -> None:
        super()._build_mlp_extractor()
        extractor: Any = self.mlp_extractor
        extractor.policy_net.append(ModeNoting()).append(th.nn.Dropout(0.3))


def test_modes_do_not_leak_between_collector_and_learner() -> None:
    ModeNoting.seen.clear()
    results = []
    for cls in (DummyVecEnv, HTSVecEnv):
        layout = {"envs_per_group": N_ENVS} if cls is HTSVecEnv else {}
        env = cls([WalkEnv] * N_ENVS, **layout)
        results.append(parameters(HTSPPO(DropoutPolicy, env, **PPO_KWARGS).learn(5 * ROLLOUT)))
        env.close()
    # In training mode in the main thread, in evaluation mode in the other; the correction evaluates in the main thread
    assert ModeNoting.seen == {(True, True), (False, False), (False, True)}
    assert same(*results)


class LookingPolicy(ActorCriticPolicy):
    """Looks at the environments when it acts."""

    env: Any = None

    def forward(self, obs: th.Tensor, deterministic: bool = False) -> Any:
        _, values, log_probs = super().forward(obs, deterministic)
        return th.as_tensor([n_steps % 3 for n_steps in self.env.get_attr("n_steps")]), values, log_probs


@pytest.mark.parametrize("cls", [DummyVecEnv, SubprocVecEnv])
def test_a_policy_may_hold_the_environments(cls: Any) -> None:
    env = cls([WalkEnv] * 2)
    model = HTSPPO(LookingPolicy, env, **PPO_KWARGS)
    model.policy.env = env  # type: ignore[assignment]
    actions: list[int] = []
    model.learn(3 * 2 * N_STEPS, lambda locals_, _: bool(actions.append(int(locals_["actions"][0])) or True))
    assert actions == [step % 3 for step in range(3 * N_STEPS)]
    assert env.get_attr("n_steps") == [3 * N_STEPS] * 2
    env.close()


class CountingExtractor(BaseFeaturesExtractor):
    """Changes a buffer at each forward, and caches something of the size of the batch."""

    def __init__(self, space: Any) -> None:
        super().__init__(space, 3)
        self.register_buffer("mean", th.zeros(3))
        self.register_buffer("cache", th.zeros(1), persistent=False)

    def forward(self, inputs: th.Tensor) -> th.Tensor:
        with th.no_grad():
            self.mean += 0.05 * (inputs.mean(dim=0) - self.mean)
        self.cache = th.zeros(len(inputs))
        return inputs - self.mean


@pytest.mark.parametrize("make_env", [DummyVecEnv, partial(HTSVecEnv, envs_per_group=2)], ids=["thread", "workers"])
def test_forwards_may_change_buffers(make_env: Any) -> None:
    """Those who act have their own."""
    results = []
    for jitter in (0.0, 0.003, 0.003):
        env = make_env([partial(WalkEnv, jitter=jitter)] * N_ENVS)
        kwargs = {**PPO_KWARGS, "policy_kwargs": {"features_extractor_class": CountingExtractor}}
        model = HTSPPO("MlpPolicy", env, **kwargs).learn(4 * ROLLOUT)
        results.append([parameter.detach().clone() for parameter in model.policy.parameters()])
        env.close()
    assert same(results[0], results[1])
    assert same(results[0], results[2])


class SelfPlayEnv(WalkEnv):
    """Asks the model that is being trained for its opponent's actions."""

    model: Any = None

    def step(self, action: Any) -> Any:
        opponent, _ = SelfPlayEnv.model.predict(self._observation())
        return super().step(action - opponent)


def test_an_environment_may_use_the_model_that_is_trained() -> None:
    """It gets the behaviour policy, whose mode and parameters are not the learner's."""
    ModeNoting.seen.clear()
    results = []
    for jitter in (0.0, 0.002):
        SelfPlayEnv.model = HTSPPO(DropoutPolicy, DummyVecEnv([partial(SelfPlayEnv, jitter=jitter)] * 2), **PPO_KWARGS)
        results.append(parameters(SelfPlayEnv.model.learn(5 * 2 * N_STEPS)))
    assert same(*results)
    assert ModeNoting.seen == {(True, True), (False, False), (False, True)}


class StrictEnv(WalkEnv):
    def step(self, action: Any) -> Any:
        np.float32(1) / np.float32(0)
        return super().step(action)


@pytest.mark.parametrize("lag", [0, 1])
def test_numpys_error_state_is_the_learners(lag: int) -> None:
    with np.errstate(all="raise"), pytest.raises(FloatingPointError):
        make_model(HTSPPO, DummyVecEnv([StrictEnv]), policy_lag=lag).learn(ROLLOUT)


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Box(-1, 1, (2,))], ids=["discrete", "box"])
def test_timing_does_not_matter(space: Any) -> None:
    results = []
    for jitter in (0.0, 0.002, 0.002):
        env = DummyVecEnv([partial(WalkEnv, None, space, jitter)] * N_ENVS)
        results.append(parameters(make_model(HTSPPO, env).learn(4 * ROLLOUT)))
    assert same(results[0], results[1])
    assert same(results[0], results[2])


class GlobalEnv(WalkEnv):
    """Draws from process-wide generators."""

    def _observation(self) -> Any:
        return np.array([random.random(), np.random.random(), float(th.rand(()))], np.float32)


def test_without_a_lag_process_wide_generators_are_covered_by_the_seed() -> None:
    results = [parameters(make_model(HTSPPO, DummyVecEnv([GlobalEnv] * 2), policy_lag=0).learn(64)) for _ in range(2)]
    assert same(*results)


# --- ways to end ----------------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


class FailingVecEnv(DummyVecEnv):
    """Fails at its 12th step."""

    n_calls = 0

    def step_wait(self) -> Any:
        self.n_calls += 1
        if self.n_calls == 12:
            raise Boom
        return super().step_wait()


def assert_true_position(model: Any, env: Any) -> None:
    np.testing.assert_allclose(model._last_obs[:, 0], np.sin(env.get_attr("position")), rtol=1e-5)
    fresh = [taken == 0 for taken in env.get_attr("n_since_reset")]
    np.testing.assert_array_equal(model._last_episode_starts, fresh)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("algorithm", [HTSPPO, HTSA2C])
def test_an_error_of_the_environment_is_raised_as_it_is(algorithm: Any, lag: int, tmp_path: Path) -> None:
    env = FailingVecEnv([WalkEnv] * N_ENVS)
    model = make_model(algorithm, env, policy_lag=lag)
    with pytest.raises(Boom):
        model.learn(4 * ROLLOUT)
    assert_true_position(model, env)
    model.save(tmp_path / "model")
    model.learn(2 * ROLLOUT, reset_num_timesteps=False)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("make_env", [DummyVecEnv, lambda fns: Unknown(HTSVecEnv(fns))], ids=["dummy", "unknown"])
def test_an_error_in_training_stops_the_thread_at_a_step_boundary(make_env: Any, lag: int, error: Any) -> None:
    """With the collector waiting for a snapshot."""
    env = make_env([WalkEnv] * N_ENVS)
    model = make_model(HTSPPO, env, policy_lag=lag)
    step, calls = model.policy.optimizer.step, []

    def failing_step(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 6:
            raise error
        return step(*args, **kwargs)

    model.policy.optimizer.step = failing_step
    with pytest.raises(error):
        model.learn(4 * ROLLOUT)
    del model.policy.optimizer.step
    # Snapshots 0 and 1 of 4 were there for the third rollout
    most = 2 * N_STEPS + (N_STEPS // 2 if lag else 0)
    assert all(taken <= most for taken in env.get_attr("n_steps"))
    assert_true_position(model, env)
    model.learn(2 * ROLLOUT, reset_num_timesteps=False)
    env.close()


def test_a_callback_that_stops_leaves_the_true_position() -> None:
    env = DummyVecEnv([WalkEnv] * N_ENVS)
    model = make_model(HTSPPO, env)
    model.learn(4 * ROLLOUT, lambda *_: model.num_timesteps < ROLLOUT + 2 * N_ENVS)
    assert model.num_timesteps == ROLLOUT + 2 * N_ENVS
    assert_true_position(model, env)


class ExitingEnv(WalkEnv):
    def step(self, action: Any) -> Any:
        if self.n_steps == 11:
            raise SystemExit(3)
        return super().step(action)


def test_an_environment_that_exits_ends_as_in_stock() -> None:
    for algorithm in (A2C, HTSA2C):
        with pytest.raises(SystemExit):
            make_model(algorithm, DummyVecEnv([ExitingEnv])).learn(10 * N_STEPS)


def test_a_worker_of_subproc_that_dies_does_not_hide_the_first_error() -> None:
    env = SubprocVecEnv([WalkEnv] * 2)

    class Dying(HTSPPO):
        def train(self) -> None:
            if self._n_updates:
                env.processes[0].kill()
                raise Boom
            super().train()

    with pytest.raises(Boom):
        make_model(Dying, env).learn(8 * ROLLOUT)
    for process in env.processes:
        process.kill()
        process.join()


# --- asking an HTSVecEnv below an unknown wrapper while a rollout is in flight -----------------------------------------


def test_the_learner_and_other_threads_wait_for_the_end_of_the_rollout() -> None:
    env = HTSVecEnv([WalkEnv] * N_ENVS)
    counts: list[list[int]] = []

    class Curious(HTSPPO):
        def train(self) -> None:
            other = threading.Thread(target=lambda: counts.append(env.get_attr("n_steps")))
            other.start()
            zero_grad = self.policy.optimizer.zero_grad

            def asking(*args: Any, **kwargs: Any) -> None:
                counts.append(env.get_attr("n_steps"))
                zero_grad(*args, **kwargs)

            self.policy.optimizer.zero_grad = asking  # type: ignore[method-assign]
            super().train()
            del self.policy.optimizer.zero_grad
            other.join()

    make_model(Curious, Unknown(env), n_snapshots=4).learn(3 * ROLLOUT)
    env.close()
    assert counts == [[2 * N_STEPS] * N_ENVS] * 5 + [[3 * N_STEPS] * N_ENVS] * 10


def test_the_learner_waits_before_it_steps_the_environments_itself() -> None:
    env = HTSVecEnv([WalkEnv] * N_ENVS)
    counts: list[int] = []

    class Stepping(HTSPPO):
        def train(self) -> None:
            env.step(np.zeros(N_ENVS, int))
            counts.append(env.get_attr("n_steps")[0])
            super().train()

    make_model(Stepping, Unknown(env)).learn(3 * ROLLOUT)
    env.close()
    assert counts == [2 * N_STEPS + 1, 3 * N_STEPS + 2, 3 * N_STEPS + 3]


class ElsewhereWrapper(Unknown):
    """Steps in a thread of its own, as one with a time limit would."""

    def __init__(self, env: VecEnv) -> None:
        super().__init__(env)
        self.executor = ThreadPoolExecutor(1)

    def step_async(self, actions: Any) -> None:
        self.future = self.executor.submit(self.venv.step, actions)

    def step_wait(self) -> Any:
        return self.future.result()


def test_a_wrapper_may_step_in_a_thread_of_its_own() -> None:
    with HTSVecEnv([WalkEnv] * 2) as env:
        wrapper = ElsewhereWrapper(env)
        assert make_model(HTSPPO, wrapper).learn(3 * 2 * N_STEPS).num_timesteps == 3 * 2 * N_STEPS
        wrapper.executor.shutdown()


def test_environments_that_are_closed_in_between() -> None:
    env = HTSVecEnv([WalkEnv] * N_ENVS)

    class Closing(HTSPPO):
        def train(self) -> None:
            if self._n_updates == 2:
                env.close()
            super().train()

    with pytest.raises(ClosedError):
        make_model(Closing, Unknown(env)).learn(4 * ROLLOUT)


def test_whoever_comes_between_two_rollouts_waits_again() -> None:
    """Between the end of the waiting and the lock, the collector may have begun another rollout."""

    class Borrower:
        events: list[str] = []  # noqa: RUF012

        def before_asking(self, stepping: bool) -> None:
            self.events.append("waited")

        def keeps_out(self, stepping: bool) -> bool:
            self.events.append("looked")
            return len(self.events) < 5

    with HTSVecEnv([WalkEnv]) as env:
        borrower = Borrower()
        env.workforce.lend(borrower)
        assert env.get_attr("speed") == [1.0]
        assert borrower.events == ["waited", "looked"] * 3
        env.workforce.take_back(borrower)
        env.get_attr("speed")
        assert len(borrower.events) == 6
