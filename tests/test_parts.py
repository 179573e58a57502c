"""The small parts, each by itself."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch as th
from envs import WalkEnv
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3 import PPO
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_hts import HTSVecEnv, shared_arrays, threads
from sb3_hts.collector import Position
from sb3_hts.corrections import PPO_CORRECTIONS, Collected, chunk_size, correct_rollout, shapes_of
from sb3_hts.placement import Placement
from sb3_hts.policy_kinds import PolicyKind
from sb3_hts.processes import resolve_start_method
from sb3_hts.protocol import Activity
from sb3_hts.randomness import DrawingFrom
from sb3_hts.replicas import PolicyTensors, Publisher, Replica, UnportablePolicyError, copy_policy, dump_policy, load_policy
from sb3_hts.seeding import draw_noise_key, stream_seed
from sb3_hts.shared_arrays import ALIGNMENT, ArraySpec, SharedBlock, aligned, block_nbytes, carve
from sb3_hts.storage import RolloutLayout, RolloutStorage
from sb3_hts.worker_status import ProgressWatch, WorkerStatus

# --- seeding --------------------------------------------------------------------------------------------------------


def test_stream_seeds_are_fixed_for_ever() -> None:
    """Saved models continue their noise, so these numbers must not change between versions."""
    assert stream_seed(0, 0, 0) == 1445694884619442965
    assert stream_seed(2**32 - 1, 3, 10**9) == 701322321605311379


def test_stream_seeds_differ() -> None:
    seeds = {stream_seed(key, group, step) % 2**32 for key in range(3) for group in range(4) for step in range(200)}
    assert len(seeds) == 3 * 4 * 200


@given(st.integers(), st.integers(0, 2**40), st.integers(0, 2**60))
def test_stream_seeds_fit_torch(key: int, group: int, step: int) -> None:
    assert 0 <= stream_seed(key, group, step) < 2**63


def test_noise_key() -> None:
    assert draw_noise_key(7) == 7
    assert draw_noise_key(None) != draw_noise_key(None)


# --- memory ---------------------------------------------------------------------------------------------------------

DTYPES = [np.dtype(name) for name in ("uint8", "bool", "int64", "float32", "float64")]
SPECS = st.builds(ArraySpec, st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(DTYPES))


@given(st.dictionaries(st.integers(), SPECS, max_size=6))
@settings(deadline=None)
def test_arrays_are_aligned_and_disjoint(specs: dict[Any, ArraySpec]) -> None:
    block = SharedBlock(block_nbytes(specs))
    arrays = carve(block.bytes, specs)
    for number, (key, spec) in enumerate(specs.items()):
        array = arrays[key]
        assert (array.shape, array.dtype) == (spec.shape, spec.dtype)
        assert array.ctypes.data % ALIGNMENT == 0 or array.size == 0
        array.reshape(-1).view(np.uint8)[:] = number % 2
    for number, key in enumerate(specs):
        assert (arrays[key].reshape(-1).view(np.uint8) == number % 2).all()
    block.release_descriptor()


def test_fresh_memory_is_poisoned_in_tests() -> None:
    assert shared_arrays.POISON is not None
    block = SharedBlock(10)
    assert (block.bytes == shared_arrays.POISON).all()
    block.release_descriptor()


def test_a_block_is_one_piece_of_memory_for_all_who_map_it() -> None:
    block = SharedBlock(100)
    other = SharedBlock.__new__(SharedBlock)
    other._adopt(os.dup(block._fd), 100)
    block.bytes[5] = 42
    assert other.bytes[5] == 42
    for mapped in (block, other):
        mapped.release_descriptor()
        mapped.release_descriptor()


@given(st.integers(1, 6), st.integers(1, 6), SPECS, SPECS)
@settings(deadline=None)
def test_halves_do_not_overlap(n_steps: int, n_envs: int, observation: ArraySpec, action: ArraySpec) -> None:
    layout = RolloutLayout(n_steps, n_envs, {None: observation, "more": observation}, action)
    block = SharedBlock(layout.nbytes)
    storage = RolloutStorage(layout, block)
    for value, half in enumerate(storage.halves):
        for array in (*half.observations.values(), half.actions, half.rewards, half.dones, half.last_values):
            array.reshape(-1).view(np.uint8)[:] = value
        assert half.observations["more"].shape == (n_steps + 1, n_envs, *observation.shape)
        assert half.dones.shape == (n_steps, n_envs)
    assert not storage.halves[0].actions.any()
    block.release_descriptor()


def test_a_rollout_needs_a_step() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        RolloutLayout(0, 1, {}, ArraySpec((), np.dtype(np.int64)))


# --- policies -------------------------------------------------------------------------------------------------------


class OddPolicy(ActorCriticPolicy):
    """Tied weights, batch norm, a buffer that is not saved, and something that belongs to nobody but the learner."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norm = th.nn.BatchNorm1d(3)
        self.tied = self.action_net
        self.view = th.nn.Parameter(self.value_net.weight.data[:, 2:5])
        self.register_buffer("secret", th.arange(4.0), persistent=False)


