"""Where the behaviour policy runs, and in batches of what shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_hts.acting import GroupActor
from sb3_hts.lean_policy import is_stock, lean_network

INFERENCES = ("auto", "local", "central")
BATCHES = ("auto", "full", "group")


@dataclass(frozen=True)
class Central:
    """The policy runs in processes of its own, the actors.

    :param n_actors: How many.
    :param device: Where it acts.
    :param full_batch: Whether all environments share a forward, see :mod:`sb3_hts.serving`.
    :param direct: Whether to try to have the actors read the parameters in the memory of the learner's device.
    """

    n_actors: int
    device: th.device
    full_batch: bool
    direct: bool

    def __str__(self) -> str:
        actors = f"{self.n_actors} actor{'s' if self.n_actors > 1 else ''}"
        return f"inference central ({actors} on {self.device}, {'full' if self.full_batch else 'group'} batches)"


def choose(
    inference: str, policy: ActorCriticPolicy, actor_class: type[GroupActor], n_actors: int, device: str | None, batch: str
) -> Central | None:
    """Resolve the arguments; ``None`` for local inference.

    :param inference: One of :data:`INFERENCES`.
    :param policy: The learner's.
    :param actor_class: What acts with it.
    :param n_actors: How many actors there will be.
    :param device: Where they act; ``None``: where the learner's policy is.
    :param batch: One of :data:`BATCHES`.
    :raises ValueError: If a full batch is demanded of a policy that has none, or the device is not there.
    """
    acting_device = policy.device if device is None else _available(device)
    if inference == "local" or (inference == "auto" and acting_device.type == "cpu"):
        return None
    reason = why_not_full(policy, actor_class)
    if batch == "full" and reason is not None:
        raise ValueError(f'central_batch="full" is not possible, because {reason}: leave it out, or pass "group".')
    full_batch = batch == "full" or (batch == "auto" and reason is None and _has_independent_rows(policy))
    return Central(n_actors, acting_device, full_batch, direct=policy.device.type == acting_device.type == "cuda")


def why_not_full(policy: ActorCriticPolicy, actor_class: type[GroupActor]) -> str | None:
    """Why the environments cannot share a forward; ``None`` if they can."""
    if actor_class is not GroupActor:
        return "the policy acts on more than observations"
    if lean_network(policy) is None:
        return "the policy's forward is not SB3's own, has hooks, or uses gSDE"
    if not is_stock(policy, "predict_values"):
        return "the policy's predict_values is not SB3's own"
    return None


def _has_independent_rows(policy: ActorCriticPolicy) -> bool:
    """Whether each row of a batch is known to be forwarded as if it were alone: true of torch's and SB3's modules.

    Others may mix the rows, for example by statistics of the batch.
    """
    return all(type(module).__module__.startswith(("torch.", "stable_baselines3.")) for module in policy.modules())


def _available(name: str) -> th.device:
    """A device that is there. One that is not may still be named by the file of a model that is loaded to be looked at."""
    try:
        return th.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"actor_device={name!r} cannot be used ({reason}): pass another one, or None.") from error
