"""``HTSA2C``: SB3's A2C, collecting while it trains, with the paper's delayed gradient."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch as th
from stable_baselines3 import A2C
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule

from sb3_hts.algorithm import HTSOnPolicyAlgorithm
from sb3_hts.arguments import own_env
from sb3_hts.corrections import A2C_CORRECTIONS, Correction

SelfHTSA2C = TypeVar("SelfHTSA2C", bound="HTSA2C")


class HTSA2C(HTSOnPolicyAlgorithm, A2C):
    """Advantage Actor Critic with concurrent collection and delayed gradients (HTS-RL, arXiv 2012.09849).

    A drop-in for :class:`stable_baselines3.A2C`: all its arguments, with the same meaning and defaults, and those below.
    Rollout k + 1 is collected while update k runs: by the workers of an :class:`~sb3_hts.HTSVecEnv`, or by a thread if the
    environments are others.

    :param env: As in SB3; the name of an environment makes an ``HTSVecEnv`` of ``n_envs`` environments.
    :param n_envs: Number of environments, with a name only; 1 by default.
    :param policy_lag: 1: collect during the update. 0: collect, then train, as SB3 does; the data are then exactly
        on-policy.
    :param correction: ``"delayed_gradient"``: theta_{j+1} = theta_j + eta * grad J(theta_{j-1}), the gradient taken at the
        parameters that collected the rollout (the paper, equation (7)). ``"none"``: at the newest ones, as if the data
        were theirs. ``"truncated_is"``: the same with advantages weighted by min(pi_target / pi_behaviour, 1).
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

    corrections: ClassVar[dict[str, Correction]] = A2C_CORRECTIONS

    def __init__(
        self,
        policy: str | type[ActorCriticPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 7e-4,
        n_steps: int = 5,
        gamma: float = 0.99,
        gae_lambda: float = 1.0,
        ent_coef: float = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float = 0.5,
        rms_prop_eps: float = 1e-5,
        use_rms_prop: bool = True,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        rollout_buffer_class: type[RolloutBuffer] | None = None,
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        normalize_advantage: bool = False,
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
        correction: str = "delayed_gradient",
        inference: str = "auto",
        n_actors: int = 1,
        actor_device: th.device | str | None = None,
        central_batch: str = "auto",
    ) -> None:
        self.policy_lag = policy_lag
        # One gradient step per update leaves nothing to refresh the behaviour policy from
        self.n_snapshots = 1
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
                gamma=gamma,
                gae_lambda=gae_lambda,
                ent_coef=ent_coef,
                vf_coef=vf_coef,
                max_grad_norm=max_grad_norm,
                rms_prop_eps=rms_prop_eps,
                use_rms_prop=use_rms_prop,
                use_sde=use_sde,
                sde_sample_freq=sde_sample_freq,
                rollout_buffer_class=rollout_buffer_class,
                rollout_buffer_kwargs=rollout_buffer_kwargs,
                normalize_advantage=normalize_advantage,
                stats_window_size=stats_window_size,
                tensorboard_log=tensorboard_log,
                policy_kwargs=policy_kwargs,
                verbose=verbose,
                seed=seed,
                device=device,
                _init_setup_model=_init_setup_model,
            )

    def learn(
        self: SelfHTSA2C,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 100,
        tb_log_name: str = "HTSA2C",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfHTSA2C:
        """Train; arguments and result as in SB3.

        :raises WorkerError: If a worker failed; the model can be saved, the environments are gone.
        """
        with self._pipeline():
            return super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)