def make_policy(cls: Any = OddPolicy, action_space: Any = None) -> Any:
    return PPO(cls, DummyVecEnv([lambda: WalkEnv(None, action_space)]), device="cpu", seed=0).policy


def send_policy(policy: Any, tensors: PolicyTensors, own: list[th.Tensor]) -> Any:
    return load_policy(dump_policy(tensors, th.device("cpu")), own)


def copy_here(policy: Any, tensors: PolicyTensors, own: list[th.Tensor]) -> Any:
    return copy_policy(policy, tensors, [], own)


def replicate(policy: Any, transfer: Any = send_policy, n_slots: int = 2) -> tuple[Replica, Publisher]:
    tensors = PolicyTensors(policy)
    slots = list(th.zeros((n_slots, aligned(tensors.nbytes)), dtype=th.uint8))
    publisher = Publisher(tensors, slots, np.zeros((n_slots, 2), np.int64))
    return Replica(tensors.specs, slots, partial(transfer, policy, tensors), noise_key=0), publisher


def state(policy: Any) -> dict[str, th.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in [*policy.named_parameters(), *policy.named_buffers()]}


@pytest.mark.parametrize("transfer", [send_policy, copy_here])
def test_a_replica_shows_what_is_published(transfer: Any) -> None:
    policy = make_policy()
    replica, publisher = replicate(policy, transfer)
    publisher.write(0, (0, 0))
    first = state(policy)
    for tensor in [*policy.parameters(), *policy.buffers()]:
        tensor.data.copy_(tensor * 2 + 1)
    policy.secret = policy.secret + 1  # a new tensor under the old name
    publisher.write(1, (0, 5))
    second = state(policy)
    for slot, expected in ((1, second), (0, first), (0, first), (1, second)):
        replica.bind(slot)
        for name, tensor in state(replica.policy).items():
            assert th.equal(tensor, expected[name]), name
        # As a forward might; it is undone
        replica.policy.norm.running_mean += 1
        replica.policy.secret = replica.policy.secret + 1
    assert replica.policy.optimizer is None
    assert not replica.policy.training
    assert replica.policy.tied is replica.policy.action_net
    assert replica.policy.view.data_ptr() == replica.policy.value_net.weight.data_ptr() + 2 * 4
    for tensor in (replica.policy.log_std if hasattr(replica.policy, "log_std") else replica.policy.action_net.weight,):
        assert tensor.data_ptr() % ALIGNMENT == 0
    assert policy.optimizer is not None, "the learner's policy is untouched"


def test_a_policy_that_cannot_travel_is_named() -> None:
    policy = make_policy()
    policy.features_extractor.lock = threading.Lock()
    with pytest.raises(UnportablePolicyError, match=r"^policy.features_extractor.lock cannot be pickled .*'_thread.lock'"):
        dump_policy(PolicyTensors(policy), th.device("cpu"))
    with pytest.raises(UnportablePolicyError, match=r"^policy.features_extractor.lock cannot be copied: .*'_thread.lock'"):
        copy_policy(policy, PolicyTensors(policy), [], PolicyTensors(policy).tensors)


def test_tensors_that_are_nobodys_go_with_the_policy_or_stay() -> None:
    policy = make_policy(ActorCriticPolicy)
    policy.table = th.arange(3)
    assert load_policy(dump_policy(PolicyTensors(policy), th.device("meta")), PolicyTensors(policy).tensors).table.is_meta
    policy.to("meta")  # the table is on the CPU for a reason
    assert load_policy(dump_policy(PolicyTensors(policy), th.device("cpu")), PolicyTensors(policy).tensors).table.sum() == 3
    assert load_policy(dump_policy(PolicyTensors(policy), th.device("meta")), PolicyTensors(policy).tensors).table.sum() == 3


