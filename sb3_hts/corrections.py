"""What makes up for training on data of an older policy.

A correction is a choice on four points that do not depend on each other; the names that users know are combinations
(:data:`PPO_CORRECTIONS`, :data:`A2C_CORRECTIONS`). All of them act on SB3's buffer before SB3's own ``train()``, or around
it; none replaces it. They do nothing when the data are on-policy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_hts.collector import Position
from sb3_hts.policy_kinds import PolicyKind

Source = Literal["behaviour", "target"]

MAX_CHUNK, CHUNK_NUMBERS = 1024, 2**22
"""Rows per forward of the re-evaluation, and numbers in their observations: more of them fall out of the cache."""


@dataclass(frozen=True)
class Correction:
    """Where each ingredient of the update comes from: the policy that collected, or the one that is about to be updated.

    :param anchor: Log-probabilities that PPO's ratio and clip refer to.
    :param critic: Values, and with them the GAE advantages and returns. The bootstrap of truncated steps stays the
        behaviour critic's.
    :param max_weight: Multiply advantages by ``min(pi_target / pi_behaviour, max_weight)``; ``None``: do not.
    :param centre: Subtract the mean of the rollout's advantages before weighting.
    :param gradient: Parameters at which the gradient is taken.
    """

    anchor: Source = "behaviour"
    critic: Source = "behaviour"
    max_weight: float | None = None
    centre: bool = False
    gradient: Source = "target"

    @property
    def needs_evaluation(self) -> bool:
        """Whether the rollout must be evaluated under the target policy."""
        return self.anchor == "target" or self.critic == "target" or self.max_weight is not None


PPO_CORRECTIONS = {
    "proximal": Correction(anchor="target", critic="target"),
    "behaviour": Correction(),
    # Hilton, Cobbe, Schulman: "Batch size-invariance for policy optimization", 2021
    "decoupled": Correction(anchor="target", critic="target", max_weight=2.0, centre=True),
}

A2C_CORRECTIONS = {
    # The paper, section 3.2 and equation (7)
    "delayed_gradient": Correction(gradient="behaviour"),
    "none": Correction(),
    # The paper's ablation, after IMPALA
    "truncated_is": Correction(max_weight=1.0),
}


@dataclass(frozen=True)
class Collected:
    """What the buffer need not hold any more.

    :param observations: ``(n_steps, n_envs, ...)``, by key for Dict spaces.
    :param rewards: As they were before returns were computed from them; some buffers add to them then.
    :param end: What came after the rollout's last step.
    :param shapes: Of the buffer's arrays before it was read.
    """

    observations: Any
    rewards: npt.NDArray[np.float32]
    end: Position
    shapes: dict[str, Any]


def correct_rollout(
    correction: Correction,
    policy: ActorCriticPolicy,
    buffer: RolloutBuffer,
    collected: Collected,
    kind: PolicyKind,
    changed: Collection[str] = (),
) -> None:
    """Change a filled buffer as the correction says.

    :param collected: Of the same rollout.
    :param kind: Of the policy.
    :param changed: Result of :func:`noting_changes`; what a callback has put there stays.
    """
    if not correction.needs_evaluation:
        return
    policy.set_training_mode(False)
    unread(buffer, collected.shapes, kind)
    values, log_probs = evaluate(policy, buffer, _stored(buffer.observations, collected.observations), kind)
    weights = np.exp(log_probs - buffer.log_probs)
    if correction.critic == "target" and not {"values", "advantages", "returns"} & set(changed):
        buffer.values = values
        buffer.rewards = collected.rewards
        end = collected.end
        with th.no_grad():
            arguments = _to_tensor(policy, kind.last_values(end))
            last_values = policy.predict_values(_to_tensor(policy, end.observations), **arguments)
        buffer.compute_returns_and_advantage(last_values=last_values, dones=end.episode_starts)
    if correction.max_weight is not None:
        advantages = buffer.advantages - buffer.advantages.mean() if correction.centre else buffer.advantages
        buffer.advantages = advantages * np.minimum(weights, np.float32(correction.max_weight))
    if correction.anchor == "target" and "log_probs" not in changed:
        buffer.log_probs = log_probs


CORRECTED = ("values", "advantages", "returns", "log_probs")
"""Arrays of the buffer that :func:`correct_rollout` overwrites."""


@contextmanager
def noting_changes(buffer: RolloutBuffer, kind: PolicyKind) -> Iterator[set[str]]:
    """Find out which of :data:`CORRECTED` the block changes; the set is complete at its end.

    The block may read the buffer; what that does to its arrays is undone.
    """
    changed: set[str] = set()
    before = {name: getattr(buffer, name).copy() for name in CORRECTED}
    shapes = shapes_of(buffer)
    yield changed
    unread(buffer, shapes, kind)
    changed |= {name for name, array in before.items() if not np.array_equal(array, getattr(buffer, name), equal_nan=True)}


def shapes_of(buffer: RolloutBuffer) -> dict[str, Any]:
    """The shapes of a buffer's arrays, for :func:`unread`."""
    return {name: _shapes(value) for name, value in vars(buffer).items() if isinstance(value, (np.ndarray, dict))}


def unread(buffer: RolloutBuffer, shapes: dict[str, Any], kind: PolicyKind) -> None:
    """Make a buffer what it was before somebody read it.

    :param shapes: Result of :func:`shapes_of`, before.
    """
    if buffer.generator_ready:
        for name, shape in shapes.items():
            setattr(buffer, name, _unflatten(getattr(buffer, name), shape, buffer, name in kind.swapped))
        buffer.generator_ready = False


