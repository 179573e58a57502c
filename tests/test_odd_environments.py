"""Environments that do what environments rarely do, and may do under ``DummyVecEnv`` or ``SubprocVecEnv``."""

from __future__ import annotations

import collections
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch as th
from envs import WalkEnv
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from sb3_hts import HTSA2C, HTSPPO, HTSVecEnv, WorkerDied, WorkerRaised

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
START_METHODS = ["forkserver", "spawn", "fork"]
BOX = partial(spaces.Box, -1, 1, (3,), np.float32)
EnvFn = Callable[[], gym.Env[Any, Any]]


class OddEnv(WalkEnv):
    """Calls the functions it is given: ``construct``, ``reset``, ``step`` and ``close`` before what they are named after,
    ``observe`` for the observation, ``outcome`` with what ``step`` returns."""

    def __init__(self, observation_space: Any = None, action_space: Any = None, **hooks: Callable[..., Any]) -> None:
        super().__init__(observation_space, action_space)
        self.hooks = hooks
        self._call("construct")

    def _call(self, name: str) -> None:
        self.hooks.get(name, lambda env: None)(self)

    def _observation(self) -> Any:
        return self.hooks["observe"](self) if "observe" in self.hooks else super()._observation()

    def reset(self, **kwargs: Any) -> Any:
        self._call("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._call("step")
        return self.hooks.get("outcome", lambda *outcome: outcome)(*super().step(action))

    def close(self) -> None:
        self._call("close")


def odd(*args: Any, **hooks: Callable[..., Any]) -> EnvFn:
    return partial(OddEnv, *args, **hooks)


def note(path: Path, what: object) -> None:
    with open(path, "a") as file:
        file.write(f"{what}\n")


def trained(env: VecEnv | str, algorithm: Any = HTSA2C, seed: int = 0, **kwargs: Any) -> Any:
    """A model after three rollouts of 16 steps."""
    extra = {"batch_size": 16, "n_epochs": 2} if algorithm is HTSPPO else {}
    model = algorithm("MlpPolicy", env, n_steps=16, seed=seed, device="cpu", **extra, **kwargs)
    return model.learn(3 * 16 * model.n_envs)


def result(env_fns: list[EnvFn], layout: dict[str, int], **kwargs: Any) -> list[Any]:
    with HTSVecEnv(env_fns, **layout) as env:  # type: ignore[arg-type]
        model = trained(env, **kwargs)
        # In lockstep, too
        after = env.step(np.zeros((len(env_fns), *env.action_space.shape), int))[0]  # type: ignore[misc]
        return [*(value.numpy() for value in model.policy.state_dict().values()), model._last_obs, after]


def assert_side_by_side(env_fns: list[EnvFn], n_steps: int, **layout: int) -> None:
    theirs = DummyVecEnv(env_fns)
    with HTSVecEnv(env_fns, **layout) as ours:  # type: ignore[arg-type]
        assert ours.seed(11) == theirs.seed(11)
        np.testing.assert_equal(ours.reset(), theirs.reset())
        for step in range(n_steps):
            actions = np.full(len(env_fns), step % 3)
            got, expected = ours.step(actions), theirs.step(actions)
            np.testing.assert_equal(got[:3], expected[:3])
            np.testing.assert_equal([dict(info) for info in got[3]], [dict(info) for info in expected[3]])
            assert [type(info) for info in got[3]] == [type(info) for info in expected[3]]


# --- randomness -------------------------------------------------------------------------------------------------------

SHARED = BOX()


def draw_from_process(env: gym.Env[Any, Any]) -> Any:
    return np.array([random.random(), np.random.random(), float(th.rand(()))], np.float32)


DRAWING: dict[str, EnvFn] = {
    "process": odd(observe=draw_from_process),
    "action_space": odd(observe=lambda env: np.full(3, env.action_space.sample(), np.float32)),
    "observation_space": odd(observe=lambda env: env.observation_space.sample()),
    # One generator for all environments of a process, as of a space that belongs to the class
    "shared_space": lambda: OddEnv(SHARED, observe=lambda env: env.observation_space.sample()),
    # From outside, the space that the environment draws from cannot be seen
    "inner_space": lambda: gym.wrappers.RescaleAction(
        OddEnv(None, BOX(), observe=lambda env: env.action_space.sample()), np.float32(0), np.float32(2)
    ),
}


@pytest.mark.parametrize("source", list(DRAWING))
def test_the_seed_of_the_algorithm_alone_makes_runs_repeat(source: str) -> None:
    """Whichever of the environments share a process; HTSA2C and the process-wide generators are in test_determinism."""
    run = partial(result, [DRAWING[source]] * 4, algorithm=HTSPPO if source == "process" else HTSA2C)
    reference = run({"n_workers": 4})
    for n_workers in (4, 2, 1):
        np.testing.assert_equal(run({"n_workers": n_workers}), reference)
    assert not np.array_equal(run({"n_workers": 1}, seed=1)[-1], reference[-1])


class ThreadsExtractor(BaseFeaturesExtractor):
    """Its features say how many threads torch has, as the last bits of large networks' do."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__(space, 4)

    def forward(self, obs: th.Tensor) -> th.Tensor:
        return th.cat([obs, th.full_like(obs[:, :1], th.get_num_threads())], dim=1)


def test_environments_cannot_change_the_number_of_threads_of_the_policy() -> None:
    run = partial(result, policy_kwargs={"features_extractor_class": ThreadsExtractor})
    reference = run([WalkEnv, WalkEnv], {"n_workers": 2})
    for n_workers in (1, 2):
        got = run([odd(reset=lambda env: th.set_num_threads(3)), WalkEnv], {"n_workers": n_workers})
        np.testing.assert_equal(got, reference)


# --- registration and construction ------------------------------------------------------------------------------------

SCRIPT = """
    import multiprocessing, os, sys
    import gymnasium as gym
    import numpy as np
    from stable_baselines3.common.env_util import make_vec_env
    from sb3_hts import HTSPPO, HTSVecEnv
    from sb3_hts.processes import ForkServerLease

    class Env(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            sys.stdout.write("reset in the script\\n" if os.getpid() == SCRIPT_PID else "reset in a worker\\n")
            return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

        def step(self, action):
            return self.np_random.uniform(-1, 1, 3).astype(np.float32), 1.0, False, False, {}

    class Wrapper(gym.Wrapper):
        pass

    def answer(connection):
        connection.send("answer")

    class ParentEnv(Env):
        # Lets a function of the script run in a process of its own

        def reset(self, **kwargs):
            ours, theirs = multiprocessing.Pipe()
            child = multiprocessing.Process(target=answer, args=(theirs,))
            child.start()
            assert ours.recv() == "answer"
            child.join()
            return super().reset(**kwargs)

    SCRIPT_PID = os.getpid()
    lease = ForkServerLease()  # one for all, to save time
    gym.register("Class-v0", Env)
    gym.register("Lambda-v0", lambda **kwargs: Env(**kwargs))
    gym.register("String-v0", "__main__:Env")
    gym.register("Wrapped-v0", Env, additional_wrappers=(gym.envs.registration.WrapperSpec("W", "__main__:Wrapper", {}),))
    gym.register("Parent-v0", ParentEnv)

    for name in ("Class", "Lambda", "String", "Wrapped", "Parent"):
        for by_name in (True, False):
            try:
                env = f"{name}-v0" if by_name else make_vec_env(f"{name}-v0", 2, vec_env_cls=HTSVecEnv)
                kwargs = dict(n_envs=2) if by_name else {}
                model = HTSPPO("MlpPolicy", env, n_steps=4, batch_size=4, n_epochs=1, device="cpu", **kwargs).learn(16)
                model.env.close()
                print(name, by_name, "works")
            except Exception as error:
                print(name, by_name, str(error))
"""


@pytest.fixture(scope="module")
def script_output(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("odd") / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("name", ["Class", "Lambda", "String", "Wrapped", "Parent"])
def test_registered_in_the_main_module_only(script_output: str, name: str, by_name: bool) -> None:
    assert f"{name} {by_name} works" in script_output


def test_what_environments_print_is_not_lost(script_output: str) -> None:
    assert script_output.count("reset in a worker") >= 8
    assert "reset in the script" not in script_output


class OnlyOneEnv(WalkEnv):
    """Notes the process that it is constructed in, which must not have one already."""

    n_constructed = 0

    def __init__(self, path: Path, **_: Any) -> None:
        super().__init__()
        OnlyOneEnv.n_constructed += 1
        note(path, os.getpid())
        if OnlyOneEnv.n_constructed > 1:
            raise RuntimeError("there is one already")


@pytest.fixture
def registered() -> Iterator[Callable[..., str]]:
    """Registers an environment until the end of the test."""
    name = "Odd-v0"

    def register(entry_point: Any, **kwargs: Any) -> str:
        gym.register(name, entry_point, kwargs=kwargs, disable_env_checker=True)
        return name

    yield register
    del gym.registry[name]


def test_one_environment_per_process_and_none_in_the_parent(tmp_path: Path, registered: Callable[..., str]) -> None:
    path = tmp_path / "pids"
    name = registered(OnlyOneEnv, path=path)
    for make in (
        partial(make_vec_env, name, 3, vec_env_cls=HTSVecEnv),  # type: ignore[arg-type]
        partial(HTSVecEnv, [partial(OnlyOneEnv, path)] * 3, start_method="fork"),
    ):
        with make() as env:  # type: ignore[attr-defined]
            trained(env, HTSPPO).save(tmp_path / "model")
            HTSPPO.load(tmp_path / "model", env=env).learn(48, reset_num_timesteps=False)
    trained(name, HTSPPO, n_envs=3).env.close()
    pids = path.read_text().split()
    assert len(set(pids)) == len(pids) == 9
    assert str(os.getpid()) not in pids


@pytest.mark.parametrize("layout", [{"n_workers": 1}, {"envs_per_group": 2}])
def test_the_one_that_cannot_be_constructed_is_named(tmp_path: Path, layout: dict[str, int]) -> None:
    with pytest.raises(WorkerRaised, match=r"Environment 1 .*there is one already"):
        HTSVecEnv([partial(OnlyOneEnv, tmp_path / "pids")] * 2, **layout)  # type: ignore[arg-type]
    with pytest.raises(WorkerRaised, match=r"Environment 0 .*observation_space"):
        HTSVecEnv([odd(construct=lambda env: delattr(env, "observation_space")), WalkEnv], **layout)  # type: ignore[arg-type]


# --- slow and large ---------------------------------------------------------------------------------------------------


def wait_for_others(path: Path, env: WalkEnv) -> None:
    """Once, in the second ``reset``: until others have made the 16 steps of a whole rollout."""
    deadline = time.monotonic() + 20
    while env.n_resets == 1 and (not path.exists() or path.stat().st_size < 16):
        assert time.monotonic() < deadline, "the others do not go on"


@pytest.mark.parametrize("layout", [{"n_workers": 2}, {"envs_per_group": 2}])
def test_a_long_reset_does_not_hold_other_groups_up(tmp_path: Path, layout: dict[str, int]) -> None:
    path, size = tmp_path / "steps", layout.get("envs_per_group", 1)
    env_fns = [odd(reset=partial(wait_for_others, path))] * size + [odd(step=lambda env: note(path, ""))] * size
    with HTSVecEnv(env_fns, **layout) as env:  # type: ignore[arg-type]
        trained(env)
        assert env.get_attr("n_steps") == [48] * 2 * size


@pytest.mark.parametrize("envs_per_group", [1, 6])
def test_step_timeout_is_not_for_all_resets_together(envs_per_group: int) -> None:
    env_fns = [odd(reset=lambda env: time.sleep(0.2))] * 6
    with HTSVecEnv(env_fns, n_workers=1, envs_per_group=envs_per_group, step_timeout=1.0) as env:
        env.reset()


class CornerExtractor(BaseFeaturesExtractor):
    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__(space, 2)

    def forward(self, obs: Any) -> th.Tensor:
        return obs["huge"][:, -1, -1, -2:].float()


def test_huge_observations() -> None:
    """8 MB each, full of the number of steps so far."""
    huge = spaces.Box(0, 255, (8, 1024, 1024), np.uint8)

    def image(env: WalkEnv) -> Any:
        return np.full((8, 1024, 1024), 10 * env.n_resets + env.n_since_reset, np.uint8)

    def both(env: WalkEnv) -> Any:
        return {"huge": image(env), "tiny": 10 * env.n_resets + env.n_since_reset}

    assert_side_by_side([odd(huge, observe=image)] * 2, n_steps=3)
    with HTSVecEnv([odd(spaces.Dict(huge=huge, tiny=spaces.Discrete(99)), observe=both)] * 2) as env:
        kwargs = {"features_extractor_class": CornerExtractor, "normalize_images": False}
        model = HTSA2C("MultiInputPolicy", env, n_steps=4, device="cpu", policy_kwargs=kwargs).learn(16)
    observations: Any = model.rollout_buffer.observations
    assert len(set(observations["tiny"].flat)) >= 4
    assert (observations["huge"].reshape(8, -1) == observations["tiny"].reshape(8, 1)).all()


# --- processes, threads and signals of their own ----------------------------------------------------------------------


def echo(connection: Any, other_end: Any) -> None:
    other_end.close()  # or it would never see the end of its parent
    with suppress(EOFError):
        while True:
            connection.send(connection.recv())


class ParentEnv(WalkEnv):
    """Lets a process of its own do the work, and never ends it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        fork, spawn = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
        self.ask: Callable[[float], float]
        match kind:
            case "popen":
                self.cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
                self.ask = lambda number: (print(number, file=self.cat.stdin), float(self.cat.stdout.readline()))[1]  # type: ignore
            case "process":
                ours, theirs = fork.Pipe()
                self.child = fork.Process(target=echo, args=(theirs, ours), daemon=True)
                self.child.start()
                theirs.close()
                self.ask = lambda number: (ours.send(number), ours.recv())[1]  # type: ignore[func-returns-value]
            case "pool":
                self.pool = spawn.Pool(1)
                self.ask = lambda number: self.pool.apply(float, (number,))

    def _observation(self) -> Any:
        return np.full(3, self.ask(float(np.sin(self.position))), np.float32)


def family(env: HTSVecEnv) -> list[psutil.Process]:
    workers = [psutil.Process(pid) for pid in env.workforce.pool.pids]
    return workers + [child for worker in workers for child in worker.children(recursive=True)]


def is_alive(process: psutil.Process) -> bool:
    """Not so if it waits to be reaped by whoever has inherited it, who may be in no hurry."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def assert_all_end(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(map(is_alive, processes)):
        time.sleep(0.02)
    assert not list(filter(is_alive, processes))


@pytest.mark.parametrize("start_method", START_METHODS)
def test_environments_with_processes_of_their_own(start_method: str) -> None:
    env_fns = [partial(ParentEnv, kind) for kind in ("popen", "process", "pool")]
    with HTSVecEnv(env_fns, n_workers=1, start_method=start_method) as env:
        model = trained(env)
        np.testing.assert_allclose(model._last_obs[:, 0], np.sin(env.get_attr("position")), rtol=1e-6)
        processes = family(env)
        assert len(processes) >= 4
    assert_all_end(processes)


@pytest.mark.parametrize("start_method", START_METHODS)
def test_processes_of_environments_end_with_a_killed_main_process(start_method: str) -> None:
    script = f"""
        import os, signal
        from functools import partial
        from sb3_hts import HTSVecEnv
        from test_odd_environments import ParentEnv, family

        env_fns = [partial(ParentEnv, kind) for kind in ("popen", "process", "pool")]
        env = HTSVecEnv(env_fns, start_method="{start_method}", n_workers=1)
        env.reset()
        print(*(process.pid for process in family(env)), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, env=environment)
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) >= 4
    assert_all_end([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)])


