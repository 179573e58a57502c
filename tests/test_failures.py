"""Promise 4: nothing hangs, nothing leaks, and the error says which environment did what."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch as th
from envs import FaultyEnv, NotingCloseEnv, UnpicklableInfoEnv, WalkEnv
from stable_baselines3 import PPO

from sb3_hts import HTSA2C, HTSPPO, ClosedError, HTSVecEnv, WorkerDied, WorkerError, WorkerRaised, WorkerTimeout
from sb3_hts.interrupts import shielded
from sb3_hts.protocol import Activity

either_inference = pytest.mark.usefixtures("inference")
ERRORS = {"raise": WorkerRaised, "unpicklable": WorkerRaised, "exit": WorkerDied, "sigkill": WorkerDied, "hang": WorkerTimeout}


def faulty(place: str, how: str, at: int = 1) -> list[Any]:
    return [WalkEnv, WalkEnv, partial(FaultyEnv, place, how, at), WalkEnv]


def check(error: WorkerError, place: str, how: str) -> None:
    assert type(error) is ERRORS[how]
    assert error.env_index == 2
    message = str(error)
    assert "Environment 2 (of worker" in message
    assert {"construct": "constructing", "reset": "in reset()", "step": "in step()"}[place] in message
    match how:
        case "raise":
            assert isinstance(error.__cause__, ValueError)
            assert f"no luck in {place}" in str(error.__cause__)
            assert "_maybe_fail" in message, "the worker's traceback"
        case "unpicklable":
            assert f"no luck in {place}" in message
        case "exit":
            assert isinstance(error, WorkerDied)
            assert error.exit_code == 3
            assert "exited with code 3" in message
        case "sigkill":
            assert "was killed by SIGKILL" in message
        case "hang":
            assert "no progress for 1.5 s (step_timeout)" in message


def use_in_lockstep(env: HTSVecEnv) -> None:
    env.reset()
    for _ in range(30):
        env.step(np.zeros(4, int))


@pytest.mark.parametrize("how", list(ERRORS))
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_failure_in_the_constructor(how: str, start_method: str) -> None:
    with pytest.raises(WorkerError) as caught:
        HTSVecEnv(faulty("construct", how), start_method=start_method, step_timeout=1.5)
    check(caught.value, "construct", how)


@pytest.mark.parametrize("how", list(ERRORS))
@pytest.mark.parametrize(("place", "at"), [("reset", 1), ("reset", 2), ("step", 3)])
@pytest.mark.parametrize("layout", [{}, {"n_workers": 2}, {"envs_per_group": 4}], ids=["single", "shared", "group"])
def test_failure_in_lockstep_use(place: str, at: int, how: str, layout: dict[str, int]) -> None:
    env = HTSVecEnv(faulty(place, how, at), step_timeout=1.5, **layout)  # type: ignore[arg-type]
    with pytest.raises(WorkerError) as caught:
        use_in_lockstep(env)
    check(caught.value, place, how)
    with pytest.raises(ClosedError, match="shut down after a failure: Environment 2"):
        env.reset()
    env.close()


@either_inference
@pytest.mark.parametrize("how", list(ERRORS))
@pytest.mark.parametrize(("place", "at"), [("step", 1), ("step", 21), ("reset", 3)])
@pytest.mark.parametrize("algorithm", [HTSPPO, HTSA2C])
def test_failure_in_training(tmp_path: Path, algorithm: Any, place: str, at: int, how: str) -> None:
    env = HTSVecEnv(faulty(place, how, at), step_timeout=1.5)
    model = algorithm("MlpPolicy", env, n_steps=8, device="cpu")
    with pytest.raises(WorkerError) as caught:
        model.learn(10_000)
    check(caught.value, place, how)
    model.save(tmp_path / "model")
    with HTSVecEnv([WalkEnv] * 4) as fresh:
        loaded = algorithm.load(tmp_path / "model", env=fresh)
        loaded.learn(64, reset_num_timesteps=False)
        assert loaded.num_timesteps == model.num_timesteps + 64


@either_inference
@pytest.mark.parametrize("how", ["raise", "exit", "sigkill"])
def test_a_failure_shows_even_if_an_earlier_worker_hangs(how: str) -> None:
    env_fns = [partial(FaultyEnv, "step", "hang", 20), WalkEnv, partial(FaultyEnv, "step", how, 20), WalkEnv]
    env = HTSVecEnv(env_fns)
    with pytest.raises(WorkerError) as caught:
        HTSPPO("MlpPolicy", env, n_steps=8, device="cpu").learn(10_000)
    check(caught.value, "step", how)
    env = HTSVecEnv(env_fns)
    with pytest.raises(WorkerError) as caught:
        use_in_lockstep(env)
    check(caught.value, "step", how)


@either_inference
def test_a_cancelled_rollout_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sb3_hts.workforce.CANCEL_TIMEOUT", 0.5)
    env = HTSVecEnv(faulty("step", "hang", at=9))
    model = HTSPPO("MlpPolicy", env, n_steps=8, device="cpu")

    def train() -> None:
        while env.workforce.pool.status.read(2)[0] is not Activity.STEPPING:
            pass
        raise ValueError("no luck in train")

    monkeypatch.setattr(model, "train", train)
    with pytest.raises(ValueError, match="no luck in train"):
        model.learn(10_000)
    with pytest.raises(
        ClosedError, match=r"Environment 2 .*no progress for 0.5 s \(after the rollout was cancelled\) while in step"
    ):
        env.reset()


def test_a_worker_that_stands_still_between_requests() -> None:
    env = HTSVecEnv([WalkEnv] * 2, step_timeout=0.5)
    os.kill(env.workforce.pool.pids[1], signal.SIGSTOP)
    with pytest.raises(WorkerTimeout, match=r"orker 1\)?: no progress for 0\.5 s"):
        env.get_attr("speed")


def test_start_up_is_not_a_step() -> None:
    """Importing torch takes longer than this timeout."""
    with HTSVecEnv([WalkEnv], start_method="spawn", step_timeout=0.7) as env:
        env.reset()


@either_inference
@pytest.mark.parametrize("place", ["reset", "step"])
@pytest.mark.parametrize("layout", [{}, {"n_workers": 1}, {"envs_per_group": 4}], ids=["single", "shared", "group"])
def test_infos_that_cannot_be_sent_are_blamed_on_their_environment(place: str, layout: dict[str, int]) -> None:
    env_fns = [WalkEnv, partial(UnpicklableInfoEnv, place), WalkEnv, WalkEnv]
    message = r"Environment 1 .* failed serialising its info dict"
    with HTSVecEnv(env_fns, **layout) as env, pytest.raises(WorkerRaised, match=message):
        use_in_lockstep(env)
    with HTSVecEnv(env_fns, **layout) as env, pytest.raises(WorkerRaised, match=message):
        HTSA2C("MlpPolicy", env, device="cpu").learn(1000)


@either_inference
def test_a_failure_that_another_thread_sees_first(monkeypatch: pytest.MonkeyPatch) -> None:
    env = HTSVecEnv(faulty("step", "exit", at=12))
    model = HTSPPO("MlpPolicy", env, n_steps=8, n_snapshots=1, device="cpu")
    seen: list[BaseException] = []

    def ask() -> None:
        try:
            env.get_attr("speed")
        except WorkerDied as error:
            seen.append(error)

    def train(_: PPO) -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    monkeypatch.setattr(PPO, "train", train)
    with pytest.raises(WorkerDied) as caught:
        model.learn(10_000)
    assert seen == [caught.value]


def test_an_environment_cannot_end_the_program() -> None:
    with HTSVecEnv([WalkEnv] * 2) as env:
        with pytest.raises(WorkerRaised, match=r"Environment 1 .* failed answering a call: SystemExit: 3"):
            env.env_method("leave", indices=[1])
        assert env.get_attr("speed") == [1.0, 1.0]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_every_environment_is_closed_whatever_the_others_do(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "closed"
    HTSVecEnv([partial(NotingCloseEnv, str(path), error)] * 3, n_workers=1, envs_per_group=1).close()
    assert path.read_text() == "closed\n" * 3


def test_failure_while_closing_does_not_matter() -> None:
    for how in ("raise", "exit", "sigkill"):
        env = HTSVecEnv(faulty("close", how))
        env.reset()
        env.close()


def test_close_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sb3_hts.pool.CLOSE_TIMEOUT", 0.2)
    env = HTSVecEnv(faulty("close", "hang"))
    env.reset()
    env.close()


@either_inference
def test_policy_that_fails_while_acting() -> None:
    with HTSVecEnv([WalkEnv] * 2) as env:
        model = HTSA2C("MlpPolicy", env, device="cpu")
        model.policy.action_net.weight.data.fill_(float("nan"))
        with pytest.raises(WorkerRaised, match="computing actions"):
            model.learn(10)


@either_inference
def test_a_worker_killed_from_outside_during_training() -> None:
    env = HTSVecEnv([WalkEnv] * 4)
    victim = env.workforce.pool.pids[1]
    model = HTSPPO("MlpPolicy", env, n_steps=8, batch_size=16, device="cpu")

    def kill(*_: Any) -> bool:
        if model.num_timesteps >= 64:
            os.kill(victim, signal.SIGKILL)
        return True

    with pytest.raises(WorkerDied, match="killed by SIGKILL"):
        model.learn(10_000, kill)  # type: ignore[arg-type]


@either_inference
def test_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor, mapping, thread or child, after use, failure and garbage collection."""

    def resources() -> tuple[int, int, int, int]:
        gc.collect()
        me = psutil.Process()
        mappings = sum("memfd:sb3_hts" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return me.num_fds(), mappings, threading.active_count(), len(me.children(recursive=True))

    def use(how: str) -> None:
        env = HTSVecEnv(faulty("step", "raise", 1000 if how != "fail" else 5), envs_per_group=2)
        model = HTSPPO("MlpPolicy", env, n_steps=8, batch_size=16, device="cpu")
        try:
            model.learn(96)
        except WorkerRaised:
            assert how == "fail"
        if how != "collect":
            env.close()

    use("close")
    before = resources()
    for how in ("close", "fail", "collect") * 2:
        use(how)
        assert resources() == before, how
    assert not [name for name in os.listdir("/dev/shm") if "sb3" in name]


@either_inference
def test_interrupts_at_any_moment() -> None:
    """SIGINT at varied moments of a run: one KeyboardInterrupt, and the same environments and model go on."""
    with HTSVecEnv([partial(WalkEnv, jitter=0.002)] * 4, envs_per_group=2) as env:
        model = HTSPPO("MlpPolicy", env, n_steps=8, batch_size=16, n_epochs=2, device="cpu")
        interrupted = 0
        for attempt in range(25):
            timer = threading.Timer(0.013 * attempt, os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                model.learn(100_000, reset_num_timesteps=attempt == 0)
            except KeyboardInterrupt:
                interrupted += 1
            timer.join()
            assert model._run is None
            assert env.get_attr("speed") == [1.0] * 4
        assert interrupted == 25
        before = model.num_timesteps
        model.learn(64, reset_num_timesteps=False)
        assert model.num_timesteps == before + 64


@either_inference
def test_after_a_cancellation_the_model_knows_where_the_environments_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with HTSVecEnv([partial(WalkEnv, jitter=0.001)] * 4, n_workers=2) as env:
        model = HTSPPO("MlpPolicy", env, n_steps=8, n_snapshots=1, device="cpu")

        def train(_: PPO) -> None:
            # Somewhere in the middle of the next rollout
            before = env.workforce.pool.status.read(0)[2]
            while env.workforce.pool.status.read(0)[2] < before + 9:
                pass
            raise ValueError("no luck in train")

        monkeypatch.setattr(PPO, "train", train)
        for _ in range(10):
            with pytest.raises(ValueError, match="no luck in train"):
                model.learn(1000, reset_num_timesteps=False)
            assert (np.array(env.get_attr("n_since_reset")) == 0).tolist() == model._last_episode_starts.tolist()  # type: ignore[union-attr]
            expected = [np.sin(position + np.arange(3) / 3) for position in env.get_attr("position")]
            np.testing.assert_allclose(model._last_obs, expected, rtol=1e-6)  # type: ignore[arg-type]


def test_gradients_are_on_again_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(_: PPO) -> None:
        th.set_grad_enabled(False)
        raise KeyboardInterrupt

    monkeypatch.setattr(PPO, "train", train)
    with HTSVecEnv([WalkEnv]) as env, pytest.raises(KeyboardInterrupt):
        HTSPPO("MlpPolicy", env, n_steps=8, batch_size=8, device="cpu").learn(100)
    assert th.is_grad_enabled()


def test_the_shield_puts_an_interrupt_off() -> None:
    reached = []

    def work() -> None:
        with shielded:
            with shielded:
                os.kill(os.getpid(), signal.SIGINT)
            reached.append("the end of the outer block")
        reached.append("what follows")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["the end of the outer block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_shield_puts_every_handler_off() -> None:
    """In the order in which the signals came, and if the first one raises the others are not lost."""
    heard = []

    def terminate(number: int, _: Any) -> None:
        heard.append(number)
        raise SystemExit

    def note(number: int, _: Any) -> None:
        heard.append(number)

    def work() -> None:
        with shielded:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert heard == []

    previous = signal.signal(signal.SIGTERM, terminate), signal.signal(signal.SIGUSR1, note)
    try:
        with pytest.raises(SystemExit):
            work()
        assert heard == [signal.SIGTERM, signal.SIGUSR1]
        assert signal.getsignal(signal.SIGTERM) is terminate
    finally:
        signal.signal(signal.SIGTERM, previous[0])
        signal.signal(signal.SIGUSR1, previous[1])


def run_script(script: str, *args: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], input=textwrap.dedent(script), capture_output=True, text=True, timeout=100, **kwargs
    )


SCRIPT = """
    import gymnasium as gym
    import numpy as np
    import torch as th
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from sb3_hts import HTSPPO, HTSVecEnv

    print("main module runs")

    class MyEnv(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

        def step(self, action):
            return self.np_random.uniform(-1, 1, 3).astype(np.float32), 1.0, self.np_random.random() < 0.1, False, {}

    class MyExtractor(BaseFeaturesExtractor):
        def __init__(self, space):
            super().__init__(space, 4)
            self.net = th.nn.Linear(3, 4)

        def forward(self, obs):
            return self.net(obs)

"""
TRAINING = """
    env = HTSVecEnv([MyEnv] * 2, start_method=START_METHOD)
    model = HTSPPO("MlpPolicy", env, n_steps=16, batch_size=16, policy_kwargs=dict(features_extractor_class=MyExtractor))
    model.learn(96)
    print(model.num_timesteps, "steps")
"""


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize("source", ["file", "stdin"])
def test_scripts_need_no_main_guard_and_may_forget_to_close(tmp_path: Path, source: str, start_method: str) -> None:
    script = (SCRIPT + TRAINING).replace("START_METHOD", repr(start_method))
    if source == "file":
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        result = run_script("", str(tmp_path / "script.py"))
    else:
        result = run_script(script, "-")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "main module runs\n96 steps\n"
    assert "Error" not in result.stderr


def test_processes_of_a_pool_can_train(tmp_path: Path) -> None:
    """As hyperparameter searches do; the main module has another name there."""
    train = textwrap.indent(textwrap.dedent(TRAINING).replace("START_METHOD", "None"), "    ")
    pool = """
        if __name__ == "__main__":
            import multiprocessing
            from concurrent.futures import ProcessPoolExecutor

            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
                executor.submit(train).result()
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT) + f"def train():\n{train}" + textwrap.dedent(pool))
    result = run_script("", str(tmp_path / "script.py"))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "main module runs\nmain module runs\n96 steps\n"


@pytest.mark.parametrize(
    "error", [WorkerRaised("a", 1, 2), WorkerDied("b", 3, None, -9), WorkerTimeout("c", 0), ClosedError("d")]
)
def test_errors_can_leave_the_process(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("busy", [False, True])
def test_workers_end_with_a_killed_main_process(busy: bool) -> None:
    """Also one whose environment never returns, and so cannot notice the end of its pipe."""
    script = f"""
        import os, signal
        from functools import partial
        import numpy as np
        from envs import FaultyEnv, WalkEnv
        from sb3_hts import HTSA2C, HTSVecEnv
        from sb3_hts.protocol import Activity

        env = HTSVecEnv([WalkEnv, partial(FaultyEnv, "step", "hang", 1 if {busy} else 10**9), WalkEnv])
        print(*env.workforce.pool.pids, flush=True)
        if {busy}:
            env.reset()
            env.step_async(np.zeros(3, int))
            while env.workforce.pool.status.read(1)[0] is not Activity.STEPPING:
                pass

        def kill(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        kill() if {busy} else HTSA2C("MlpPolicy", env, device="cpu").learn(1000, kill)
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    result = run_script(script, "-", env=environment)
    assert result.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 3
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=5)
    assert not alive
