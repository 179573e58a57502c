"""``HTSMaskablePPO``, ``HTSRecurrentPPO``, ``HTSTRPO``: sb3-contrib's algorithms, collecting while they train.

Needs the extra ``contrib``.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch as th
from sb3_contrib import TRPO, MaskablePPO, RecurrentPPO
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from sb3_contrib.common.maskable.utils import is_masking_supported
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_hts.algorithm import HTSOnPolicyAlgorithm
from sb3_hts.arguments import own_env
from sb3_hts.contrib_kinds import MaskedKind, RecurrentKind
from sb3_hts.corrections import PPO_CORRECTIONS, Correction
from sb3_hts.policy_kinds import PolicyKind

SelfHTSMaskablePPO = TypeVar("SelfHTSMaskablePPO", bound="HTSMaskablePPO")
SelfHTSRecurrentPPO = TypeVar("SelfHTSRecurrentPPO", bound="HTSRecurrentPPO")
SelfHTSTRPO = TypeVar("SelfHTSTRPO", bound="HTSTRPO")


class _HTSContribAlgorithm(HTSOnPolicyAlgorithm):
    """Takes the arguments beyond sb3-contrib's, and hands the others on."""

    corrections: ClassVar[dict[str, Correction]] = PPO_CORRECTIONS

    def __init__(
        self,
        policy: str | type[BasePolicy],
        env: GymEnv | str,
        *args: Any,
        n_envs: int | None = None,
        policy_lag: int = 1,
        n_snapshots: int | None = None,
        correction: str = "proximal",
        inference: str = "auto",
        n_actors: int = 1,
        actor_device: th.device | str | None = None,
        central_batch: str = "auto",
        **kwargs: Any,
    ) -> None:
        self.policy_lag = policy_lag
        self.n_snapshots = n_snapshots  # type: ignore[assignment] # _setup_model() puts a number in the place of None
        self.correction = correction
        self.inference = inference
        self.n_actors = n_actors
        self.actor_device = actor_device  # type: ignore[assignment] # _setup_model() puts its name in the place
        self.central_batch = central_batch
        with own_env(env, n_envs) as vec_env:
            super().__init__(policy, vec_env, *args, **kwargs)  # type: ignore[arg-type]

    def _n_gradient_steps(self) -> int:
        model: Any = self
        size = self.n_steps * self.n_envs
        return int(model.n_epochs * -(-size // (model.batch_size or size)))


class HTSMaskablePPO(_HTSContribAlgorithm, MaskablePPO):
    """PPO with invalid action masking and concurrent collection.

    A drop-in for :class:`sb3_contrib.MaskablePPO`: all its arguments, with the same meaning and defaults, and those that
    :class:`~sb3_hts.HTSPPO` adds (``n_envs``, ``policy_lag``, ``n_snapshots``, ``correction``, ``inference``, ``n_actors``,
    ``actor_device``, ``central_batch``). Masks are
    read inside the workers, from the environments' method ``action_masks``, right before each step.

    :raises ValueError: If an argument is out of range.
    """

    kind: ClassVar[PolicyKind] = MaskedKind()
    use_masking = True

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "use_masking"]

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: RolloutBuffer,
        n_rollout_steps: int,
        use_masking: bool = True,
    ) -> bool:
        """Wait for the rollout in flight, replay it, launch the next one; arguments and result as in sb3-contrib.

        :raises WorkerError: If a worker failed.
        :raises ValueError: If masks are wanted and the environments have none.
        """
        if self._run is None:
            masked_buffers = (MaskableRolloutBuffer, MaskableDictRolloutBuffer)
            assert isinstance(rollout_buffer, masked_buffers), "RolloutBuffer doesn't support action masking"
            if use_masking and not is_masking_supported(env):
                raise ValueError("Environment does not support action masking. Consider using ActionMasker wrapper")
            self.use_masking = use_masking
        return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)

    def learn(  # type: ignore[override]
        self: SelfHTSMaskablePPO,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "HTSMaskablePPO",
        reset_num_timesteps: bool = True,
        use_masking: bool = True,
        progress_bar: bool = False,
    ) -> SelfHTSMaskablePPO:
        """Train; arguments and result as in sb3-contrib.

        :raises WorkerError: If a worker failed; the model can be saved, the environments are gone.
        """
        with self._pipeline():
            return super().learn(
                total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, use_masking, progress_bar
            )


class HTSRecurrentPPO(_HTSContribAlgorithm, RecurrentPPO):
    """PPO with LSTM policies and concurrent collection.

    A drop-in for :class:`sb3_contrib.RecurrentPPO`: all its arguments, with the same meaning and defaults, and those that
    :class:`~sb3_hts.HTSPPO` adds (``n_envs``, ``policy_lag``, ``n_snapshots``, ``correction``, ``inference``, ``n_actors``,
    ``actor_device``, ``central_batch``). LSTM states
    live with the group; the buffer stores those of the behaviour policy, also where log-probabilities and values are
    computed anew.

    :raises ValueError: If an argument is out of range.
    """

    kind: ClassVar[PolicyKind] = RecurrentKind()

    def learn(
        self: SelfHTSRecurrentPPO,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "HTSRecurrentPPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfHTSRecurrentPPO:
        """Train; arguments and result as in sb3-contrib.

        :raises WorkerError: If a worker failed; the model can be saved, the environments are gone.
        """
        with self._pipeline():
            return super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)


class HTSTRPO(_HTSContribAlgorithm, TRPO):
    """Trust Region Policy Optimization with concurrent collection.

    A drop-in for :class:`sb3_contrib.TRPO`: all its arguments, with the same meaning and defaults, and those that
    :class:`~sb3_hts.HTSPPO` adds, except ``n_snapshots``: the policy takes one step per update, which leaves nothing to
    refresh the behaviour policy from.

    :raises ValueError: If an argument is out of range.
    """

    def __init__(self, policy: str | type[BasePolicy], env: GymEnv | str, *args: Any, **kwargs: Any) -> None:
        if "n_snapshots" in kwargs:
            raise TypeError("HTSTRPO has no argument n_snapshots: its policy takes one step per update.")
        super().__init__(policy, env, *args, n_snapshots=1, **kwargs)

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if self.n_snapshots != 1:
            raise ValueError(f"n_snapshots must be 1, not {self.n_snapshots}: HTSTRPO's policy takes one step per update.")

    def _n_gradient_steps(self) -> int:
        return 1

    def learn(
        self: SelfHTSTRPO,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "HTSTRPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfHTSTRPO:
        """Train; arguments and result as in sb3-contrib.

        :raises WorkerError: If a worker failed; the model can be saved, the environments are gone.
        """
        with self._pipeline():
            return super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)