@pytest.mark.parametrize("start_method", START_METHODS)
def test_the_death_of_a_worker_shows_although_its_child_lives_on(tmp_path: Path, start_method: str) -> None:
    """A forked child has copies of all descriptors of its parent, also of those whose end is to tell of the parent's."""

    path = tmp_path / "child"

    def live_on() -> None:
        time.sleep(60)  # the test ends it; nothing waits for that
        note(path, "ended")

    def leave_a_child_behind(env: WalkEnv) -> None:
        child = multiprocessing.get_context("fork").Process(target=live_on)
        child.start()
        note(path, child.pid)
        os.kill(os.getpid(), signal.SIGKILL)

    env = HTSVecEnv([odd(step=leave_a_child_behind)], start_method=start_method)
    env.reset()
    with pytest.raises(WorkerDied, match=r"Environment 0 .*killed by SIGKILL while in step"):
        env.step(np.zeros(1, int))
    pid, *end = path.read_text().split()
    assert not end, "the error has waited for the end of the child"
    psutil.Process(int(pid)).kill()


def test_processes_of_environments_can_be_interrupted(tmp_path: Path) -> None:
    """As simulators want to be ended that clean up on Ctrl-C."""

    def start(env: Any) -> None:
        env.simulator = subprocess.Popen(["sleep", "20"])

    def interrupt(env: Any) -> None:
        env.simulator.send_signal(signal.SIGINT)
        try:
            note(tmp_path / "codes", env.simulator.wait(timeout=2))
        except subprocess.TimeoutExpired:
            env.simulator.kill()

    for vec_env_cls in (DummyVecEnv, HTSVecEnv):
        vec_env_cls([odd(construct=start, close=interrupt)]).close()
    assert (tmp_path / "codes").read_text().split() == [str(-signal.SIGINT)] * 2


