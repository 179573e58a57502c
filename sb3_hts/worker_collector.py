"""The worker collector: the workers of an ``HTSVecEnv`` collect, each group by itself."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecEnv

from sb3_hts.actor import ActorProgram
from sb3_hts.collector import Collector, Infos, Job, Plan, Rollout
from sb3_hts.errors import HTSError
from sb3_hts.exchange import Exchange, ExchangeLayout
from sb3_hts.executor import ExecutorProgram
from sb3_hts.inference import Central
from sb3_hts.interrupts import shielded
from sb3_hts.local_runner import LocalProgram
from sb3_hts.protocol import Collect, Collected, Done
from sb3_hts.replicas import PolicyTensors, PortablePolicy, Publisher, dump_policy
from sb3_hts.serialization import dumps_by_value, loads
from sb3_hts.shared_arrays import SharedBlock, aligned
from sb3_hts.slots import ParameterSlots
from sb3_hts.storage import RolloutStorage
from sb3_hts.tokens import TokenQueue
from sb3_hts.vec_env import HTSVecEnv
from sb3_hts.workforce import Equipment
from sb3_hts.wrappers import get_states, make_template, merge_states, unwrap, why_not_split, write_episodes

CHEAP_STEP = 500e-6
"""Seconds per environment step, below which large groups pay off."""


def why_not_in_workers(env: VecEnv) -> str | None:
    """Why the workers cannot collect for this environment; ``None`` if they can."""
    wrappers, base = unwrap(env)
    if type(base) is not HTSVecEnv:
        return f"{type(base).__name__} is not an HTSVecEnv"
    return why_not_split(wrappers)


class WorkerCollector(Collector):
    """See the module's docstring. Anyone else who asks the environments waits inside ``HTSVecEnv``.

    :param env: An ``HTSVecEnv``, bare or under wrappers that can be split.
    :param policy: The learner's policy; its parameters are read at each :meth:`start` and :meth:`publish`.
    :param plan: What to collect.
    :raises UnportablePolicyError: If the policy cannot be sent to the workers.
    """

    def __init__(self, env: VecEnv, policy: ActorCriticPolicy, plan: Plan) -> None:
        self._wrappers, base = unwrap(env)
        assert isinstance(base, HTSVecEnv)
        self._workforce = base.workforce
        self._placement = base.workforce.placement
        self._templates = tuple(make_template(wrapper) for wrapper in self._wrappers)
        self._learner = threading.current_thread()
        tensors = PolicyTensors(policy)
        slots = ParameterSlots(tensors.nbytes, plan.n_slots)
        storage_block = SharedBlock(plan.layout.nbytes)
        publisher = Publisher(tensors, [th.from_numpy(slot) for slot in slots.slots], slots.versions)
        super().__init__(plan, RolloutStorage(plan.layout, storage_block), publisher)
        blocks = [storage_block, slots.block]
        self._exchange: Exchange | None = None
        if plan.central is None:
            self._configure_local(tensors, storage_block, slots)
        else:
            blocks.append(self._configure_central(plan.central, tensors, storage_block, slots))
        self.description = (
            f"{base.n_workers} workers, {base.n_groups} groups of {base.envs_per_group}, {plan.central or 'inference local'}, "
            f"{sum(block.nbytes for block in blocks) / 2**20:.1f} MiB shared"
        )
        if plan.central is not None and plan.central.direct and self._workforce.device_refusal is not None:
            self.description += f", parameters not from device to device ({self._workforce.device_refusal})"
        for block in blocks:
            block.release_descriptor()
        self._launched_at = 0.0
        self._warnings: list[str] = []
        self._step_time = 0.0

    def _configure_local(self, tensors: PolicyTensors, storage_block: SharedBlock, slots: ParameterSlots) -> None:
        plan = self._plan
        program = LocalProgram(
            layout=plan.layout,
            manner=plan.manner,
            wrappers=self._templates,
            policy=self._dump_policy(tensors, th.device("cpu")),
            n_slots=plan.n_slots,
        )
        equipment = Equipment(dumps_by_value(program), (storage_block, slots.block))
        self._workforce.configure_rollouts(self, [equipment] * self._placement.n_workers)

    def _configure_central(
        self, central: Central, tensors: PolicyTensors, storage_block: SharedBlock, slots: ParameterSlots
    ) -> SharedBlock:
        """As :meth:`_configure_local`; the memory of the exchange."""
        plan, placement = self._plan, self._placement
        layout = ExchangeLayout(
            rollout=plan.layout,
            group_size=placement.envs_per_group,
            env_action=plan.manner.env_action_spec(tensors.policy, plan.layout.action),
            channels_last=plan.manner.channels_last,
        )
        actor = ActorProgram(
            layout=layout,
            manner=plan.manner,
            policy=self._dump_policy(tensors, central.device),
            n_slots=plan.n_slots,
            device=str(central.device),
            full_batch=central.full_batch,
            worker_of=tuple(placement.worker_of(group * placement.envs_per_group) for group in range(placement.n_groups)),
        )
        executor = dumps_by_value(ExecutorProgram(layout, self._templates))
        block = SharedBlock(layout.nbytes)
        requests, *answers = queues = [TokenQueue() for _ in range(1 + placement.n_workers)]

        def configure(offers: Sequence[bytes | None]) -> list[Done]:
            programs = [dumps_by_value(replace(actor, device_slots=offer)) for offer in offers]
            return self._workforce.configure_rollouts(
                self,
                [Equipment(executor, (storage_block, block), (requests, mine)) for mine in answers],
                [Equipment(program, (slots.block, storage_block, block), tuple(queues)) for program in programs],
            )

        on_device = None
        if central.direct and self._workforce.device_refusal is None:
            on_device, self._workforce.device_refusal = _share_on_device(tensors, plan.n_slots, central.n_actors, configure)
        if on_device is None:
            configure([None] * central.n_actors)
        else:
            self._publisher = Publisher(tensors, on_device, slots.versions)
        self._exchange = Exchange(layout, block)
        return block

    def _dump_policy(self, tensors: PolicyTensors, device: th.device) -> PortablePolicy:
        return PortablePolicy(dump_policy(tensors, device), tuple(tensors.specs), tensors.nbytes, self._plan.noise_key)

    @property
    def advice(self) -> str | None:
        placement = self._placement
        if placement.envs_per_group > 1 or placement.n_envs == 1 or self._step_time >= CHEAP_STEP:
            return None
        return (
            f"a step takes {self._step_time * 1e6:.0f} microseconds; larger groups of environments "
            f"would be faster, e.g. vec_env_kwargs=dict(envs_per_group={placement.n_envs}) in make_vec_env()"
        )

    def _launch(self, job: Job) -> None:
        def request(serial: int, worker: int) -> Collect:
            groups = self._placement.groups_of(worker)
            return Collect(
                rollout=serial,
                half=job.half,
                first_step=job.first_step,
                n_snapshots=job.n_snapshots,
                first_slot=job.first_slot,
                wrapper_states=tuple(get_states(self._wrappers, self._placement.columns_of(group)) for group in groups),
            )

        if self._exchange is not None:
            self._exchange.job[:] = job.half, job.first_step, job.n_snapshots, job.first_slot
        self._launched_at = time.monotonic()
        # Together or not at all: a launch that nobody knows of would never be cancelled
        with shielded:
            self._workforce.start_rollout(request, self)
            self.in_flight = True

    def _announce(self, snapshot: int) -> None:
        self._workforce.announce_snapshot(snapshot)

    def _finish(self) -> Rollout:
        pool = self._workforce.pool
        blocked_before = pool.blocked_time
        replies = self._workforce.finish_rollout()
        half, parameters = self._data
        self._step_time = max(reply.step_time for reply in replies)
        messages, self._warnings = self._warnings, []
        for message in messages:
            warnings.warn(message, UserWarning, stacklevel=2)
        return Rollout(
            half=half,
            parameters=parameters,
            load_infos=lambda: {place: loads(info) for reply in replies for place, info in reply.infos.items()},
            groups=tuple(self._placement.columns_of(group) for group in range(self._placement.n_groups)),
            steps_done=tuple(steps for reply in replies for steps in reply.steps_done),
            collect_time=max(reply.finished_at for reply in replies) - self._launched_at,
            wait_time=pool.blocked_time - blocked_before,
        )

    def _stop(self) -> Rollout:
        self._workforce.cancel_rollout()
        return self._finish()

    def note_episodes(self, ends: Infos) -> None:
        write_episodes(self._wrappers, ends)

    def release(self) -> None:
        """Give the memory back. After a failure the workers are gone already."""
        with suppress(HTSError):
            self._workforce.release_rollouts(self)

    def before_waiting(self) -> None:
        """Publish what the workers still need: if the learner's thread is the one that waits, nobody else will."""
        if threading.current_thread() is self._learner:
            self.publish_rest(self._version)

    def after_gathering(self, replies: Sequence[Collected]) -> None:
        """Bring the main process's wrappers up to date."""
        self._warnings += merge_states(self._wrappers, [states for reply in replies for states in reply.wrapper_states])


def _share_on_device(
    tensors: PolicyTensors, n_slots: int, n_actors: int, configure: Callable[[Sequence[bytes | None]], Sequence[Done]]
) -> tuple[Sequence[th.Tensor] | None, str | None]:
    """Slots on the learner's device that the actors read themselves; or why that is not possible.

    Not every driver, allocator and container lets processes share a device's memory; either side may notice.

    :param configure: Hands each actor its offer.
    """
    slots = th.empty((n_slots, aligned(tensors.nbytes)), dtype=th.uint8, device=tensors.policy.device)
    try:
        offers = [bytes(ForkingPickler.dumps(slots)) for _ in range(n_actors)]
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    refusals = [loads(reply.value) for reply in configure(offers) if reply.value is not None]
    return (None, refusals[0]) if refusals else (list(slots), None)
