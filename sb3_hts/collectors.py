"""Which collector serves which environments and policy."""

from __future__ import annotations

import warnings

from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecEnv

from sb3_hts.collector import Collector, Plan
from sb3_hts.replicas import UnportablePolicyError
from sb3_hts.thread_collector import ThreadCollector
from sb3_hts.worker_collector import WorkerCollector, why_not_in_workers


def make_collector(env: VecEnv, policy: ActorCriticPolicy, plan: Plan, background: bool, inference: str) -> Collector | None:
    """The fastest collector that works; ``None`` if only SB3's own loop does.

    :param background: Whether the next rollout is to be collected while the learner trains.
    :param inference: As the user has put it.
    """
    reason = why_not_in_workers(env)
    try:
        if reason is None:
            return WorkerCollector(env, policy, plan)
    except UnportablePolicyError as error:
        warnings.warn(f"HTS: the policy cannot be sent to the workers, because {error}", stacklevel=2)
        reason = "the policy cannot be sent to the workers"
    if inference == "central":
        warnings.warn(f'HTS: inference="central" has no effect, because {reason}.', stacklevel=2)
    try:
        return ThreadCollector(env, policy, plan, background, reason)
    except UnportablePolicyError as error:
        warnings.warn(f"HTS: rollouts are collected one after the other with training, because {error}", stacklevel=2)
    return None
