"""Central inference: actors apart from executors, whatever is ready when."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch as th
from envs import FaultyEnv, WalkEnv
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.distributions import SquashedDiagGaussianDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv
from test_oracle import BOX, DICT, IMAGE, PPO_KWARGS, assert_equal_to_oracle

from sb3_hts import HTSA2C, HTSPPO, ClosedError, HTSVecEnv, WorkerDied, WorkerError, WorkerRaised, WorkerTimeout, inference
from sb3_hts.acting import GroupActor
from sb3_hts.inference import Central
from sb3_hts.pool import WorkerPool
from sb3_hts.protocol import Activity, Failed
from sb3_hts.replicas import Publisher
from sb3_hts.tokens import TokenQueue

CNN: dict[str, Any] = {
    "policy": "CnnPolicy",
    "observation_space": IMAGE,
    "policy_kwargs": {"features_extractor_kwargs": {"features_dim": 16}},
}
JITTERY = partial(WalkEnv, jitter=0.002)


@pytest.mark.parametrize("batch", ["full", "group"])
@pytest.mark.parametrize("n_actors", [1, 2, 3])
@pytest.mark.parametrize("n_snapshots", [1, 4])
@pytest.mark.parametrize("kind", [{}, CNN], ids=["mlp", "cnn"])
def test_is_equal_to_stock(batch: str, n_actors: int, n_snapshots: int, kind: dict[str, Any]) -> None:
    assert_equal_to_oracle(
        HTSPPO,
        n_snapshots=n_snapshots,
        correction="proximal",
        env_class=JITTERY,
        central={"inference": "central", "n_actors": n_actors, "central_batch": batch},
        **PPO_KWARGS,
        **kind,
    )


@pytest.mark.parametrize(
    "action_space", [BOX, spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(3)], ids=["box", "multidiscrete", "multibinary"]
)
def test_full_batches_of_other_spaces(action_space: spaces.Space[Any]) -> None:
    central = {"inference": "central", "central_batch": "full"}
    kwargs: dict[str, Any] = {"action_space": action_space, "central": central}
    dicts: dict[str, Any] = {"policy": "MultiInputPolicy", "observation_space": DICT}
    assert_equal_to_oracle(HTSPPO, n_snapshots=4, correction="proximal", **PPO_KWARGS, **kwargs, **dicts)
    assert_equal_to_oracle(HTSA2C, correction="delayed_gradient", **kwargs)


@pytest.mark.parametrize("sde_sample_freq", [-1, 3])
def test_gsde_with_several_actors(sde_sample_freq: int) -> None:
    """An exploration matrix is sampled by one actor and needed by the next."""
    assert_equal_to_oracle(
        HTSPPO,
        n_snapshots=4,
        correction="proximal",
        env_class=JITTERY,
        action_space=BOX,
        use_sde=True,
        sde_sample_freq=sde_sample_freq,
        central={"inference": "central", "n_actors": 3},
        **PPO_KWARGS,
    )


class Restless(ActorCriticPolicy):
    """Draws from every generator, and counts its forwards in a buffer."""

    count: th.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("count", th.zeros(1))

    def noise(self) -> th.Tensor:
        self.count = self.count + 1  # another tensor
        return self.count * (random.random() + np.random.rand() + th.rand(1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        actions, values, log_probs = super().forward(*args, **kwargs)
        return actions, values + self.noise(), log_probs

    def predict_values(self, obs: Any) -> th.Tensor:
        return super().predict_values(obs) + self.noise()


@pytest.mark.parametrize(
    "cases",
    [[({}, {"inference": "central", "n_actors": n}) for n in (1, 2, 3)], [({"n_workers": n}, {}) for n in (1, 2, 4)]],
    ids=["central", "local"],
)
def test_policies_that_draw_and_count_repeat(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """A forward depends on its group, its step and what has been published, and on nothing that was forwarded before."""
    results = []
    for layout, kwargs in cases:
        with HTSVecEnv([JITTERY] * 4, **layout) as env:
            env.seed(3)
            model = HTSPPO(Restless, env, n_steps=8, n_snapshots=2, batch_size=16, seed=3, device="cpu", **kwargs)
            model.learn(4 * 32)
            values = th.tensor(model.rollout_buffer.returns).flatten()
            results.append(th.cat([values, *(tensor.detach().flatten() for tensor in model.policy.state_dict().values())]))
    assert all(th.equal(result, results[0]) for result in results)


# --- what is chosen -------------------------------------------------------------------------------------------------


class Overridden(ActorCriticPolicy):
    """Nobody knows what it does."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Extractor(th.nn.Flatten):
    """Not one of SB3's or torch's own."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__()
        self.features_dim = int(np.prod(space.shape))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "kwargs", "words"),
    [
        ("MlpPolicy", {}, "inference local,"),
        ("MlpPolicy", {"inference": "central"}, "inference central (1 actor on cpu, full batches)"),
        ("CnnPolicy", {"inference": "central"}, "inference central (1 actor on cpu, full batches)"),
        ("MlpPolicy", {"inference": "central", "n_actors": 2}, "inference central (2 actors on cpu, full batches)"),
        ("MlpPolicy", {"inference": "central", "central_batch": "group"}, "on cpu, group batches)"),
        (Overridden, {"inference": "central"}, "on cpu, group batches)"),
        ("MlpPolicy", {"inference": "central", "policy_kwargs": {"features_extractor_class": Extractor}}, "group batches)"),
    ],
)
def test_says_what_it_does(policy: Any, kwargs: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with HTSVecEnv([partial(WalkEnv, IMAGE) if policy == "CnnPolicy" else WalkEnv] * 2) as env:
        HTSA2C(policy, env, device="cpu", verbose=1, **kwargs).learn(10)
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"inference": "remote"}, "inference must be one of"),
        ({"central_batch": "half"}, "central_batch must be one of"),
        ({"n_actors": 0}, "n_actors must be a positive integer, not 0"),
        ({"n_actors": 1.5}, "n_actors must be a positive integer, not 1.5"),
        ({"actor_device": "gpu"}, "actor_device='gpu' is not a device"),
        ({"actor_device": 1.5}, "actor_device=1.5 is not a device"),
        ({"actor_device": "meta", "inference": "local"}, 'does not go with inference="local"'),
    ],
)
def test_arguments(kwargs: dict[str, Any], message: str) -> None:
    with HTSVecEnv([WalkEnv]) as env, pytest.raises(ValueError, match=message):
        HTSA2C("MlpPolicy", env, device="cpu", **kwargs)


def test_a_full_batch_that_is_not_possible() -> None:
    with HTSVecEnv([WalkEnv]) as env:
        model = HTSA2C(Overridden, env, device="cpu", inference="central", central_batch="full")
        with pytest.raises(
            ValueError, match="central_batch=\"full\" is not possible, because the policy's forward is not SB3's"
        ):
            model.learn(10)


class OwnValues(ActorCriticPolicy):
    def predict_values(self, obs: Any) -> th.Tensor:
        return super().predict_values(obs)


def test_policies_that_do_not_divide() -> None:
    space = spaces.Box(-1, 1, (3,))
    policies = [ActorCriticPolicy(space, space, lambda _: 1e-3) for _ in range(2)]
    assert inference.why_not_full(policies[0], GroupActor) is None
    policies[1].action_dist = SquashedDiagGaussianDistribution(3)
    for policy in (policies[1], OwnValues(space, space, lambda _: 1e-3)):
        assert inference.why_not_full(policy, GroupActor) is not None


@pytest.mark.skipif(th.cuda.is_available(), reason="has a CUDA device")
def test_the_file_of_a_machine_with_another_device(tmp_path: Path) -> None:
    with HTSVecEnv([WalkEnv]) as env:
        HTSA2C("MlpPolicy", env, device="cpu", actor_device="cuda", inference="central").save(tmp_path / "model")
        model = HTSA2C.load(tmp_path / "model", env, device="cpu")
        model.predict(env.reset())
        with pytest.raises(ValueError, match="actor_device='cuda' cannot be used"):
            model.learn(10)
        HTSA2C.load(tmp_path / "model", env, device="cpu", actor_device=None).learn(10)


def test_other_environments_have_no_executors() -> None:
    model = HTSA2C("MlpPolicy", DummyVecEnv([WalkEnv]), device="cpu", inference="central")
    with pytest.warns(UserWarning, match='inference="central" has no effect, because DummyVecEnv is not an HTSVecEnv'):
        model.learn(10)


# --- processes ------------------------------------------------------------------------------------------------------


def actors_of(env: HTSVecEnv) -> list[int]:
    actors = env.workforce.actors
    return actors.pids if actors is not None else []


def test_actors_stay_until_they_are_not_wanted_any_more() -> None:
    with HTSVecEnv([WalkEnv] * 2) as env:
        model = HTSPPO("MlpPolicy", env, n_steps=8, batch_size=16, device="cpu", inference="central", n_actors=2)
        pids = []
        for _ in range(2):
            model.learn(32)
            pids.append(actors_of(env))
        assert pids[0] == pids[1]
        assert len(pids[0]) == 2
        model.n_actors = 3
        model.learn(32)
        assert len(actors_of(env)) == 3
        assert not any(map(psutil.pid_exists, pids[0]))
        model.inference = "local"
        model.learn(32)
        assert actors_of(env) == []


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_start_methods(start_method: str) -> None:
    with HTSVecEnv([WalkEnv] * 2, start_method=start_method) as env:
        model = HTSA2C("MlpPolicy", env, device="cpu", inference="central").learn(40)
        assert model.num_timesteps == 40


def test_an_actor_that_is_killed() -> None:
    with HTSVecEnv([WalkEnv] * 4) as env:
        model = HTSPPO("MlpPolicy", env, n_steps=8, batch_size=16, device="cpu", inference="central", n_actors=2)

        def kill(*_: Any) -> bool:
            if model.num_timesteps == 64:
                psutil.Process(actors_of(env)[1]).kill()
            return True

        with pytest.raises(WorkerDied, match=r"Actor 1.*was killed by SIGKILL|\(of actor 1\).*was killed by SIGKILL"):
            model.learn(10_000, kill)  # type: ignore[arg-type]


def test_an_actor_that_does_not_answer() -> None:
    with HTSVecEnv([WalkEnv] * 2, step_timeout=1.0) as env:
        model = HTSPPO("MlpPolicy", env, n_steps=8, batch_size=16, device="cpu", inference="central")

        def stop(*_: Any) -> bool:
            if model.num_timesteps == 32:
                psutil.Process(actors_of(env)[0]).suspend()
            return True

        with pytest.raises(WorkerTimeout, match=r"no progress for 1\.0 s \(step_timeout\) while waiting for an action"):
            model.learn(10_000, stop)  # type: ignore[arg-type]


def test_a_policy_that_fails_in_an_actor() -> None:
    for batch in ("full", "group"):
        with HTSVecEnv([WalkEnv] * 2) as env:
            model = HTSA2C("MlpPolicy", env, device="cpu", inference="central", central_batch=batch)
            model.policy.action_net.weight.data.fill_(float("nan"))
            with pytest.raises(WorkerRaised, match=r"\(of actor 0\) failed computing actions"):
                model.learn(10)


def test_an_observation_that_the_policy_cannot_bear_is_blamed_on_its_environment() -> None:
    with HTSVecEnv([partial(FaultyEnv, "step", "nan", 20 if index == 2 else 1000) for index in range(4)]) as env:
        model = HTSPPO("MlpPolicy", env, n_steps=8, batch_size=16, device="cpu", inference="central")
        with pytest.raises(WorkerRaised, match=r"Environment 2 \(of actor 0\) failed computing actions") as info:
            model.learn(10_000)
        assert info.value.env_index == 2


class Disconnected(ActorCriticPolicy):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ConnectionRefusedError("no luck with the server of weights")


def test_a_policy_that_cannot_connect() -> None:
    with HTSVecEnv([WalkEnv]) as env, pytest.raises(WorkerRaised, match="no luck with the server of weights"):
        HTSA2C(Disconnected, env, device="cpu", inference="central").learn(10)


def test_descriptors_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with HTSVecEnv([WalkEnv] * 2) as env:
        model = HTSA2C("MlpPolicy", env, device="cpu", inference="central").learn(10)

        def refuse(*_: Any) -> None:
            raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")

        monkeypatch.setattr("sb3_hts.tokens.reduction.send_handle", refuse)
        with pytest.raises(WorkerError, match=r"Worker 0: file descriptors cannot be sent to it .*Too many references"):
            model.learn(10)


def test_descriptors_are_sent_little_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sb3_hts.workforce.SENT_AT_ONCE", 8)
    with HTSVecEnv([WalkEnv] * 5) as env:
        under_way: list[int] = []
        pool = env.workforce.pool
        send, receive = pool.send, pool.receive

        def sending(worker: int, request: Any, *sendables: Any) -> None:
            under_way.extend([worker] * len(sendables))
            assert len(under_way) <= 8
            send(worker, request, *sendables)

        def receiving(workers: Any, **kwargs: Any) -> Any:
            under_way.clear()
            return receive(workers, **kwargs)

        monkeypatch.setattr(pool, "send", sending)
        monkeypatch.setattr(pool, "receive", receiving)
        assert HTSA2C("MlpPolicy", env, device="cpu", inference="central").learn(25).num_timesteps == 25


def test_an_interrupt_while_actors_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environments go on without them."""
    receive = WorkerPool.receive

    def interrupted(pool: WorkerPool, *args: Any, **kwargs: Any) -> Any:
        if pool.role == "actor":
            psutil.Process(pool.pids[0]).kill()
            raise KeyboardInterrupt
        return receive(pool, *args, **kwargs)

    with HTSVecEnv([WalkEnv] * 2) as env:
        model = HTSA2C("MlpPolicy", env, device="cpu", inference="central")
        with monkeypatch.context() as patched:
            patched.setattr(WorkerPool, "receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model.learn(10)
        assert actors_of(env) == []
        assert model.learn(10).num_timesteps == 10


def test_an_interrupt_does_not_hide_the_failure_of_an_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    check = WorkerPool._check
    interrupts = []

    def interrupted(pool: WorkerPool, worker: int, tolerate_failures: bool) -> None:
        if pool.role == "actor" and isinstance(pool._arrived[worker][0], Failed) and not interrupts:
            interrupts.append(worker)
            raise KeyboardInterrupt
        check(pool, worker, tolerate_failures)

    monkeypatch.setattr(WorkerPool, "_check", interrupted)
    with HTSVecEnv([WalkEnv] * 2) as env:
        model = HTSA2C(Disconnected, env, device="cpu", inference="central")
        with pytest.raises(KeyboardInterrupt):
            model.learn(10)
        with pytest.raises(ClosedError, match="no luck with the server of weights"):
            env.reset()


def test_a_held_group_goes_on_with_its_snapshot_or_ends_with_its_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a worker has to do is wait for the learner."""
    with HTSVecEnv([WalkEnv] * 4, n_workers=2) as env:
        model = HTSPPO("MlpPolicy", env, n_steps=8, n_snapshots=2, batch_size=32, device="cpu", inference="central")
        status = env.workforce.pool.status
        held = []

        def train(_: PPO) -> None:
            while {status.read(worker)[0] for worker in (0, 1)} != {Activity.AWAITING_SNAPSHOT}:
                pass
            held.append(env.workforce.phase)
            if len(held) == 3:
                raise ValueError("no luck in train")

        monkeypatch.setattr(PPO, "train", train)
        with pytest.raises(ValueError, match="no luck in train"):
            model.learn(1000)
        assert len(held) == 3
        # It stopped where the snapshot was missing
        assert env.get_attr("n_steps") == [3 * 8 + 4] * 4


def test_idle_actors_use_no_processor_time() -> None:
    """They sleep, and are not woken, while the learner trains."""
    with HTSVecEnv([WalkEnv] * 2) as env:
        model = HTSPPO("MlpPolicy", env, n_steps=8, batch_size=16, device="cpu", inference="central", n_actors=2).learn(32)
        processes = [psutil.Process(pid) for pid in (*actors_of(env), *env.workforce.pool.pids)]

        def wake_ups() -> list[int]:
            return [process.num_ctx_switches().voluntary for process in processes]

        while any(process.status() != psutil.STATUS_SLEEPING for process in processes):
            pass
        before, times = wake_ups(), [sum(process.cpu_times()[:2]) for process in processes]
        threading.Event().wait(0.5)
        assert [sum(process.cpu_times()[:2]) for process in processes] == times
        assert sum(wake_ups()) - sum(before) <= len(processes)
        model.learn(32)


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_tokens_come_in_order_and_once() -> None:
    queue = TokenQueue()
    for number in (3, 0, 70_000, 5):
        queue.put(number)
    assert queue.take(1) == [3]
    assert queue.take() == [0, 70_000, 5]
    taken: list[int] = []

    def take() -> None:
        while (tokens := queue.take(most=2))[-1] >= 0:
            taken.extend(tokens)
        taken.extend(tokens[:-1])
        queue.put(-1)

    takers = [threading.Thread(target=take) for _ in range(3)]
    for taker in takers:
        taker.start()
    for number in range(3000):
        queue.put(number)
    queue.put(-1)
    for taker in takers:
        taker.join()
    assert sorted(taken) == list(range(3000))
    queue.close()


def test_waiting_for_tokens_ends_with_other_news() -> None:
    queue = TokenQueue()
    ours, theirs = Pipe()
    theirs.send_bytes(b"news")
    assert queue.take(beside=ours) == []
    queue.put(1)
    assert queue.take(beside=ours) == [1]
    for end in (ours, theirs):
        end.close()
    queue.close()


def test_a_queue_closes_its_descriptors() -> None:
    before = psutil.Process().num_fds()
    for _ in range(3):
        TokenQueue()
    assert psutil.Process().num_fds() == before


# --- other devices --------------------------------------------------------------------------------------------------


def refuse(*_: object) -> bytes:
    raise RuntimeError("no such memory here")


@pytest.mark.parametrize("dumps", [None, refuse, lambda slots: b"not a pickle"], ids=["shared", "not shared", "not opened"])
@pytest.mark.parametrize("n_actors", [1, 2])
def test_parameters_from_device_to_device(
    dumps: Callable[[object], bytes] | None, n_actors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or through shared memory where either side cannot; here the device is the CPU."""
    published = []

    class Spy(Publisher):
        def __init__(self, tensors: Any, slots: Any, versions: Any) -> None:
            super().__init__(tensors, slots, versions)
            published.append(slots)

    def offer(slots: th.Tensor) -> bytes:
        data = bytes((dumps or ForkingPickler.dumps)(slots))
        slots[...] = 255  # nobody acts with what has not been published
        return data

    def choose(*args: Any) -> Central | None:
        central = inference.choose(*args)
        return central and replace(central, direct=True)

    monkeypatch.setattr("sb3_hts.worker_collector.ForkingPickler", SimpleNamespace(dumps=offer))
    monkeypatch.setattr("sb3_hts.algorithm.choose", choose)
    monkeypatch.setattr("sb3_hts.worker_collector.Publisher", Spy)
    assert_equal_to_oracle(
        HTSPPO,
        n_snapshots=4,
        correction="proximal",
        env_class=JITTERY,
        central={"inference": "central", "n_actors": n_actors},
        **PPO_KWARGS,
    )
    assert len(published) == (2 if dumps is None else 1)


def test_a_device_that_cannot_be_shared_is_not_asked_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is offered and not taken stays there."""
    offers: list[th.Tensor] = []

    def offer(slots: th.Tensor) -> bytes:
        offers.append(slots)
        return b"not a pickle"

    monkeypatch.setattr("sb3_hts.worker_collector.ForkingPickler", SimpleNamespace(dumps=offer))
    monkeypatch.setattr("sb3_hts.algorithm.choose", lambda *_: Central(2, th.device("cpu"), full_batch=True, direct=True))
    with HTSVecEnv([WalkEnv] * 2) as env:
        model = HTSA2C("MlpPolicy", env, device="cpu", verbose=1)
        for _ in range(2):
            model.learn(20)
    assert len(offers) == 2
    assert capsys.readouterr().out.count("parameters not from device to device (UnpicklingError") == 2


needs_cuda = pytest.mark.skipif(not th.cuda.is_available(), reason="no CUDA device")


@needs_cuda
@pytest.mark.parametrize("batch", ["full", "group"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_acting_on_a_gpu(batch: str, device: str) -> None:
    """Twice the same, whatever the number of actors."""
    results = []
    for n_actors in (1, 2):
        with HTSVecEnv([JITTERY] * 4) as env:
            model = HTSPPO(
                "MlpPolicy",
                env,
                n_steps=8,
                batch_size=16,
                seed=1,
                device=device,
                inference="central",
                actor_device="cuda",
                n_actors=n_actors,
                central_batch=batch,
            )
            model.learn(4 * 32)
            results.append([parameter.detach().cpu() for parameter in model.policy.parameters()])
    assert all(th.equal(*pair) for pair in zip(*results, strict=True))


@needs_cuda
def test_a_policy_on_a_gpu_has_actors_there(capsys: pytest.CaptureFixture[str]) -> None:
    with HTSVecEnv([WalkEnv] * 2) as env:
        HTSA2C("MlpPolicy", env, device="cuda", verbose=1).learn(20)
    assert "inference central (1 actor on cuda:0, full batches)" in capsys.readouterr().out
