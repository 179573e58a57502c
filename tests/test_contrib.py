"""sb3-contrib's algorithms: the same promises, with masks and with LSTM states."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from envs import WalkEnv
from gymnasium import spaces
from oracle import Oracle
from sb3_contrib import TRPO, MaskablePPO, RecurrentPPO
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecNormalize
from test_oracle import BOX, DICT, IMAGE, SMALL, assert_equal_to_oracle, normalize_with

import sb3_hts
from sb3_hts import HTSTRPO, HTSMaskablePPO, HTSRecurrentPPO, HTSVecEnv, WorkerError
from sb3_hts.policy_kinds import PolicyKind

pytestmark = pytest.mark.usefixtures("inference")

PPO_KWARGS: dict[str, Any] = {"batch_size": 12, "n_epochs": 3}
LSTM: dict[str, Any] = {**SMALL, "lstm_hidden_size": 8, "n_lstm_layers": 2}
N_ENVS, N_STEPS = 4, 8
ROLLOUT = N_ENVS * N_STEPS


# --- oracles --------------------------------------------------------------------------------------------------------


class MaskedWalkEnv(WalkEnv):
    """What is allowed depends on where it stands."""

    n_violations = 0

    def action_masks(self) -> np.ndarray:
        space: Any = self.action_space
        sizes = [space.n] if isinstance(space, spaces.Discrete) else getattr(space, "nvec", [2] * space.shape[0])
        masks = [np.arange(size) != int(abs(self.position) * 10) % size for size in sizes]
        return np.concatenate(masks)

    def step(self, action: Any) -> Any:
        space: Any = self.action_space
        if isinstance(space, spaces.Discrete):
            self.n_violations += not self.action_masks()[action]
        return super().step(action)


class MaskedOracle(Oracle):
    def make_actor(self) -> Any:
        model: Any = self.model
        return model.policy_class(model.observation_space, model.action_space, model.lr_schedule, **model.policy_kwargs)

    def act(self, group: int, obs: Any) -> Any:
        self.masks = np.stack(self.model.env.env_method("action_masks"))
        return self.actor(obs, action_masks=self.masks[group * self.group_size : (group + 1) * self.group_size])

    def stored(self) -> dict[str, Any]:
        return {"action_masks": self.masks}

    def evaluated(self, first: int) -> dict[str, Any]:
        masks: Any = self.model.rollout_buffer.action_masks
        return {"action_masks": th.tensor(masks.reshape(-1, masks.shape[-1])[first : first + 1024])}


class RecurrentOracle(Oracle):
    """Carries the states of each group from forward to forward."""

    states: dict[int, RNNStates]

    def act(self, group: int, obs: Any) -> Any:
        rows = slice(group * self.group_size, (group + 1) * self.group_size)
        if group == 0:
            self.before = self.join() if hasattr(self, "states") else self.model._last_lstm_states
            if not hasattr(self, "states"):
                self.states = {}
        if group not in self.states:
            initial = [th.zeros(2, self.group_size, 8) for _ in range(4)]
            self.states[group] = RNNStates((initial[0], initial[1]), (initial[2], initial[3]))
        starts = th.tensor(self.model._last_episode_starts[rows], dtype=th.float32)
        *outputs, self.states[group] = self.actor(obs, self.states[group], starts)
        return outputs

    def join(self) -> RNNStates:
        flat = [[*states.pi, *states.vf] for states in self.states.values()]
        pi_h, pi_c, vf_h, vf_c = (th.cat(parts, dim=1) for parts in zip(*flat, strict=True))
        return RNNStates((pi_h, pi_c), (vf_h, vf_c))

    def terminal_value(self, i: int, obs: Any) -> th.Tensor:
        states = tuple(state[:, i : i + 1].contiguous() for state in self.join().vf)
        return self.actor.predict_values(obs, states, th.tensor([0.0]))[0]

    def last_values(self, dones: np.ndarray) -> th.Tensor:
        starts = th.tensor(dones, dtype=th.float32).split(self.group_size)
        self.last_starts = th.tensor(dones, dtype=th.float32)
        groups = self.groups(self.model._last_obs, self.group_size)
        return th.cat([self.actor.predict_values(obs, self.states[g].vf, starts[g]) for g, obs in enumerate(groups)])

    def stored(self) -> dict[str, Any]:
        return {"lstm_states": self.before}

    def evaluated(self, first: int) -> dict[str, Any]:
        buffer: Any = self.model.rollout_buffer
        names = ("hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf")
        # (steps, layers, environments, size): every transition begins with the state that was stored with it
        flat = [th.tensor(getattr(buffer, name)).permute(1, 0, 2, 3).reshape(2, ROLLOUT, 8) for name in names]
        parts = [array[:, first : first + 1024].contiguous() for array in flat]
        starts = th.tensor(buffer.episode_starts.reshape(-1)[first : first + 1024])
        return {"lstm_states": RNNStates((parts[0], parts[1]), (parts[2], parts[3])), "episode_starts": starts}

    def evaluated_last(self) -> dict[str, Any]:
        return {"lstm_states": self.join().vf, "episode_starts": self.last_starts}


MASKED: dict[str, Any] = {"env_class": MaskedWalkEnv, "oracle_class": MaskedOracle, **PPO_KWARGS}
RECURRENT: dict[str, Any] = {"oracle_class": RecurrentOracle, "policy": "MlpLstmPolicy", "policy_kwargs": LSTM, **PPO_KWARGS}

layouts = pytest.mark.parametrize(("lag", "n_snapshots", "group_size"), [(0, 1, 4), (1, 1, 2), (1, 4, 1), (1, 4, 4)])


@layouts
@pytest.mark.parametrize(
    "action_space",
    [spaces.Discrete(3), spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(3)],
    ids=["discrete", "multidiscrete", "multibinary"],
)
def test_masked_is_equal_to_stock(lag: int, n_snapshots: int, group_size: int, action_space: Any) -> None:
    assert_equal_to_oracle(
        HTSMaskablePPO,
        action_space=action_space,
        lag=lag,
        n_snapshots=n_snapshots,
        group_size=group_size,
        correction="proximal",
        **MASKED,
    )


@layouts
@pytest.mark.parametrize("action_space", [spaces.Discrete(3), BOX], ids=["discrete", "box"])
def test_recurrent_is_equal_to_stock(lag: int, n_snapshots: int, group_size: int, action_space: Any) -> None:
    assert_equal_to_oracle(
        HTSRecurrentPPO,
        action_space=action_space,
        lag=lag,
        n_snapshots=n_snapshots,
        group_size=group_size,
        correction="proximal",
        **RECURRENT,
    )


@pytest.mark.parametrize("correction", ["behaviour", "decoupled"])
def test_other_corrections(correction: str) -> None:
    assert_equal_to_oracle(HTSMaskablePPO, n_snapshots=4, correction=correction, **MASKED)
    assert_equal_to_oracle(HTSRecurrentPPO, n_snapshots=4, correction=correction, **RECURRENT)
    assert_equal_to_oracle(HTSTRPO, correction=correction, batch_size=16)


@pytest.mark.parametrize(("lag", "group_size"), [(0, 4), (1, 2), (1, 4)])
@pytest.mark.parametrize("action_space", [spaces.Discrete(3), BOX], ids=["discrete", "box"])
def test_trpo_is_equal_to_stock(lag: int, group_size: int, action_space: Any) -> None:
    assert_equal_to_oracle(
        HTSTRPO, action_space=action_space, lag=lag, group_size=group_size, correction="proximal", batch_size=16
    )


def test_with_wrappers_dicts_and_images() -> None:
    def wrap(env: VecEnv, norm: Any) -> VecEnv:
        return VecFrameStack(norm(env), 2)

    for algorithm, kwargs in ((HTSMaskablePPO, MASKED), (HTSRecurrentPPO, RECURRENT), (HTSTRPO, {"batch_size": 16})):
        dicts = {"policy": "MultiInputLstmPolicy" if algorithm is HTSRecurrentPPO else "MultiInputPolicy"}
        assert_equal_to_oracle(algorithm, observation_space=DICT, correction="proximal", n_snapshots=1, **{**kwargs, **dicts})
        assert_equal_to_oracle(
            algorithm,
            group_size=4,
            wrap=lambda env: wrap(env, normalize_with(VecNormalize, 4)),
            correction="proximal",
            n_snapshots=1,
            **kwargs,
        )
    cnn = {"policy": "CnnLstmPolicy", "observation_space": IMAGE, "policy_kwargs": {"lstm_hidden_size": 8, "n_lstm_layers": 2}}
    assert_equal_to_oracle(HTSRecurrentPPO, correction="proximal", n_snapshots=4, **{**RECURRENT, **cnn})


def test_thread_collector() -> None:
    thread: dict[str, Any] = {"make_env": DummyVecEnv, "group_size": 4, "correction": "proximal"}
    assert_equal_to_oracle(HTSMaskablePPO, n_snapshots=4, **MASKED, **thread)
    assert_equal_to_oracle(HTSRecurrentPPO, n_snapshots=4, **RECURRENT, **thread)
    assert_equal_to_oracle(HTSTRPO, batch_size=16, **thread)


@pytest.mark.parametrize("sde_sample_freq", [-1, 3])
def test_recurrent_with_gsde(sde_sample_freq: int) -> None:
    kwargs = {**RECURRENT, "action_space": BOX, "use_sde": True, "sde_sample_freq": sde_sample_freq}
    assert_equal_to_oracle(HTSRecurrentPPO, n_snapshots=4, correction="proximal", **kwargs)


@pytest.mark.parametrize("critic", [{"shared_lstm": True, "enable_critic_lstm": False}, {"enable_critic_lstm": False}])
def test_other_critics(critic: dict[str, Any]) -> None:
    kwargs = {**RECURRENT, "policy_kwargs": {**LSTM, **critic}}
    assert_equal_to_oracle(HTSRecurrentPPO, n_snapshots=4, correction="proximal", **kwargs)


# --- use ------------------------------------------------------------------------------------------------------------

ALGORITHMS: dict[Any, tuple[Any, str, dict[str, Any]]] = {
    HTSMaskablePPO: (MaskablePPO, "MlpPolicy", {"policy_kwargs": SMALL, **PPO_KWARGS}),
    HTSRecurrentPPO: (RecurrentPPO, "MlpLstmPolicy", {"policy_kwargs": LSTM, **PPO_KWARGS}),
    HTSTRPO: (TRPO, "MlpPolicy", {"policy_kwargs": SMALL, "batch_size": 16}),
}
each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def make_model(algorithm: Any, env: Any, stock: bool = False, **kwargs: Any) -> Any:
    base, policy, defaults = ALGORITHMS[algorithm]
    cls = base if stock else algorithm
    return cls(policy, env, **{"n_steps": N_STEPS, "seed": 3, "device": "cpu", **defaults, **kwargs})


def parameters(model: Any) -> list[Any]:
    return [tensor.clone() for tensor in model.policy.state_dict().values()]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(th.equal(x, y) for x, y in zip(a, b, strict=True))


@each_algorithm
def test_timing_and_workers_do_not_matter(algorithm: Any) -> None:
    results = []
    for n_workers, jitter in ((1, 0.0), (2, 0.003), (4, 0.003)):
        with HTSVecEnv([lambda jitter=jitter: MaskedWalkEnv(jitter=jitter)] * N_ENVS, n_workers=n_workers) as env:
            results.append(parameters(make_model(algorithm, env).learn(4 * ROLLOUT)))
    assert same(results[0], results[1])
    assert same(results[0], results[2])


@each_algorithm
def test_save_and_load(algorithm: Any, tmp_path: Path) -> None:
    with HTSVecEnv([MaskedWalkEnv] * N_ENVS) as env:
        model = make_model(algorithm, env, policy_lag=0).learn(2 * ROLLOUT)
        model.save(tmp_path / "model")
        for cls in (algorithm, ALGORITHMS[algorithm][0]):
            loaded = cls.load(tmp_path / "model", env=env)
            assert same(parameters(loaded), parameters(model))
            obs = np.ones(3, np.float32)
            assert loaded.predict(obs, deterministic=True)[0] == model.predict(obs, deterministic=True)[0]
            loaded.learn(ROLLOUT, reset_num_timesteps=False)
            assert loaded.num_timesteps == 3 * ROLLOUT
        make_model(algorithm, DummyVecEnv([MaskedWalkEnv] * N_ENVS), stock=True).save(tmp_path / "stock")
        loaded = algorithm.load(tmp_path / "stock", env=env, policy_lag=1)
        loaded.learn(3 * ROLLOUT)
    with HTSVecEnv([MaskedWalkEnv] * 2) as smaller:
        assert algorithm.load(tmp_path / "model", env=smaller).learn(3 * ROLLOUT).num_timesteps == 3 * ROLLOUT


class Seen(BaseCallback):
    """Writes down what a callback sees of the model and of the loop."""

    ours = ("clipped_actions",)
    loops = ("idx", "done", "done_", "terminal_obs", "terminal_value", "terminal_lstm_state", "self", "env", "callback")

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def note(self, event: str) -> None:
        shapes = {
            key: (type(value).__name__, getattr(value, "shape", None), getattr(value, "dtype", None))
            for key, value in sorted(self.locals.items())
            if key not in (*self.ours, *self.loops)
        }
        self.events.append((event, self.num_timesteps, self.model.rollout_buffer.pos, shapes))  # type: ignore[attr-defined]

    def _on_rollout_start(self) -> None:
        self.note("rollout_start")

    def _on_step(self) -> bool:
        self.note("step")
        states = self.locals.get("lstm_states")
        if states is not None and self.locals["n_steps"] == 2:
            buffer = self.locals["rollout_buffer"]
            self.kept = (buffer.hidden_states_pi[1].copy(), self.model._last_lstm_states.pi[0].numpy().copy(), states)  # type: ignore[attr-defined]
        return True

    def _on_rollout_end(self) -> None:
        self.note("rollout_end")


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(3)])
@each_algorithm
def test_callbacks_see_what_they_see_in_stock(algorithm: Any, space: Any) -> None:
    if algorithm is HTSRecurrentPPO and isinstance(space, spaces.MultiBinary):
        space = BOX  # RecurrentPPO cannot train with the other
    seen = []
    for stock in (True, False):
        env_fns = [partial(MaskedWalkEnv, None, space)] * N_ENVS
        env: Any = DummyVecEnv(env_fns) if stock else HTSVecEnv(env_fns)
        callback = Seen()
        extra = {} if stock else {"policy_lag": 0}
        make_model(algorithm, env, stock, **extra).learn(2 * ROLLOUT, callback)
        seen.append(callback.events)
        env.close()
    assert seen[0] == seen[1]


def test_the_buffer_stores_the_state_before_each_step() -> None:
    with HTSVecEnv([WalkEnv] * N_ENVS) as env:
        callback = Seen()
        model = make_model(HTSRecurrentPPO, env).learn(ROLLOUT, callback)
        stored, before, after = callback.kept
        assert not np.array_equal(stored, before)
        np.testing.assert_array_equal(
            model.rollout_buffer.hidden_states_pi.reshape(N_ENVS, N_STEPS, 2, 8)[:, 2], before.swapaxes(0, 1)
        )
        np.testing.assert_array_equal(
            model.rollout_buffer.hidden_states_pi.reshape(N_ENVS, N_STEPS, 2, 8)[:, 3], after.pi[0].transpose(0, 1)
        )


@each_algorithm
def test_reading_the_buffer_in_a_callback_changes_nothing(algorithm: Any) -> None:
    class Reader(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            state = np.random.get_state()
            list(self.model.rollout_buffer.get(5))  # type: ignore[attr-defined]
            np.random.set_state(state)

    results = []
    for callback in (Reader(), None):
        with HTSVecEnv([MaskedWalkEnv] * N_ENVS, envs_per_group=2) as env:
            results.append(parameters(make_model(algorithm, env).learn(4 * ROLLOUT, callback)))
    assert same(*results)


@each_algorithm
def test_a_stop_and_an_exception_leave_the_true_position(algorithm: Any) -> None:
    class Boom(Exception):
        pass

    def explode(locals_: dict[str, Any], _: Any) -> bool:
        if locals_["self"].num_timesteps > 2 * ROLLOUT:
            raise Boom
        return True

    with HTSVecEnv([MaskedWalkEnv] * N_ENVS) as env:
        model = make_model(algorithm, env)
        model.learn(4 * ROLLOUT, lambda locals_, _: locals_["self"].num_timesteps < ROLLOUT + 9)
        np.testing.assert_allclose(model._last_obs[:, 0], np.sin(env.get_attr("position")), rtol=1e-5)
        with pytest.raises(Boom):
            model.learn(4 * ROLLOUT, explode)
        np.testing.assert_allclose(model._last_obs[:, 0], np.sin(env.get_attr("position")), rtol=1e-5)
        model.learn(2 * ROLLOUT, reset_num_timesteps=False)


# --- masks ----------------------------------------------------------------------------------------------------------


def test_without_masks_wanted_none_are_needed() -> None:
    with HTSVecEnv([WalkEnv] * N_ENVS) as env:
        model = make_model(HTSMaskablePPO, env)
        with pytest.raises(ValueError, match="Environment does not support action masking"):
            model.learn(ROLLOUT)
        model.learn(3 * ROLLOUT, use_masking=False)
        assert model.rollout_buffer.action_masks.all()
        assert model.num_timesteps == 3 * ROLLOUT


class FailingMaskEnv(MaskedWalkEnv):
    def action_masks(self) -> np.ndarray:
        if self.n_steps == 5:
            raise RuntimeError("no mask today")
        return super().action_masks()


def test_a_mask_that_fails_names_the_environment() -> None:
    env_fns = [MaskedWalkEnv, MaskedWalkEnv, FailingMaskEnv, MaskedWalkEnv]
    with HTSVecEnv(env_fns, n_workers=2) as env, pytest.raises(WorkerError, match=r"[Ee]nvironment 2.*no mask today"):
        make_model(HTSMaskablePPO, env).learn(2 * ROLLOUT)


class ShortMaskEnv(MaskedWalkEnv):
    def action_masks(self) -> np.ndarray:
        return np.ones(2, bool)


def test_masks_and_buffers_that_do_not_fit_are_named() -> None:
    with HTSVecEnv([MaskedWalkEnv, MaskedWalkEnv, ShortMaskEnv, MaskedWalkEnv], envs_per_group=2) as env:
        with pytest.raises(AssertionError, match="RolloutBuffer doesn't support action masking"):
            make_model(HTSMaskablePPO, env, rollout_buffer_class=RolloutBuffer).learn(ROLLOUT)
        sentence = r"action_masks\(\) of environment 2 gave 2 entries, but its spaces demand 3"
        with pytest.raises(WorkerError, match=sentence):
            make_model(HTSMaskablePPO, env).learn(ROLLOUT)


def test_no_masked_action_is_taken() -> None:
    with HTSVecEnv([MaskedWalkEnv] * N_ENVS, envs_per_group=2) as env:
        make_model(HTSMaskablePPO, env).learn(4 * ROLLOUT)
        assert env.get_attr("n_violations") == [0] * N_ENVS
        make_model(HTSMaskablePPO, env).learn(4 * ROLLOUT, use_masking=False)
        assert all(env.get_attr("n_violations"))


# --- arguments ------------------------------------------------------------------------------------------------------


def test_arguments() -> None:
    with HTSVecEnv([MaskedWalkEnv] * N_ENVS) as env:
        assert make_model(HTSMaskablePPO, env).n_snapshots == 4
        assert make_model(HTSTRPO, env).n_snapshots == 1
        with pytest.raises(TypeError, match="HTSTRPO has no argument n_snapshots"):
            make_model(HTSTRPO, env, n_snapshots=2)
        file = io.BytesIO()
        make_model(HTSTRPO, env).save(file)
        with pytest.raises(ValueError, match="n_snapshots must be 1, not 4: HTSTRPO's policy takes one step"):
            HTSTRPO.load(file, n_snapshots=4)
        with pytest.raises(ValueError, match="correction must be one of"):
            make_model(HTSRecurrentPPO, env, correction="delayed_gradient")
        with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
            make_model(HTSMaskablePPO, env, nonsense=1)
        make_model(HTSMaskablePPO, env, batch_size=None).learn(2 * ROLLOUT)
    model = HTSRecurrentPPO("MlpLstmPolicy", "CartPole-v1", n_envs=2, n_steps=8, device="cpu")
    assert type(model.get_env()) is HTSVecEnv
    model.learn(32)
    model.get_env().close()  # type: ignore[union-attr]


def test_a_policy_kind_needs_nothing_by_itself() -> None:
    kind = PolicyKind()
    assert kind.extras(None) == kind.recall(None) == {}


def test_without_sb3_contrib_the_rest_works() -> None:
    code = (
        "import sys; sys.modules['sb3_contrib'] = None; import sb3_hts; print(sb3_hts.HTSPPO.__name__)\n"
        "try: sb3_hts.HTSTRPO\nexcept ImportError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == 'HTSPPO\nHTSTRPO needs sb3-contrib: pip install "sb3-hts[contrib]".\n'
    assert "HTSTRPO" in dir(sb3_hts)
    with pytest.raises(AttributeError, match="no attribute 'HTSDQN'"):
        sb3_hts.HTSDQN  # noqa: B018


def test_the_stock_loop_is_told_about_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the policy cannot be copied, sb3-contrib's own loop collects."""
    called: list[Any] = []
    collect: Callable[..., Any] = MaskablePPO.collect_rollouts

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(kwargs["use_masking"])
        return collect(self, *args, **kwargs)

    monkeypatch.setattr(MaskablePPO, "collect_rollouts", spy)
    monkeypatch.setattr("sb3_hts.algorithm.make_collector", lambda *_, **__: None)
    model = make_model(HTSMaskablePPO, DummyVecEnv([MaskedWalkEnv]))
    for use_masking in (True, False):
        model.learn(8, use_masking=use_masking)
    assert called == [True, False]
