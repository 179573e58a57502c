"""The actor: policy, observation and noise stream in, action out. Also how a policy reaches those who act.

A policy travels in two parts. Its *structure* is pickled once, by value, without its optimizer, and with a number in
place of each parameter and buffer. The *numbers* lie in the parameter slots (:mod:`sb3_hts.slots`), where the tensors
of every replica are views: publishing is one copy by the learner, whatever the number of workers.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import StateDependentNoiseDistribution
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_hts.lean_policy import lean_forward
from sb3_hts.seeding import stream_seed
from sb3_hts.serialization import main_by_value
from sb3_hts.shared_arrays import Array, ArraySpec, aligned, empty_aligned
from sb3_hts.slots import ParameterSlots
from sb3_hts.storage import RolloutLayout
from sb3_hts.wrappers import Template

Observations = Mapping[Hashable, Array]


@dataclass(frozen=True)
class TensorSpec:
    """Where one parameter or buffer lies in a slot: a strided view of a storage."""

    offset: int
    storage_nbytes: int
    dtype: th.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    requires_grad: bool | None
    """``None`` for a buffer."""

    def view(self, slot: npt.NDArray[np.uint8]) -> th.Tensor:
        """The tensor over the given slot."""
        storage = th.from_numpy(slot[self.offset : self.offset + self.storage_nbytes]).view(self.dtype)
        return storage.as_strided(self.size, self.stride, self.storage_offset)


class PolicyTensors:
    """All parameters and buffers of a policy, persistent or not, and their place in a slot.

    A storage that several tensors share (tied weights) is laid out once.
    """

    def __init__(self, policy: th.nn.Module) -> None:
        self.tensors: list[th.Tensor] = []
        self.specs: list[TensorSpec] = []
        self.nbytes = 0
        self.policy = policy
        self.parameters = list(policy.parameters())
        offsets: dict[int, int] = {}
        for tensor in [*self.parameters, *policy.buffers()]:
            storage = tensor.untyped_storage()
            # Empty storages all have the same address
            key = storage.data_ptr() or -id(tensor)
            if key not in offsets:
                offsets[key] = self.nbytes
                self.nbytes += aligned(storage.nbytes())
            self.tensors.append(tensor)
            self.specs.append(
                TensorSpec(
                    offset=offsets[key],
                    storage_nbytes=storage.nbytes(),
                    dtype=tensor.dtype,
                    size=tuple(tensor.size()),
                    stride=tensor.stride(),
                    storage_offset=int(tensor.storage_offset()),
                    requires_grad=tensor.requires_grad if isinstance(tensor, th.nn.Parameter) else None,
                )
            )


class Publisher:
    """Writes the learner's parameters into slots. Used by the learner's thread alone."""

    def __init__(self, tensors: PolicyTensors, slots: ParameterSlots) -> None:
        self._policy = tensors.policy
        self._parameters = tensors.parameters
        self._has_buffers = len(tensors.tensors) > len(tensors.parameters)
        self._versions = slots.versions
        self._views = [[spec.view(slot) for spec in tensors.specs] for slot in slots.slots]

    @th.no_grad()
    def write(self, slot: int, version: tuple[int, int]) -> None:
        """Copy the current parameters and buffers into a slot.

        :param version: ``(update, gradient step)`` that made them.
        """
        # Buffers are looked up anew, because modules may assign new tensors to them; parameters are what is optimized
        buffers = self._policy.buffers() if self._has_buffers else ()
        for view, source in zip(self._views[slot], [*self._parameters, *buffers], strict=True):
            view.copy_(source)
        self._versions[slot] = version

    def parameters(self, slot: int) -> list[th.Tensor]:
        """What a slot holds for the policy's parameters, in their order: views of the slot."""
        return self._views[slot][: len(self._parameters)]


@dataclass(frozen=True)
class Program:
    """What a worker needs to collect rollouts, apart from its environments.

    :param layout: Of the rollout storage.
    :param wrappers: Templates of the vectorized wrappers, from the innermost outwards.
    :param policy: Result of :func:`dump_policy`.
    :param tensors: The policy's tensors, in order of their numbers.
    :param slot_nbytes: Size of one slot.
    :param n_slots: Number of slots, see :mod:`sb3_hts.slots`.
    :param noise_key: See :func:`sb3_hts.seeding.stream_seed`.
    :param action_space: Of the environments.
    :param channels_last: See :func:`sb3_hts.wrappers.channels_last_keys`.
    :param sde_sample_freq: As in SB3, ``None`` without gSDE.
    """

    layout: RolloutLayout
    wrappers: tuple[Template, ...]
    policy: bytes
    tensors: tuple[TensorSpec, ...]
    slot_nbytes: int
    n_slots: int
    noise_key: int
    action_space: spaces.Space[Any]
    channels_last: frozenset[Any]
    sde_sample_freq: int | None