def test_environments_may_handle_signals(tmp_path: Path) -> None:
    path, numbers = tmp_path / "signals", (signal.SIGINT, signal.SIGTERM)

    def handle(env: WalkEnv) -> None:
        for number in numbers:
            signal.signal(number, lambda number, _: note(path, number))

    before = [signal.getsignal(number) for number in numbers]
    with HTSVecEnv([odd(construct=handle)] * 2) as env:
        model = trained(env)
        for number in numbers:
            for pid in env.workforce.pool.pids:
                os.kill(pid, number)
        model.learn(96, reset_num_timesteps=False)
    assert sorted(path.read_text().split()) == ["15", "15", "2", "2"]
    assert [signal.getsignal(number) for number in numbers] == before


def test_ctrl_c_between_requests_whatever_handler_an_environment_installed(tmp_path: Path) -> None:
    """Simulators' bindings restore the default, for instance."""
    env_fn = odd(
        construct=lambda env: signal.signal(signal.SIGINT, signal.default_int_handler),
        close=lambda env: note(tmp_path / "closed", "closed"),
    )
    with HTSVecEnv([env_fn] * 2) as env:
        model = trained(env)
        for pid in env.workforce.pool.pids:
            os.kill(pid, signal.SIGINT)
        model.learn(96, reset_num_timesteps=False)
    assert (tmp_path / "closed").read_text() == "closed\n" * 2