def _shapes(arrays: Any) -> Any:
    return {key: _shapes(array) for key, array in arrays.items()} if isinstance(arrays, dict) else np.shape(arrays)


def _unflatten(arrays: Any, shapes: Any, buffer: RolloutBuffer, swapped: bool) -> Any:
    """Undo what the first ``buffer.get()`` did to an array; the next one does it again."""
    if isinstance(arrays, dict):
        return {key: _unflatten(array, shapes[key], buffer, swapped) for key, array in arrays.items()}
    if np.shape(arrays) == shapes or np.size(arrays) != np.prod(shapes):
        return arrays
    by_step = arrays.reshape(buffer.n_envs, buffer.buffer_size, *arrays.shape[1:]).swapaxes(0, 1)
    return np.ascontiguousarray(by_step.swapaxes(1, 2) if swapped else by_step).reshape(shapes)


@th.no_grad()
def evaluate(
    policy: ActorCriticPolicy, buffer: RolloutBuffer, observations: Any, kind: PolicyKind
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Values and log-probabilities of a buffer's transitions under a policy, in chunks of :func:`chunk_size` rows.

    Masks and memories are those that the behaviour policy had.

    :return: Both ``(n_steps, n_envs)`` float32.
    """
    shape = buffer.values.shape
    n_rows = buffer.values.size
    if isinstance(observations, dict):
        flat: Any = {key: array.reshape(n_rows, *array.shape[2:]) for key, array in observations.items()}
    else:
        flat = observations.reshape(n_rows, *observations.shape[2:])
    actions = buffer.actions.reshape(n_rows, -1).astype(np.float32, copy=False)
    values, log_probs = np.empty(n_rows, np.float32), np.empty(n_rows, np.float32)
    size = chunk_size(n_rows, observations)
    for first in range(0, n_rows, size):
        rows = slice(first, first + size)
        chunk = {key: array[rows] for key, array in flat.items()} if isinstance(flat, dict) else flat[rows]
        taken = _to_tensor(policy, actions[rows])
        if isinstance(policy.action_space, spaces.Discrete):
            taken = taken.long().flatten()
        value, log_prob, _ = policy.evaluate_actions(
            _to_tensor(policy, chunk), taken, **_to_tensor(policy, kind.evaluation(buffer, rows))
        )
        values[rows] = value.flatten().cpu().numpy()
        log_probs[rows] = log_prob.cpu().numpy()
    return values.reshape(shape), log_probs.reshape(shape)


def _stored(stored: Any, collected: Any) -> Any:
    """The buffer's observations, which training will see; what was collected if the buffer stores something else of it."""
    if isinstance(collected, dict):
        return {key: _stored(stored[key] if isinstance(stored, dict) else None, array) for key, array in collected.items()}
    plain = isinstance(stored, np.ndarray) and stored.dtype != object and stored.shape[:2] == collected.shape[:2]
    return stored if plain else collected


def chunk_size(n_rows: int, observations: Any) -> int:
    """Rows per forward; a function of shapes only, since other batch shapes give other bits."""
    arrays = observations.values() if isinstance(observations, dict) else [observations]
    numbers_per_row: int = sum(array.size for array in arrays) // n_rows
    return max(1, min(MAX_CHUNK, CHUNK_NUMBERS // max(1, numbers_per_row)))


def _to_tensor(policy: ActorCriticPolicy, arrays: Any) -> Any:
    """A contiguous, aligned copy, as SB3's buffers give to ``train()``; other places in memory can give other bits."""
    if isinstance(arrays, dict):
        return {key: _to_tensor(policy, array) for key, array in arrays.items()}
    if isinstance(arrays, tuple):
        parts = [_to_tensor(policy, array) for array in arrays]
        return type(arrays)(*parts) if hasattr(arrays, "_fields") else tuple(parts)
    return th.tensor(np.ascontiguousarray(arrays), device=policy.device)


@contextmanager
def gradient_at(values: Sequence[th.Tensor], parameters: Sequence[th.Tensor], policy: ActorCriticPolicy) -> Iterator[None]:
    """Take the next gradient at other parameters, and apply it to the current ones (the paper, equation (7)).

    theta_{j+1} = theta_j + eta * grad J(theta_{j-1}): while the loss is computed and differentiated, the policy's parameters
    point to ``values`` (theta_{j-1}); right before the optimizer steps, with its state, they point to theta_j again. Buffers
    stay: the batch-norm statistics that survive are the newest ones, as the forward updates them.

    :param values: theta_{j-1}.
    :param parameters: The policy's parameters, in the same order; they hold theta_j.
    :param policy: Whose they are. Meanwhile its ``state_dict()`` gives theta_j, for those who save it.
    """
    own = [parameter.data for parameter in parameters]
    pending = True

    def restore(*_: Any) -> None:
        nonlocal pending
        if pending:
            _point_to(parameters, own)
            pending = False

    def show_own(module: th.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        if pending:
            by_parameter = dict(zip(map(id, parameters), own, strict=True))
            for name, parameter in module.named_parameters(remove_duplicate=False):
                state[prefix + name] = by_parameter[id(parameter)]

    handles: list[Any] = [policy.optimizer.register_step_pre_hook(restore)]
    handles.append(policy.register_state_dict_post_hook(show_own))  # type: ignore[no-untyped-call]
    try:
        _point_to(parameters, [value.to(data.device) for value, data in zip(values, own, strict=True)])
        yield
    finally:
        for handle in handles:
            handle.remove()
        restore()


def _point_to(parameters: Sequence[th.Tensor], values: Sequence[th.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value