class _PolicyPickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle is not typed
    """Numbers instead of parameters, nothing instead of optimizers, CPU copies of any other tensor."""

    def __init__(self, file: io.BytesIO, numbers: dict[int, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._numbers = numbers

    def persistent_id(self, obj: object) -> int | None:
        return self._numbers.get(id(obj)) if isinstance(obj, th.Tensor) else None

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, th.optim.Optimizer):
            return type(None), ()
        if isinstance(obj, th.Tensor) and obj.device.type != "cpu":
            return th.Tensor.cpu, (th.from_numpy(obj.detach().cpu().numpy()),)
        return super().reducer_override(obj)


class _PolicyUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[th.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> th.Tensor:
        return self._tensors[pid]


class UnportablePolicyError(TypeError):
    """A policy that cannot be sent to another process."""


def dump_policy(policy: th.nn.Module, tensors: PolicyTensors) -> bytes:
    """Serialise the structure of a policy.

    :raises UnportablePolicyError: If some part of the policy cannot be serialised.
    """
    buffer = io.BytesIO()
    numbers = {id(tensor): number for number, tensor in enumerate(tensors.tensors)}
    try:
        with main_by_value():
            _PolicyPickler(buffer, numbers).dump(policy)
    except Exception as error:
        raise UnportablePolicyError(
            f"The policy {type(policy).__name__} cannot be sent to the workers: {error}. "
            "Remove what cannot be pickled from it, or give it a __getstate__ that leaves it out."
        ) from error
    return buffer.getvalue()


class Replica:
    """A behaviour policy whose tensors are views of the slots.

    :param program: What to act with.
    :param slots: Where the parameters are.
    """

    def __init__(self, program: Program, slots: ParameterSlots) -> None:
        self._views = [[spec.view(slot) for spec in program.tensors] for slot in slots.slots]
        # Tensors of their own, since binding to another slot changes where they point
        self._tensors: list[th.Tensor] = [
            view.detach() if spec.requires_grad is None else th.nn.Parameter(view, spec.requires_grad)
            for view, spec in zip(self._views[0], program.tensors, strict=True)
        ]
        self.policy: ActorCriticPolicy = _PolicyUnpickler(io.BytesIO(program.policy), self._tensors).load()
        self.policy.set_training_mode(False)
        self._noise_key = program.noise_key
        self._slot = 0

    def bind(self, slot: int) -> None:
        """Act with another snapshot from now on."""
        if slot != self._slot:
            for tensor, view in zip(self._tensors, self._views[slot], strict=True):
                tensor.data = view
            self._slot = slot

    def seed(self, group: int, step: int) -> None:
        """Seed torch's generator for the forward of one group at one step."""
        seed_torch(self._noise_key, group, step)


def seed_torch(noise_key: int, group: int, step: int) -> None:
    """Seed torch's CPU generator with the noise of (seed, group, step); see :func:`sb3_hts.seeding.stream_seed`."""
    th.default_generator.manual_seed(stream_seed(noise_key, group, step))


class GroupActor:
    """Acts for one group: a fixed batch shape, an aligned input, an exploration matrix of its own.

    :param replica: The policy, shared by the groups of a worker.
    :param program: What the replica was made from.
    :param group: Index of the group.
    :param size: Number of environments in it.
    """

    def __init__(self, replica: Replica, program: Program, group: int, size: int) -> None:
        self._replica = replica
        self._policy = replica.policy
        self._forward = lean_forward(replica.policy)
        self._group = group
        self._size = size
        self._sde_sample_freq = program.sde_sample_freq
        self._exploration: tuple[Any, Any] | None = None
        self._inputs = {
            key: _input_array(size, spec, key in program.channels_last) for key, spec in program.layout.observations.items()
        }
        tensors = {key: th.from_numpy(array) for key, array in self._inputs.items()}
        self._obs_tensor: Any = tensors.get(None, tensors)

    @th.no_grad()
    def act(self, observations: Observations, first_step: int, t: int) -> tuple[Array, Array, Array]:
        """One forward, as in SB3's ``collect_rollouts``.

        :param observations: By key, ``(size, ...)`` each.
        :param first_step: Global step of the rollout's first step.
        :param t: Step within the rollout.
        :return: Actions ``(size, ...)``, values ``(size,)``, log-probabilities ``(size,)``.
        """
        if self._sde_sample_freq is not None:
            self._explore(first_step, t)
        self._replica.seed(self._group, first_step + t)
        actions, values, log_probs = self._forward(self._load(observations))
        return actions.numpy(), values.numpy().reshape(-1), log_probs.numpy()

    @th.no_grad()
    def values(self, observations: Observations) -> Array:
        """Values ``(size,)`` of the given observations."""
        return self._policy.predict_values(self._load(observations)).numpy().reshape(-1)

    @th.no_grad()
    def terminal_value(self, observation: Any) -> float:
        """Value of one terminal observation, as SB3 bootstraps at a time limit."""
        obs_tensor = self._policy.obs_to_tensor(observation)[0]
        return self._policy.predict_values(obs_tensor)[0].item()

    def _load(self, observations: Observations) -> Any:
        for key, array in self._inputs.items():
            np.copyto(array, observations[key])
        return self._obs_tensor

    def _explore(self, first_step: int, t: int) -> None:
        """gSDE: this group's exploration matrix, sampled anew when SB3 would."""
        distribution = self._policy.action_dist
        assert isinstance(distribution, StateDependentNoiseDistribution)
        frequency = self._sde_sample_freq or 0
        if t == 0 or (frequency > 0 and t % frequency == 0):
            self._replica.seed(self._group, first_step + t)
            self._policy.reset_noise(self._size)
            self._exploration = (distribution.exploration_mat, distribution.exploration_matrices)
        assert self._exploration is not None
        distribution.exploration_mat, distribution.exploration_matrices = self._exploration


def _input_array(size: int, spec: ArraySpec, channels_last: bool) -> Array:
    if not channels_last:
        return empty_aligned((size, *spec.shape), spec.dtype)
    channels, height, width = spec.shape
    return empty_aligned((size, height, width, channels), spec.dtype).transpose(0, 3, 1, 2)


def to_env_actions(policy: Any, action_space: spaces.Space[Any], actions: Array) -> Array:
    """What the environments get for the policy's actions: unscaled or clipped for Box spaces, as in SB3."""
    if not isinstance(action_space, spaces.Box):
        return actions
    if policy.squash_output:
        return np.asarray(policy.unscale_action(actions))
    return np.clip(actions, action_space.low, action_space.high)