def test_exploration_matrices_are_copied_too() -> None:
    policy = PPO("MlpPolicy", DummyVecEnv([lambda: WalkEnv(None, spaces.Box(-1, 1, (2,)))]), use_sde=True, device="cpu").policy
    policy.reset_noise(3)
    replica, _ = replicate(policy, copy_here)
    theirs: Any = replica.policy.action_dist
    assert th.equal(theirs.exploration_mat, policy.action_dist.exploration_mat)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: th.distributions.Categorical(logits=th.zeros(5)).sample((7,)),
        lambda: th.distributions.Bernoulli(th.full((9,), 0.5)).sample(),
        lambda: th.distributions.Normal(th.zeros(4), th.ones(4)).rsample(),
        lambda: th.distributions.Beta(th.ones(4), th.ones(4)).sample() + th.distributions.Gamma(th.ones(4), 1.0).sample(),
        lambda: th.distributions.Binomial(9, th.full((4,), 0.5)).sample() + th.distributions.Poisson(th.ones(4)).sample(),
        lambda: th.empty(4).uniform_(),
        lambda: th.randn(4) + th.rand(4) + th.randint(9, (4,)) + th.randperm(4),
    ],
)
def test_a_private_generator_leaves_the_global_one_alone(draw: Any) -> None:
    """And gives what the global one would give for the same seed."""
    th.manual_seed(1)
    expected = draw()
    th.manual_seed(2)
    before = th.get_rng_state()
    with DrawingFrom(th.Generator().manual_seed(1)):
        assert th.equal(draw(), expected)
    assert th.equal(th.get_rng_state(), before)


def test_a_private_generator_is_for_one_thread() -> None:
    drawn: list[Any] = []
    th.manual_seed(3)
    expected = th.rand(4)
    th.manual_seed(3)
    with DrawingFrom(th.Generator().manual_seed(1)):
        thread = threading.Thread(target=lambda: drawn.append(th.rand(4)))
        thread.start()
        thread.join()
    assert th.equal(drawn[0], expected)


# --- processes ------------------------------------------------------------------------------------------------------


def test_windows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(OSError, match=r"HTSVecEnv needs Linux or macOS: .*; use WSL on Windows"):
        resolve_start_method(None)


# --- corrections ----------------------------------------------------------------------------------------------------


def collected(model: Any) -> Collected:
    buffer = model.rollout_buffer
    end = Position(model._last_obs, model._last_episode_starts)
    return Collected(buffer.observations, buffer.rewards, end, shapes_of(buffer))


def test_corrections_change_nothing_when_the_policy_is_the_same() -> None:
    """Ratios are one, values the same, up to the rounding of another batch shape."""
    model = PPO("MlpPolicy", DummyVecEnv([WalkEnv] * 2), n_steps=16, device="cpu", seed=0)
    model.learn(1)
    buffers = {}
    for name in ("behaviour", "proximal", "decoupled"):
        model.collect_rollouts(model.env, model._init_callback(None), model.rollout_buffer, 16)  # type: ignore[arg-type]
        before = {key: getattr(model.rollout_buffer, key).copy() for key in ("advantages", "values", "log_probs", "returns")}
        correct_rollout(
            PPO_CORRECTIONS[name],
            model.policy,
            model.rollout_buffer,
            collected(model),
            PolicyKind(),
        )
        buffers[name] = before
        if name == "decoupled":
            before["advantages"] -= before["advantages"].mean()
        for key, array in before.items():
            np.testing.assert_allclose(getattr(model.rollout_buffer, key), array, atol=1e-5, err_msg=f"{name} {key}")


def test_weights_are_truncated_ratios() -> None:
    model = PPO("MlpPolicy", DummyVecEnv([WalkEnv] * 2), n_steps=16, device="cpu", seed=0)
    model.learn(1)
    model.collect_rollouts(model.env, model._init_callback(None), model.rollout_buffer, 16)  # type: ignore[arg-type]
    buffer = model.rollout_buffer
    behaviour = buffer.log_probs.copy()
    buffer.log_probs = behaviour + np.linspace(-3, 3, behaviour.size, dtype=np.float32).reshape(behaviour.shape)
    shifted = buffer.log_probs.copy()
    correct_rollout(PPO_CORRECTIONS["decoupled"], model.policy, buffer, collected(model), PolicyKind())
    np.testing.assert_allclose(buffer.log_probs, behaviour, atol=1e-5)
    unweighted = buffer.returns - buffer.values
    expected = (unweighted - unweighted.mean()) * np.minimum(np.exp(behaviour - shifted), 2)
    np.testing.assert_allclose(buffer.advantages, expected, rtol=1e-3, atol=1e-4)


