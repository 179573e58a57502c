"""SB3's ``policy.forward`` without its distribution objects; bitwise the same result.

For small networks most of a forward is the construction and validation of :mod:`torch.distributions` objects. This calls the
same modules of the policy, hooks and all, and then the same operators that those objects would call, in the same order.
It applies to SB3's own policies as long as nothing it replaces is overridden (:func:`lean_forward`); all others are
called as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch as th
from stable_baselines3.common.distributions import CategoricalDistribution, DiagGaussianDistribution
from stable_baselines3.common.policies import ActorCriticPolicy

Forward = Callable[[Any], tuple[th.Tensor, th.Tensor, th.Tensor]]
Sampler = Callable[[ActorCriticPolicy, th.Tensor], tuple[th.Tensor, th.Tensor]]

_REPLACED = ("forward", "_get_action_dist_from_latent")


def lean_forward(policy: ActorCriticPolicy) -> Forward:
    """The cheapest function that does what ``policy.forward`` does.

    :param policy: In evaluation mode.
    :return: Observations to ``(actions, values, log_probs)``; call it without gradients.
    """
    sampler = _SAMPLERS.get(type(getattr(policy, "action_dist", None)))
    overridden = any(
        name in vars(policy) or getattr(type(policy), name, None) is not getattr(ActorCriticPolicy, name) for name in _REPLACED
    )
    # Calling the module itself runs its hooks
    if sampler is None or overridden or policy._forward_hooks or policy._forward_pre_hooks:
        return policy

    def forward(obs: Any) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        features = policy.extract_features(obs)
        if policy.share_features_extractor:
            latent_pi, latent_vf = policy.mlp_extractor(features)
        else:
            latent_pi = policy.mlp_extractor.forward_actor(features[0])
            latent_vf = policy.mlp_extractor.forward_critic(features[1])
        values = policy.value_net(latent_vf)
        actions, log_probs = sampler(policy, policy.action_net(latent_pi))
        return actions.reshape((-1, *policy.action_space.shape)), values, log_probs  # type: ignore[misc]

    return forward


def _sample_categorical(_: ActorCriticPolicy, logits: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
    """As ``Categorical(logits=logits)``; NaN is an error of ``multinomial``."""
    normalized = logits - logits.logsumexp(dim=-1, keepdim=True)
    actions = th.multinomial(normalized.softmax(dim=-1), 1, replacement=True)
    return actions.squeeze(-1), normalized.gather(-1, actions).squeeze(-1)


def _sample_gaussian(policy: ActorCriticPolicy, mean: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
    """As ``Normal(mean, exp(log_std))``, independent over dimensions."""
    if not th.isfinite(mean).all():
        raise ValueError(f"The policy's action mean is not finite: {mean}")
    scale = th.ones_like(mean) * policy.log_std.exp()
    actions = mean + th.normal(th.zeros_like(mean), th.ones_like(mean)) * scale
    log_probs = -((actions - mean) ** 2) / (2 * scale**2) - scale.log() - math.log(math.sqrt(2 * math.pi))
    return actions, log_probs.sum(dim=1)


_SAMPLERS: dict[type[Any], Sampler] = {
    CategoricalDistribution: _sample_categorical,
    DiagGaussianDistribution: _sample_gaussian,
}