@pytest.mark.parametrize("daemon", [True, False])
def test_environments_may_start_threads_that_never_end(daemon: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sb3_hts.pool.CLOSE_TIMEOUT", 0.5)
    with HTSVecEnv([odd(construct=lambda env: threading.Thread(target=threading.Event().wait, daemon=daemon).start())]) as env:
        trained(env)


RUDE: dict[str, Callable[[Any], Any]] = {
    "chdir": lambda env: os.chdir("/"),
    "streams": lambda env: (sys.stdout.close(), sys.stderr.close()),
    "descriptors": lambda env: os.closerange(1, 3),
}


@pytest.mark.parametrize("n_workers", [1, 2])
@pytest.mark.parametrize("how", list(RUDE))
def test_environments_may_change_what_belongs_to_their_process(tmp_path: Path, how: str, n_workers: int) -> None:
    def close(env: WalkEnv) -> None:
        note(tmp_path / "closed", "closed")
        raise ValueError("no reason not to close the others")

    folder = os.getcwd()
    got = result([odd(construct=RUDE[how], close=close)] * 2, {"n_workers": n_workers})
    np.testing.assert_equal(got, result([WalkEnv] * 2, {"n_workers": n_workers}))
    assert (tmp_path / "closed").read_text() == "closed\n" * 2
    assert os.getcwd() == folder


# --- what they return, and what they are given ------------------------------------------------------------------------


class Info(dict[str, Any]):
    """A dict with a class of its own."""


LOOSE: dict[str, dict[str, Callable[..., Any]]] = {
    "list": {"observe": lambda env: WalkEnv._observation(env).tolist()},
    "float64": {"observe": lambda env: WalkEnv._observation(env).astype(np.float64)},
    "scalars": {"outcome": lambda o, r, done, cut, i: (o, np.float64(r), np.bool_(done), np.bool_(cut), i)},
    "arrays": {"outcome": lambda o, r, done, cut, i: (o, np.array(r), np.array(done), np.array(cut), i)},
    "integers": {"outcome": lambda o, r, done, cut, i: (o, round(r), int(done), int(cut), i)},
    "truths": {"outcome": lambda o, r, done, cut, i: (o, np.bool_(r < -1), done, cut, i)},
    "info": {"outcome": lambda *outcome: (*outcome[:4], Info(outcome[4]))},
    "defaultdict": {"outcome": lambda *outcome: (*outcome[:4], collections.defaultdict(list, outcome[4]))},
    "mapping": {"outcome": lambda *outcome: (*outcome[:4], collections.UserDict(outcome[4]))},
}


@pytest.mark.parametrize("how", list(LOOSE))
def test_loose_types(how: str) -> None:
    """In one group of a worker, beside another one that is as it should be."""
    env_fns: list[EnvFn] = [odd(**LOOSE[how])] * 2 + [WalkEnv] * 2
    assert_side_by_side(env_fns, 20, n_workers=1, envs_per_group=2)
    got, usual = (result(functions, {"envs_per_group": 2}) for functions in (env_fns, [WalkEnv] * 4))
    if how not in ("integers", "truths"):  # whose rewards are others
        np.testing.assert_equal(got, usual)


class BareEnv(WalkEnv):
    """Has no metadata and no render mode."""

    metadata: Any = None
    render_mode = property(lambda self: self.no_such_thing, lambda self, value: None)  # type: ignore[assignment]


def test_missing_attributes() -> None:
    for vec_env_cls in (DummyVecEnv, HTSVecEnv):
        with pytest.warns(UserWarning, match="`render_mode` attribute is not defined"):
            env = vec_env_cls([BareEnv] * 2)
        assert (env.metadata, env.render_mode) == (None, None)
        trained(env)
        env.close()


class PaintingEnv(WalkEnv):
    metadata: Any = {"render_modes": ["rgb_array", "ansi"], "render_fps": 7}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__()
        self.render_mode = render_mode  # type: ignore[assignment]


@pytest.mark.parametrize("source", ["by name", "class", "make_vec_env"])
def test_images(registered: Callable[..., str], source: str) -> None:
    name = registered(PaintingEnv)
    envs: list[VecEnv] = []
    for vec_env_cls in (DummyVecEnv, HTSVecEnv):
        if source == "make_vec_env":  # asks for "rgb_array" by itself
            envs.append(make_vec_env(name, 3, vec_env_cls=vec_env_cls))  # type: ignore[arg-type]
        else:
            make = (
                partial(gym.make, name, render_mode="rgb_array") if source == "by name" else partial(PaintingEnv, "rgb_array")
            )
            envs.append(vec_env_cls([make] * 3))
        envs[-1].seed(2)
        envs[-1].reset()
    theirs, ours = envs
    assert ours.render_mode == theirs.render_mode == "rgb_array"
    assert ours.metadata == theirs.metadata
    np.testing.assert_array_equal(ours.render(), theirs.render())  # type: ignore[arg-type]
    np.testing.assert_array_equal(list(ours.get_images()), list(theirs.get_images()))  # type: ignore[arg-type]
    ours.close()


@pytest.mark.parametrize("mode", [None, "ansi"])
def test_render_modes_without_images(mode: str | None) -> None:
    for vec_env_cls in (DummyVecEnv, HTSVecEnv):
        env = vec_env_cls([partial(PaintingEnv, mode)] * 2)
        env.reset()
        assert env.render_mode == mode
        with pytest.warns(UserWarning, match="render mode is"):
            assert env.get_images() == [None, None]
        with pytest.warns(UserWarning, match="has to be the same as the environment render mode"):
            assert env.render("rgb_array") is None
        env.close()


@pytest.mark.parametrize("layout", [{}, {"n_workers": 1}, {"envs_per_group": 2}])
def test_render_modes_must_not_be_mixed(layout: dict[str, int]) -> None:
    with pytest.raises((AssertionError, WorkerRaised), match="render_mode mode should be the same"):
        HTSVecEnv([partial(PaintingEnv, "rgb_array"), PaintingEnv], **layout)  # type: ignore[arg-type]


class RecordingEnv(WalkEnv):
    """Tells by its reset info exactly what ``reset`` was called with."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(**kwargs)
        return observation, {**info, "called with": {**kwargs, "type": type(kwargs.get("seed")).__name__}}


def test_seeds_and_options_reach_reset_as_in_sb3() -> None:
    logs: list[list[Any]] = []
    for make in (
        DummyVecEnv,
        partial(SubprocVecEnv, start_method="fork"),
        partial(HTSVecEnv, n_workers=2),
        partial(HTSVecEnv, envs_per_group=2),
    ):
        env: VecEnv = make([RecordingEnv] * 4)  # type: ignore[operator]
        log: list[Any] = []
        for seed in (5, 2**32 + 1, 2**70, None):
            for options in ({"start": 3.0}, [{"start": float(i)} if i else {} for i in range(4)], {}, None):
                np.random.seed(0)  # seed(None) draws from there
                log.append(env.seed(seed))
                env.set_options(options)  # type: ignore[arg-type]
                # The second time there are neither seed nor options, and at the end of an episode as little
                for _ in range(2):
                    log.append([env.reset(), list(env.reset_infos)])
                for _ in range(9):
                    observations, _, dones, _ = env.step(np.ones(4, int))
                    log.append([observations, dones, list(env.reset_infos)])
        env.close()
        logs.append(log)
    for other in logs[1:]:
        np.testing.assert_equal(other, logs[0])