def test_the_re_evaluation_takes_as_many_rows_as_fit_the_cache() -> None:
    def size(n_rows: int, *shape: int) -> int:
        return chunk_size(n_rows, np.empty((4, n_rows // 4, *shape), np.uint8))

    assert size(2048, 3) == 1024
    assert size(64, 3) == 1024
    assert size(1024, 4, 84, 84) == 148
    assert size(8, 1024, 1024, 8) == 1
    assert chunk_size(1024, {"a": np.empty((256, 4, 84, 84)), "b": np.empty((256, 4, 4, 84, 84))}) == 118


# --- progress -------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("sb3_hts.worker_status.time.monotonic", lambda: self.now)

    def hung_after(self, watch: ProgressWatch, seconds: float) -> int | None:
        self.now += seconds
        return watch.first_hung([0, 1])


def test_a_worker_without_progress_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, status = Clock(monkeypatch), WorkerStatus(2)
    status.set(0, Activity.STEPPING, 3)
    status.set(1, Activity.STEPPING, 4)
    watch = ProgressWatch(status, [0, 1], 4.0)
    for _ in range(3):
        assert clock.hung_after(watch, 1.0) is None
        status.set(0, Activity.STEPPING, 3)
    assert clock.hung_after(watch, 1.0) == 1
    assert clock.hung_after(watch, 0.5) is None, "not time to look yet"
    assert 500 <= (watch.poll_timeout() or 0) <= 501


def test_start_up_and_waiting_for_the_learner_take_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, status = Clock(monkeypatch), WorkerStatus(2)
    status.set(1, Activity.AWAITING_SNAPSHOT)
    watch = ProgressWatch(status, [0, 1], 4.0)
    assert [clock.hung_after(watch, 1.0) for _ in range(9)] == [None] * 9
    status.set(1, Activity.ACTING)
    assert [clock.hung_after(watch, 1.0) for _ in range(5)] == [None] * 4 + [1]


def test_a_halt_of_the_whole_program_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, status = Clock(monkeypatch), WorkerStatus(2)
    status.set(0, Activity.STEPPING)
    watch = ProgressWatch(status, [0, 1], 4.0)
    assert clock.hung_after(watch, 1000.0) is None
    assert [clock.hung_after(watch, 1.0) for _ in range(3)] == [None, None, 0]


def test_without_a_limit_nobody_hangs() -> None:
    watch = ProgressWatch(WorkerStatus(1), [0], None)
    assert watch.poll_timeout() is None
    assert watch.first_hung([0]) is None


def test_every_environment_counts_as_progress() -> None:
    with HTSVecEnv([WalkEnv] * 4, envs_per_group=2, n_workers=1) as env:
        status = env.workforce.pool.status
        for work in (env.reset, lambda: env.step(np.zeros(4, int)), lambda: env.get_attr("speed")):
            before = status.read(0)[2]
            work()
            assert status.read(0)[2] >= before + 4


# --- placement ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 40))
def test_every_environment_has_one_place(n_groups: int, envs_per_group: int, n_workers: int) -> None:
    placement = Placement(n_groups * envs_per_group, envs_per_group, min(n_workers, n_groups))
    groups = [list(placement.groups_of(worker)) for worker in range(placement.n_workers)]
    assert [group for hosted in groups for group in hosted] == list(range(n_groups))
    assert {len(hosted) for hosted in groups} <= {n_groups // placement.n_workers, -(-n_groups // placement.n_workers)}
    for env_index in range(placement.n_envs):
        envs = placement.envs_of(placement.worker_of(env_index))
        assert envs.start <= env_index < envs.stop


# --- threads --------------------------------------------------------------------------------------------------------


def test_learner_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large, convolutional = th.nn.Linear(8, 8), th.nn.Linear(1000, 1000), th.nn.Conv2d(1, 1, 1)
    for n_cores, before, after in ((2, 2, 1), (2, 1, 1), (1, 1, 1), (16, 16, 8), (16, 4, 4), (16, 32, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=n_cores: set(range(n)), raising=False)
        assert threads.learner_threads(small, before) == after
        assert threads.learner_threads(large, before) == before
        assert threads.learner_threads(convolutional, before) == before
