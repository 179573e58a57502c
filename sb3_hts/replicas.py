"""Copies of the policy that act while the learner changes the original.

A policy travels in two parts. Its *structure* is copied once: pickled by value for another process, without its optimizer and
with a number in place of each parameter and buffer. The *numbers* lie in parameter slots (:mod:`sb3_hts.slots`), where the
tensors of every replica are views: publishing is one copy by the learner, whatever the number of workers.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy
from torch.overrides import TorchFunctionMode

from sb3_hts.seeding import stream_seed
from sb3_hts.serialization import main_by_value
from sb3_hts.shared_arrays import aligned


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

    def view(self, slot: th.Tensor) -> th.Tensor:
        """The tensor over the given slot, which is so many bytes."""
        storage = slot[self.offset : self.offset + self.storage_nbytes].view(self.dtype)
        return storage.as_strided(self.size, self.stride, int(storage.storage_offset()) + self.storage_offset)


class PolicyTensors:
    """All parameters and buffers of a policy, persistent or not, and their place in a slot.

    A storage that several tensors share (tied weights) is laid out once.
    """

    def __init__(self, policy: ActorCriticPolicy) -> None:
        self.tensors: list[th.Tensor] = []
        self.specs: list[TensorSpec] = []
        self.nbytes = 0
        self.policy = policy
        self.parameters = list(policy.parameters())
        self.buffer_names = [name for name, _ in policy.named_buffers()]
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
    """Writes the learner's parameters into slots. Used by the learner's thread alone.

    :param tensors: Of the learner's policy.
    :param slots: The bytes of each slot, on any device.
    :param versions: What to write down the versions in, ``(n_slots, 2)``.
    """

    def __init__(self, tensors: PolicyTensors, slots: Sequence[th.Tensor], versions: npt.NDArray[np.int64]) -> None:
        self._policy = tensors.policy
        self._parameters = tensors.parameters
        self._buffer_names = tensors.buffer_names
        self._versions = versions
        self._views = [[spec.view(slot) for spec in tensors.specs] for slot in slots]

    @th.no_grad()
    def write(self, slot: int, version: tuple[int, int]) -> None:
        """Copy the current parameters and buffers into a slot.

        :param version: ``(update, gradient step)`` that made them.
        """
        views = self._views[slot]
        for view, source in zip(views, self._parameters, strict=False):
            view.copy_(source)
        # Buffers are looked up anew, because modules may assign new tensors to them; parameters are what is optimized
        buffers = dict(self._policy.named_buffers()) if self._buffer_names else {}
        for view, name in zip(views[len(self._parameters) :], self._buffer_names, strict=True):
            # One of another shape is a cache, of batches that only the learner sees
            if name in buffers and buffers[name].shape == view.shape:
                view.copy_(buffers[name])
        device = views[0].device
        if device.type == "cuda":
            th.cuda.current_stream(device).synchronize()  # other processes do not know our streams
        self._versions[slot] = version

    def parameters(self, slot: int) -> list[th.Tensor]:
        """What a slot holds for the policy's parameters, in their order: views of the slot."""
        return self._views[slot][: len(self._parameters)]


class _PolicyPickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle is not typed
    """Numbers instead of parameters, nothing instead of optimizers; other tensors go from one device to the other."""

    def __init__(self, file: io.BytesIO, numbers: dict[int, int], source: th.device, target: th.device) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._numbers = numbers
        self._source = source
        self._target = target

    def persistent_id(self, obj: object) -> int | None:
        return self._numbers.get(id(obj)) if isinstance(obj, th.Tensor) else None

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, th.optim.Optimizer):
            return type(None), ()
        if isinstance(obj, th.Tensor) and obj.device == self._source != self._target:
            return partial(th.as_tensor, device=self._target), (obj.detach().cpu().numpy(),)
        return super().reducer_override(obj)


