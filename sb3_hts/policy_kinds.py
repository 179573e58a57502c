"""What kinds of policies see, and remember, besides observations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_hts.acting import GroupActor
from sb3_hts.collector import Position
from sb3_hts.shared_arrays import Array, ArraySpec


@dataclass(frozen=True)
class Step:
    """One step of all environments.

    :param before: Where it began.
    :param after: Where it led.
    :param extras: What else belongs to it, by name.
    :param device: Of the learner's policy.
    """

    before: Position
    after: Position
    extras: dict[str, Array]
    device: th.device


class PolicyKind:
    """SB3's own policies: they act on observations alone. Others are subclasses.

    ``actor_class`` is what acts with them, ``tells_end`` whether SB3's loop updates the callbacks' ``locals`` before
    ``on_rollout_end``, ``swapped`` which arrays of the buffer have environments along their third axis, ``integral`` the
    spaces whose actions are int64.
    """

    actor_class: type[GroupActor] = GroupActor
    tells_end = True
    swapped: tuple[str, ...] = ()
    integral: tuple[type[spaces.Space[Any]], ...] = (spaces.Discrete, spaces.MultiDiscrete)

    def extras(self, model: Any) -> dict[str, ArraySpec]:
        """What else belongs to each step, by the name of the environments' method that gives it."""
        return {}

    def recall(self, model: Any) -> dict[str, Array]:
        """What the model remembers, ``(n_envs, ...)`` each."""
        return {}

    def remember(self, model: Any, memory: dict[str, Array]) -> None:
        """Counterpart of :meth:`recall`."""

    def loop_arguments(self, model: Any) -> dict[str, Any]:
        """Arguments of SB3's own ``collect_rollouts()`` beyond the usual ones."""
        return {}

    def variables(self, step: Step) -> dict[str, Any]:
        """Local variables that SB3's loop has at a step beyond the usual ones."""
        return {}

    def stored(self, step: Step) -> dict[str, Any]:
        """Arguments of the buffer's ``add()`` beyond the usual ones."""
        return {}

    def evaluation(self, buffer: RolloutBuffer, rows: slice) -> dict[str, Any]:
        """Arguments of ``evaluate_actions()`` beyond the usual ones: arrays, alone or in tuples.

        :param buffer: Not yet read.
        :param rows: Of its arrays, flattened: ``t * n_envs + environment``.
        """
        return {}

    def last_values(self, end: Position) -> dict[str, Any]:
        """Arguments of ``predict_values()`` after the last step beyond the usual one: arrays, alone or in tuples."""
        return {}
