"""``HTSPPO``: SB3's PPO, collecting while it trains."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule

from sb3_hts.algorithm import HTSOnPolicyAlgorithm
from sb3_hts.arguments import own_env
from sb3_hts.corrections import PPO_CORRECTIONS, Correction

SelfHTSPPO = TypeVar("SelfHTSPPO", bound="HTSPPO")


class HTSPPO(HTSOnPolicyAlgorithm, PPO):
    """Proximal Policy Optimization with concurrent collection (HTS-RL, arXiv 2012.09849).

    A drop-in for :class:`stable_baselines3.PPO`: all its arguments, with the same meaning and defaults, and those below.
    Rollout k + 1 is collected while update k runs: by the workers of an :class:`~sb3_hts.HTSVecEnv`, or by a thread if the
    environments are others.

    :param env: As in SB3; the name of an environment makes an ``HTSVecEnv`` of ``n_envs`` environments.
    :param n_envs: Number of environments, with a name only; 1 by default.
    :param policy_lag: 1: collect during the update. 0: collect, then train, as SB3 does; the data are then exactly
        on-policy.
    :param n_snapshots: How many times the behaviour policy of a rollout is refreshed from the update under way: step t
        acts with the parameters after floor(t S / n_steps) / S of the gradient steps. 1 is the paper's schedule. By default
        4, or ``n_steps`` if that is less.
    :param correction: ``"proximal"``: before the first epoch, log-probabilities, values and advantages are computed anew
        under the policy that is about to be updated, so that ratio and clip refer to it. ``"behaviour"``: as collected.
        ``"decoupled"``: as proximal, with the centred advantages weighted by min(pi_target / pi_behaviour, 2).
    :param inference: Where the behaviour policy runs: ``"local"``: in the workers, on the CPU; ``"central"``: in processes of
        its own, the actors, which serve whichever groups of environments are ready. ``"auto"``: local for a policy on the
        CPU, central otherwise.
    :param n_actors: Number of actors, with central inference only. Does not influence results.
    :param actor_device: Where actors act; by default where the policy is.
    :param central_batch: What actors forward: ``"full"``: a batch of all environments, ready or not; ``"group"``: each ready
        group by itself, which works with any policy. ``"auto"`` chooses full for policies whose modules are all SB3's and
        torch's, and which use no gSDE. Part of the numerics.
    :raises ValueError: If one of them is out of range.
    """

    corrections: ClassVar[dict[str, Correction]] = PPO_CORRECTIONS

    def __init__(
        self,
        policy: str | type[ActorCriticPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 3e-4,
        n_steps: int = 2048,
        batch_size: int = 64,
        n_epochs: int = 10,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        clip_range: float | Schedule = 0.2,
        clip_range_vf: float | Schedule | None = None,
        normalize_advantage: bool = True,
        ent_coef: float = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float = 0.5,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        rollout_buffer_class: type[RolloutBuffer] | None = None,
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        target_kl: float | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
        *,
        n_envs: int | None = None,
        policy_lag: int = 1,
        n_snapshots: int | None = None,
        correction: str = "proximal",
        inference: str = "auto",
        n_actors: int = 1,
        actor_device: th.device | str | None = None,
        central_batch: str = "auto",
    ) -> None:
        self.policy_lag = policy_lag
        self.n_snapshots = n_snapshots  # type: ignore[assignment] # _setup_model() puts a number in the place of None
        self.correction = correction
        self.inference = inference
        self.n_actors = n_actors
        self.actor_device = actor_device  # type: ignore[assignment] # _setup_model() puts its name in the place
        self.central_batch = central_batch
        with own_env(env, n_envs) as vec_env:
            super().__init__(
                policy,
                vec_env,
                learning_rate=learning_rate,
                n_steps=n_steps,
                batch_size=batch_size,
                n_epochs=n_epochs,
                gamma=gamma,
                gae_lambda=gae_lambda,
                clip_range=clip_range,
                clip_range_vf=clip_range_vf,
                normalize_advantage=normalize_advantage,
                ent_coef=ent_coef,
                vf_coef=vf_coef,
                max_grad_norm=max_grad_norm,
                use_sde=use_sde,
                sde_sample_freq=sde_sample_freq,
                rollout_buffer_class=rollout_buffer_class,
                rollout_buffer_kwargs=rollout_buffer_kwargs,
                target_kl=target_kl,
                stats_window_size=stats_window_size,
                tensorboard_log=tensorboard_log,
                policy_kwargs=policy_kwargs,
                verbose=verbose,
                seed=seed,
                device=device,
                _init_setup_model=_init_setup_model,
            )

    def _n_gradient_steps(self) -> int:
        return self.n_epochs * -(-self.n_steps * self.n_envs // self.batch_size)

    def learn(
        self: SelfHTSPPO,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "HTSPPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfHTSPPO:
        """Train; arguments and result as in SB3.

        :raises WorkerError: If a worker failed; the model can be saved, the environments are gone.
        """
        with self._pipeline():
            return super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)