class _PolicyUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[th.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> th.Tensor:
        return self._tensors[pid]


class UnportablePolicyError(TypeError):
    """A policy that cannot be copied."""


def dump_policy(tensors: PolicyTensors, device: th.device) -> bytes:
    """Serialise the structure of a policy, for another process.

    :param tensors: The policy's.
    :param device: Where it will act; what else is on the policy's device goes there.
    :raises UnportablePolicyError: If some part of the policy cannot be serialised.
    """
    numbers = {id(tensor): number for number, tensor in enumerate(tensors.tensors)}

    def dump(value: Any) -> bytes:
        buffer = io.BytesIO()
        with main_by_value():
            _PolicyPickler(buffer, numbers, tensors.policy.device, device).dump(value)
        return buffer.getvalue()

    try:
        return dump(tensors.policy)
    except Exception as error:
        culprit = _find_culprit(tensors.policy, dump)
        raise UnportablePolicyError(
            f"{culprit} cannot be pickled (remove it, or let its owner's __getstate__ leave it out): {error}"
        ) from error


def _find_culprit(policy: th.nn.Module, attempt: Callable[[Any], Any]) -> str:
    """The innermost attribute with which an attempt to serialise or copy it fails."""
    path, value, seen = "policy", policy, set[int]()
    while id(value) not in seen:
        seen.add(id(value))
        parts = dict(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, type) else {}
        for name in ("_modules", "_parameters", "_buffers"):
            parts.update(parts.pop(name, None) or {})
        for name, part in parts.items():
            try:
                attempt(part)
            except Exception:
                path, value = f"{path}.{name}", part
                break
    return path


def load_policy(data: bytes, tensors: list[th.Tensor]) -> ActorCriticPolicy:
    """Counterpart of :func:`dump_policy`.

    :param tensors: What takes the place of the policy's tensors, in their order.
    """
    policy: ActorCriticPolicy = _PolicyUnpickler(io.BytesIO(data), tensors).load()
    return policy


class _CopyingTensors(TorchFunctionMode):
    """Lets ``deepcopy`` copy tensors that are the result of a computation, too; gSDE's exploration matrices are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is th.Tensor.__deepcopy__:
            tensor, memo = args
            if not tensor.is_leaf:
                return memo.setdefault(id(tensor), tensor.detach().clone())
        return func(*args, **(kwargs or {}))


def copy_policy(
    policy: ActorCriticPolicy, originals: PolicyTensors, shared: Sequence[object], tensors: list[th.Tensor]
) -> ActorCriticPolicy:
    """A copy of the policy, without its optimizer, for another thread.

    :param originals: The policy's tensors.
    :param shared: What the policy may refer to and must not be copied: the environments.
    :param tensors: What takes their place, in their order.
    :raises UnportablePolicyError: If some part of the policy cannot be copied.
    """
    instead: dict[int, Any] = {id(original): tensor for original, tensor in zip(originals.tensors, tensors, strict=True)}
    instead[id(policy.optimizer)] = None
    instead |= {id(value): value for value in shared}

    def copy(part: Any) -> Any:
        with _CopyingTensors():
            return deepcopy(part, dict(instead))

    try:
        copied: ActorCriticPolicy = copy(policy)
    except Exception as error:
        raise UnportablePolicyError(f"{_find_culprit(policy, copy)} cannot be copied: {error}") from error
    return copied


class Replica:
    """A behaviour policy whose tensors are views of the slots.

    :param specs: The policy's tensors.
    :param slots: Where the parameters are: the bytes of each slot.
    :param make_policy: From tensors that take the place of the policy's, in the same order.
    :param noise_key: See :func:`sb3_hts.seeding.stream_seed`.
    :param seed: Seeds what the policy draws from; by default torch's global generator, which belongs to a worker alone.
    :param drawing: The context to draw in.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        slots: Sequence[th.Tensor],
        make_policy: Callable[[list[th.Tensor]], ActorCriticPolicy],
        noise_key: int,
        seed: Callable[[int], object] = th.default_generator.manual_seed,
        drawing: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._views = [[spec.view(slot) for spec in specs] for slot in slots]
        # Tensors of their own, since binding to another slot changes where they point
        self._tensors: list[th.Tensor] = [
            th.empty_like(view) if spec.requires_grad is None else th.nn.Parameter(view, spec.requires_grad)
            for view, spec in zip(self._views[0], specs, strict=True)
        ]
        self.policy = make_policy(self._tensors)
        self.policy.set_training_mode(False)
        numbers = {id(tensor): number for number, tensor in enumerate(self._tensors)}
        self._buffers = [
            (module, name, numbers[id(buffer)])
            for module in self.policy.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._noise_key = noise_key
        self._seed = seed
        self.drawing = drawing or nullcontext()
        self._slot = -1

    def bind(self, slot: int) -> None:
        """Act with a snapshot from now on; what forwards have done to buffers is undone."""
        if slot != self._slot:
            for tensor, view in zip(self._tensors, self._views[slot], strict=True):
                if isinstance(tensor, th.nn.Parameter):
                    tensor.data = view
            self._slot = slot
        for module, name, number in self._buffers:
            # A forward may have changed it or assigned another, and slots are everybody's
            setattr(module, name, self._tensors[number].copy_(self._views[slot][number]))

    def seed(self, group: int, step: int) -> None:
        """Seed what the policy draws from, for what one group does at one step."""
        self._seed(stream_seed(self._noise_key, group, step))


@dataclass(frozen=True)
class PortablePolicy:
    """A policy for other processes, apart from the numbers in its tensors.

    :param structure: Result of :func:`dump_policy`.
    :param tensors: In order of their numbers.
    :param slot_nbytes: Size of one slot.
    :param noise_key: See :func:`sb3_hts.seeding.stream_seed`.
    """

    structure: bytes
    tensors: tuple[TensorSpec, ...]
    slot_nbytes: int
    noise_key: int

    def make_replica(self, slots: Sequence[th.Tensor], *how: Any) -> Replica:
        """The replica over the given slots; arguments as of :class:`Replica`."""
        return Replica(self.tensors, slots, partial(load_policy, self.structure), self.noise_key, *how)
