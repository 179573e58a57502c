"""sb3-contrib's policies: masks of actions, and LSTMs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_hts.acting import GroupActor
from sb3_hts.collector import Position
from sb3_hts.policy_kinds import PolicyKind, Step
from sb3_hts.shared_arrays import Array, ArraySpec
from sb3_hts.storage import Half

MASKS = "action_masks"
"""The method of environments that gives the mask of their next action, as in sb3-contrib."""

MEMORY = ("hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf")
"""The LSTM states of actor and critic, in the order of ``RNNStates``; ``(n_envs, n_layers, hidden_size)`` float32 each."""


# --- masks ----------------------------------------------------------------------------------------------------------


class MaskedActor(GroupActor):
    """Acts under the masks of the step, which are read from the environments right before it."""

    def _compute(self, half: Half, t: int) -> Any:
        masks = half.extras[MASKS][t, self.columns] if MASKS in half.extras else None
        return self.policy(self._load(half, t), action_masks=masks)


class MaskedKind(PolicyKind):
    """Of ``MaskablePPO``."""

    actor_class = MaskedActor
    tells_end = False
    integral = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)

    def extras(self, model: Any) -> dict[str, ArraySpec]:
        return {MASKS: ArraySpec((model.rollout_buffer.mask_dims,), np.dtype(bool))} if model.use_masking else {}

    def loop_arguments(self, model: Any) -> dict[str, Any]:
        return {"use_masking": model.use_masking}

    def variables(self, step: Step) -> dict[str, Any]:
        return {"use_masking": MASKS in step.extras, MASKS: step.extras.get(MASKS)}

    def stored(self, step: Step) -> dict[str, Any]:
        return {MASKS: step.extras.get(MASKS)}

    def evaluation(self, buffer: Any, rows: slice) -> dict[str, Any]:
        return {MASKS: buffer.action_masks.reshape(-1, buffer.mask_dims)[rows]}


# --- LSTMs ----------------------------------------------------------------------------------------------------------


class RecurrentActor(GroupActor):
    """Acts with the group's LSTM states, which are reset where an episode begins."""

    def _compute(self, half: Half, t: int) -> Any:
        *outputs, states = self.policy(self._load(half, t), self._states(half, t), self._starts(half, t))
        for name, state in zip(MEMORY, [*states.pi, *states.vf], strict=True):
            half.memory[name][t + 1, self.columns] = state.transpose(0, 1).cpu().numpy()
        return outputs

    def _last_values(self, half: Half) -> Any:
        return self.policy.predict_values(self._load(half, -1), self._states(half, -1).vf, self._starts(half, len(half.dones)))

    def _terminal_value(self, half: Half, t: int, row: int, obs_tensor: Any) -> Any:
        states = tuple(state[:, row : row + 1].contiguous() for state in self._states(half, t + 1).vf)
        return self.policy.predict_values(obs_tensor, states, th.zeros(1, device=self._device))

    def _states(self, half: Half, t: int) -> RNNStates:
        return as_states({name: half.memory[name][t, self.columns] for name in MEMORY}, self._device)

    def _starts(self, half: Half, t: int) -> th.Tensor:
        """Which observations of row ``t`` begin an episode, as float32."""
        starts = half.dones[t - 1] if t else half.episode_starts
        return th.tensor(starts[self.columns], dtype=th.float32, device=self._device)

    @staticmethod
    def to_env(policy: ActorCriticPolicy, action_space: spaces.Space[Any], actions: Array) -> Array:
        """As ``RecurrentPPO``, which does not unscale."""
        if not isinstance(action_space, spaces.Box):
            return actions
        return np.clip(actions, action_space.low, action_space.high)


class RecurrentKind(PolicyKind):
    """Of ``RecurrentPPO``. The buffer stores the behaviour policy's states."""

    actor_class = RecurrentActor
    tells_end = False
    swapped = MEMORY

    def recall(self, model: Any) -> dict[str, Array]:
        states = model._last_lstm_states
        return {
            name: state.transpose(0, 1).cpu().numpy() for name, state in zip(MEMORY, [*states.pi, *states.vf], strict=True)
        }

    def remember(self, model: Any, memory: dict[str, Array]) -> None:
        model._last_lstm_states = as_states(memory, model.device)

    def variables(self, step: Step) -> dict[str, Any]:
        starts = th.tensor(step.before.episode_starts, dtype=th.float32, device=step.device)
        return {"lstm_states": as_states(step.after.memory, step.device), "episode_starts": starts}

    def stored(self, step: Step) -> dict[str, Any]:
        return {"lstm_states": as_states(step.before.memory, step.device)}

    def evaluation(self, buffer: RolloutBuffer, rows: slice) -> dict[str, Any]:
        # Every row is a sequence of its own, so that the states are those that the behaviour policy had
        parts = [getattr(buffer, name).swapaxes(1, 2) for name in MEMORY]
        hidden_pi, cell_pi, hidden_vf, cell_vf = (part.reshape(-1, *part.shape[2:])[rows].swapaxes(0, 1) for part in parts)
        starts = buffer.episode_starts.reshape(-1)[rows]
        return {"lstm_states": RNNStates((hidden_pi, cell_pi), (hidden_vf, cell_vf)), "episode_starts": starts}

    def last_values(self, end: Position) -> dict[str, Any]:
        states = tuple(end.memory[name].swapaxes(0, 1) for name in MEMORY[2:])
        return {"lstm_states": states, "episode_starts": end.episode_starts.astype(np.float32)}


def as_states(memory: dict[str, Array], device: Any) -> RNNStates:
    """What sb3-contrib passes around: tensors of ``(n_layers, n_envs, hidden_size)``, contiguous."""
    hidden_pi, cell_pi, hidden_vf, cell_vf = (
        th.tensor(np.ascontiguousarray(memory[name].swapaxes(0, 1)), device=device) for name in MEMORY
    )
    return RNNStates((hidden_pi, cell_pi), (hidden_vf, cell_vf))
