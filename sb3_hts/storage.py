"""The double storage (the paper, section 3.1): actors and executors write one half while the learner reads the other.

Time runs along the first axis, environments along the second. A worker owns the columns of its environments in the half
that its rollout names, from the request until its reply; nobody else writes there. Rows of ``observations`` are one more
than steps: row ``t`` is what the policy saw at step ``t``, row ``t + 1`` what came back. Row 0 is written by the main
process before the launch. The same holds for ``memory``, what a policy remembers from step to step.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sb3_hts.shared_arrays import Array, ArraySpec, SharedBlock, block_nbytes, carve

N_HALVES = 2


@dataclass(frozen=True)
class RolloutLayout:
    """Shapes of one storage half.

    :param n_steps: Steps per environment.
    :param n_envs: Number of environments.
    :param observations: Observation key (``None`` unless the space is a Dict) to the spec of a single observation.
    :param action: Spec of a single action as the policy returns it.
    :param extras: Name to spec of what else belongs to a single step, such as a mask of actions.
    :param memory: Name to spec of what the policy remembers of one environment, such as an LSTM's state.
    """

    n_steps: int
    n_envs: int
    observations: dict[Hashable, ArraySpec]
    action: ArraySpec
    extras: dict[str, ArraySpec] = field(default_factory=dict)
    memory: dict[str, ArraySpec] = field(default_factory=dict)
    specs: dict[Hashable, ArraySpec] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.n_steps < 1 or self.n_envs < 1:
            raise ValueError(f"A rollout needs at least one step and one environment, got {self.n_steps} x {self.n_envs}")
        cell = (self.n_steps, self.n_envs)
        float32 = np.dtype(np.float32)
        specs: dict[Hashable, ArraySpec] = {
            ("observations", key): ArraySpec((self.n_steps + 1, self.n_envs, *spec.shape), spec.dtype)
            for key, spec in self.observations.items()
        }
        specs["actions"] = ArraySpec((*cell, *self.action.shape), self.action.dtype)
        for name in ("rewards", "values", "log_probs", "terminal_values"):
            specs[name] = ArraySpec(cell, float32)
        specs["dones"] = ArraySpec(cell, np.dtype(bool))
        specs["episode_starts"] = ArraySpec((self.n_envs,), np.dtype(bool))
        for name, spec in self.extras.items():
            specs["extras", name] = ArraySpec((*cell, *spec.shape), spec.dtype)
        for name, spec in self.memory.items():
            specs["memory", name] = ArraySpec((self.n_steps + 1, self.n_envs, *spec.shape), spec.dtype)
        specs["last_values"] = ArraySpec((self.n_envs,), float32)
        specs["versions"] = ArraySpec((*cell, 2), np.dtype(np.int64))
        object.__setattr__(self, "specs", specs)

    @property
    def half_nbytes(self) -> int:
        return block_nbytes(self.specs)

    @property
    def nbytes(self) -> int:
        """Size of both halves."""
        return N_HALVES * self.half_nbytes


class Half:
    """Arrays of one half.

    ========================  =======================================  =====================================================
    array                     shape, dtype                             content
    ========================  =======================================  =====================================================
    ``observations[key]``     (n_steps + 1, n_envs, ...), the space's  see the module's docstring
    ``actions``               (n_steps, n_envs, ...)                   as sampled: not clipped, not unscaled
    ``rewards``               (n_steps, n_envs) float32                without bootstrap
    ``dones``                 (n_steps, n_envs) bool                   terminated or truncated
    ``episode_starts``        (n_envs,) bool                           whether the first observation begins an episode
    ``extras[name]``          (n_steps, n_envs, ...)                   what else belongs to a step
    ``memory[name]``          (n_steps + 1, n_envs, ...)               see the module's docstring
    ``values``, ``log_probs`` (n_steps, n_envs) float32                of the behaviour policy
    ``terminal_values``       (n_steps, n_envs) float32                value of the terminal observation, where truncated
    ``last_values``           (n_envs,) float32                        value of the last observation
    ``versions``              (n_steps, n_envs, 2) int64               (update, gradient step) of the parameters that acted
    ========================  =======================================  =====================================================
    """

    def __init__(self, layout: RolloutLayout, memory: Array) -> None:
        arrays: dict[Any, Array] = carve(memory, layout.specs)
        self.observations = {key: arrays["observations", key] for key in layout.observations}
        self.extras = {name: arrays["extras", name] for name in layout.extras}
        self.memory = {name: arrays["memory", name] for name in layout.memory}
        self.episode_starts = arrays["episode_starts"]
        self.actions = arrays["actions"]
        self.rewards = arrays["rewards"]
        self.dones = arrays["dones"]
        self.values = arrays["values"]
        self.log_probs = arrays["log_probs"]
        self.terminal_values = arrays["terminal_values"]
        self.last_values = arrays["last_values"]
        self.versions = arrays["versions"]


class RolloutStorage:
    """Both halves over one shared block; each process that maps the block makes its own."""

    def __init__(self, layout: RolloutLayout, block: SharedBlock) -> None:
        self.layout = layout
        size = layout.half_nbytes
        self.halves = tuple(Half(layout, block.bytes[i * size : (i + 1) * size]) for i in range(N_HALVES))
