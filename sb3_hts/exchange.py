"""What executors and actors hand to each other (the paper, section 3.1: the state buffer and the action buffer).

The rows of the rollout storage are the state buffer: an executor writes the observations of step ``t`` where they stay.
Besides, each group has a row here. It belongs to the group's executor, until that asks for an action by a token that names
the group; then to the actor that took the token, until it gives the token back. So neither ever waits for a lock.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_hts.shared_arrays import Array, ArraySpec, SharedBlock, block_nbytes, carve
from sb3_hts.storage import RolloutLayout


@dataclass(frozen=True)
class ExchangeLayout:
    """Shapes of what is handed over.

    :param rollout: Of the storage.
    :param group_size: Environments per group.
    :param env_action: What an environment gets; other than what the policy returns, where that is clipped or unscaled.
    :param channels_last: Observation keys whose arrays lie in memory with the channels last.
    """

    rollout: RolloutLayout
    group_size: int
    env_action: ArraySpec
    channels_last: frozenset[Any]

    @property
    def specs(self) -> dict[Hashable, ArraySpec]:
        n_envs = self.rollout.n_envs
        specs: dict[Hashable, ArraySpec] = {
            "job": ArraySpec((4,), np.dtype(np.int64)),
            "steps": ArraySpec((n_envs // self.group_size,), np.dtype(np.int64)),
            "env_actions": ArraySpec((n_envs, *self.env_action.shape), self.env_action.dtype),
            "truncated": ArraySpec((n_envs,), np.dtype(bool)),
        }
        for key, spec in self.rollout.observations.items():
            specs["terminal", key] = ArraySpec((n_envs, *memory_shape(spec, key in self.channels_last)), spec.dtype)
        return specs

    @property
    def nbytes(self) -> int:
        return block_nbytes(self.specs)


class Exchange:
    """Arrays over the shared block.

    =========================  ==========================  ============================================================
    array                      shape, dtype                content
    =========================  ==========================  ============================================================
    ``job``                    (4,) int64                  half, first step, number of snapshots and first slot of the
                                                           rollout; the main process's, between rollouts
    ``steps``                  (n_groups,) int64           the step that a group asks to act at; ``n_steps``: it asks for
                                                           the values of its last observations
    ``env_actions``            (n_envs, ...)               the answer: what the environments get
    ``truncated``              (n_envs,) bool              whether the terminal observation of the step before waits
                                                           for its value
    ``terminal[key]``          (n_envs, ...), the space's  that observation
    =========================  ==========================  ============================================================
    """

    def __init__(self, layout: ExchangeLayout, block: SharedBlock) -> None:
        arrays: dict[Any, Array] = carve(block.bytes, layout.specs)
        self.job: npt.NDArray[np.int64] = arrays["job"]
        self.steps: npt.NDArray[np.int64] = arrays["steps"]
        self.env_actions = arrays["env_actions"]
        self.truncated: npt.NDArray[np.bool_] = arrays["truncated"]
        self.terminal = {
            key: arrays["terminal", key].transpose(0, 3, 1, 2) if key in layout.channels_last else arrays["terminal", key]
            for key in layout.rollout.observations
        }


def memory_shape(spec: ArraySpec, channels_last: bool) -> tuple[int, ...]:
    """The shape in which an observation lies in memory."""
    if not channels_last:
        return spec.shape
    channels, height, width = spec.shape
    return height, width, channels
