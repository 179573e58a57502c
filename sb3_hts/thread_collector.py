"""The thread collector: for environments that no worker can collect for.

A thread of the main process acts with a copy of the policy and steps all environments in lockstep, as SB3's own loop would,
while the learner trains. It touches nothing of the learner's: the copy's mode, noise and exploration matrices are its own.
"""

from __future__ import annotations

import contextvars
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecEnv

from sb3_hts.collector import Collector, Infos, Job, Plan, Rollout
from sb3_hts.env_group import is_plain
from sb3_hts.interrupts import shielded
from sb3_hts.lockstep import Lockstep
from sb3_hts.randomness import DrawingFrom
from sb3_hts.replicas import PolicyTensors, Publisher, Replica, copy_policy
from sb3_hts.shared_arrays import SharedBlock, aligned
from sb3_hts.storage import RolloutStorage
from sb3_hts.vec_env import HTSVecEnv
from sb3_hts.wrappers import unwrap


@dataclass
class _Progress:
    """What has been collected of a job; the collecting thread's until its end."""

    job: Job
    launched_at: float
    steps_done: int = 0
    finished_at: float = 0.0
    infos: Infos = field(default_factory=dict)


class ThreadCollector(Collector):
    """See the module's docstring. The environments must not be used by others while a rollout is in flight; an ``HTSVecEnv``
    below an unknown wrapper makes them wait.

    :param env: Any environments.
    :param policy: The learner's policy; its parameters are read at each :meth:`start` and :meth:`publish`.
    :param plan: What to collect.
    :param background: Collect in a thread; otherwise in :meth:`wait`, in the caller's own.
    :param reason: Why the workers do not collect.
    :raises UnportablePolicyError: If the policy cannot be copied.
    """

    def __init__(self, env: VecEnv, policy: ActorCriticPolicy, plan: Plan, background: bool, reason: str) -> None:
        tensors = PolicyTensors(policy)
        slots = list(th.zeros((plan.n_slots, aligned(tensors.nbytes)), dtype=th.uint8, device=policy.device))
        self._versions = np.zeros((plan.n_slots, 2), np.int64)
        publisher = Publisher(tensors, slots, self._versions)
        super().__init__(plan, RolloutStorage(plan.layout, SharedBlock(plan.layout.nbytes)), publisher)
        wrappers, base = unwrap(env)
        make_policy = partial(copy_policy, policy, tensors, [*wrappers, base])
        generator = th.Generator(policy.device)
        how = generator.manual_seed, DrawingFrom(generator)
        self._replica = Replica(tensors.specs, slots, make_policy, plan.noise_key, *how)
        self.description = f"a thread of this process steps all environments in lockstep, because {reason}"
        self._actor = plan.manner.actor_class(self._replica, plan.manner, slice(0, env.num_envs))
        self._lockstep = Lockstep(env, self._actor.columns, self._actor)
        self._workforce = base.workforce if isinstance(base, HTSVecEnv) else None
        self._learner = threading.current_thread()
        self._collecting: threading.Thread | None = None
        self._executor = ThreadPoolExecutor(1, "collector") if background else None
        self._future: Future[None] | None = None
        self._at_rest = threading.Event()
        self._at_rest.set()
        # Guards the two below, and says when they change
        self._news = threading.Condition()
        self._n_available = 0
        self._cancelled = False

    # --- the learner's thread ---------------------------------------------------------------------------------------

    def _launch(self, job: Job) -> None:
        self._n_available, self._cancelled = 1, False
        self._progress = _Progress(job, time.monotonic())
        with shielded:
            if self._executor is not None:
                if self._workforce is not None:
                    self._workforce.lend(self)
                # With numpy's error state and other context variables of the learner's thread
                context = contextvars.copy_context()
                self._at_rest.clear()  # before the thread can ask for anything
                self._future = self._executor.submit(context.run, self._collect_in_background, self._progress)
            self.in_flight = True

    def _announce(self, snapshot: int) -> None:
        with self._news:
            self._n_available = snapshot + 1
            self._news.notify()

    def _finish(self) -> Rollout:
        blocked_from = time.monotonic()
        if self._future is None:
            self._collect(self._progress)
        else:
            self._future.result()
        return self._assemble(time.monotonic() - blocked_from)

    def _stop(self) -> Rollout:
        with self._news:
            self._cancelled = True
            self._news.notify()
        if self._future is not None:
            wait([self._future])  # if it failed, that has been said, or something else is more important
        return self._assemble(0.0)

    def _assemble(self, wait_time: float) -> Rollout:
        if self._workforce is not None:
            self._workforce.take_back(self)
        progress = self._progress
        half, parameters = self._data
        if progress.steps_done < self._plan.layout.n_steps:
            self._lockstep.settle(half, progress.steps_done)
        return Rollout(
            half=half,
            parameters=parameters,
            load_infos=lambda: progress.infos,
            groups=(self._lockstep.columns,),
            steps_done=(progress.steps_done,),
            collect_time=progress.finished_at - progress.launched_at,
            wait_time=wait_time,
        )

    def note_episodes(self, ends: Infos) -> None:
        """Nothing: the wrappers have seen all of them."""

    def release(self) -> None:
        if self._workforce is not None:
            self._workforce.take_back(self)
        if self._executor is not None:
            self._executor.shutdown()

    # --- anybody's thread -------------------------------------------------------------------------------------------

    def before_asking(self, stepping: bool) -> None:
        """Wait for the end of the rollout, unless it is the collecting thread that asks, or one that steps on its behalf."""
        if self.keeps_out(stepping):
            if threading.current_thread() is self._learner:
                self.publish_rest(self._version)
            self._at_rest.wait()

    def keeps_out(self, stepping: bool) -> bool:
        """Whether a rollout is being collected, and not by or for the present thread."""
        thread = threading.current_thread()
        return not self._at_rest.is_set() and thread is not self._collecting and (thread is self._learner or not stepping)

    def predict_here(self, *args: Any, **kwargs: Any) -> Any:
        if self._executor is None or threading.current_thread() is not self._collecting:
            return None
        with self._replica.drawing:
            return self._replica.policy.predict(*args, **kwargs)

    # --- the collecting thread --------------------------------------------------------------------------------------

    def _collect_in_background(self, progress: _Progress) -> None:
        self._collecting = threading.current_thread()
        try:
            self._collect(progress)
        finally:
            self._at_rest.set()

    def _collect(self, progress: _Progress) -> None:
        job, n_steps = progress.job, self._plan.layout.n_steps
        half = self._storage.halves[job.half]
        snapshot = -1
        for t in range(n_steps):
            needed = t * job.n_snapshots // n_steps
            if needed != snapshot:
                self._await_snapshot(needed)
                snapshot = needed
            if self._cancelled:
                break
            self._replica.bind(job.first_slot + snapshot)
            self._lockstep.read_extras(half, t)
            infos = self._lockstep.step(half, t, self._actor.act(half, t, job.first_step))
            # Environments may use the same dicts for ever
            progress.infos.update({(t, i): _keep(info) for i, info in enumerate(infos) if not is_plain(info)})
            half.versions[t] = self._versions[job.first_slot + snapshot]
            progress.steps_done = t + 1
        if progress.steps_done == n_steps:
            self._replica.bind(job.first_slot + snapshot)
            self._actor.write_last_values(half)
        progress.finished_at = time.monotonic()

    def _await_snapshot(self, snapshot: int) -> None:
        with self._news:
            self._news.wait_for(lambda: self._cancelled or self._n_available > snapshot)


def _keep(info: dict[str, Any]) -> dict[str, Any]:
    try:
        return deepcopy(info)
    except Exception:  # what cannot be copied stays the environment's
        return dict(info)
