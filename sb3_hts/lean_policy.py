"""SB3's ``policy.forward`` and ``policy.evaluate_actions`` without distribution objects; bitwise the same results.

For small networks a good part of either is the construction and validation of :mod:`torch.distributions` objects. The
functions here call the same modules of the policy, hooks and all, and then the operators that those objects would call, in the
same order, so that gradients are bitwise the same too. They apply to SB3's own policies as long as nothing they replace
is overridden; all others are called as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch as th
from stable_baselines3.common.distributions import CategoricalDistribution, DiagGaussianDistribution
from stable_baselines3.common.policies import ActorCriticPolicy

Forward = Callable[[Any], tuple[th.Tensor, th.Tensor, th.Tensor]]
Evaluation = Callable[[Any, th.Tensor], tuple[th.Tensor, th.Tensor, th.Tensor | None]]


@dataclass(frozen=True)
class _Categorical:
    """As ``Categorical(logits=parameters)``."""

    log_pmf: th.Tensor

    @classmethod
    def of(cls, policy: ActorCriticPolicy, parameters: th.Tensor) -> _Categorical:
        return cls(parameters - parameters.logsumexp(dim=-1, keepdim=True))

    def sample(self) -> th.Tensor:
        # NaN is an error of multinomial()
        return th.multinomial(self.log_pmf.softmax(dim=-1), 1, replacement=True).squeeze(-1)

    def log_prob(self, actions: th.Tensor) -> th.Tensor:
        return self.log_pmf.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> th.Tensor:
        clamped = th.clamp(self.log_pmf, min=th.finfo(self.log_pmf.dtype).min)
        return -(clamped * self.log_pmf.softmax(dim=-1)).sum(-1)


@dataclass(frozen=True)
class _Gaussian:
    """As ``Normal(parameters, exp(log_std))``, independent over dimensions."""

    mean: th.Tensor
    scale: th.Tensor

    @classmethod
    def of(cls, policy: ActorCriticPolicy, parameters: th.Tensor) -> _Gaussian:
        return cls(parameters, th.ones_like(parameters) * policy.log_std.exp())

    def sample(self) -> th.Tensor:
        if not th.isfinite(self.mean).all():
            raise ValueError(f"The policy's action mean is not finite: {self.mean}")
        return self.mean + th.normal(th.zeros_like(self.mean), th.ones_like(self.mean)) * self.scale

    def log_prob(self, actions: th.Tensor) -> th.Tensor:
        variance, log_scale = self.scale**2, self.scale.log()
        log_probs = -((actions - self.mean) ** 2) / (2 * variance) - log_scale - math.log(math.sqrt(2 * math.pi))
        return log_probs.sum(dim=1)

    def entropy(self) -> th.Tensor:
        return (0.5 + 0.5 * math.log(2 * math.pi) + th.log(self.scale)).sum(dim=1)


_STOCK = {name: getattr(ActorCriticPolicy, name) for name in ("forward", "evaluate_actions", "_get_action_dist_from_latent")}
_DISTRIBUTIONS: dict[type[Any], type[_Categorical] | type[_Gaussian]] = {
    CategoricalDistribution: _Categorical,
    DiagGaussianDistribution: _Gaussian,
}


def lean_forward(policy: ActorCriticPolicy) -> Forward:
    """The cheapest function that does what ``policy(obs)`` does.

    :param policy: In evaluation mode.
    :return: Observations to ``(actions, values, log_probs)``; call it without gradients.
    """
    distribution_class = _distribution_of(policy, "forward")
    # Calling the module itself runs its hooks
    if distribution_class is None or policy._forward_hooks or policy._forward_pre_hooks:
        return policy

    def forward(obs: Any) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        latent_pi, latent_vf = _latents(policy, obs)
        values = policy.value_net(latent_vf)
        distribution = distribution_class.of(policy, policy.action_net(latent_pi))
        actions = distribution.sample()
        log_probs = distribution.log_prob(actions)
        return actions.reshape((-1, *policy.action_space.shape)), values, log_probs  # type: ignore[misc]

    return forward


def lean_evaluation(policy: ActorCriticPolicy) -> Evaluation:
    """The cheapest function that does what ``policy.evaluate_actions`` does.

    :return: Observations and actions to ``(values, log_probs, entropies)``.
    """
    stock = policy.evaluate_actions
    distribution_class = _distribution_of(policy, "evaluate_actions")
    if distribution_class is None:
        return stock

    def evaluate_actions(obs: Any, actions: th.Tensor) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        latent_pi, latent_vf = _latents(policy, obs)
        distribution = distribution_class.of(policy, policy.action_net(latent_pi))
        log_probs = distribution.log_prob(actions)
        if math.isnan(log_probs.detach().sum().item()):
            return stock(obs, actions)  # which says what is wrong
        return policy.value_net(latent_vf), log_probs, distribution.entropy()

    return evaluate_actions


def _distribution_of(policy: ActorCriticPolicy, method: str) -> type[_Categorical] | type[_Gaussian] | None:
    """What takes the place of the policy's distribution in a method; ``None`` if the method must be called as it is."""
    for name in (method, "_get_action_dist_from_latent"):
        if name in vars(policy) or getattr(type(policy), name, None) is not _STOCK[name]:
            return None
    return _DISTRIBUTIONS.get(type(getattr(policy, "action_dist", None)))


def _latents(policy: ActorCriticPolicy, obs: Any) -> Any:
    """Inputs of the action net and of the value net."""
    features = policy.extract_features(obs)
    if policy.share_features_extractor:
        return policy.mlp_extractor(features)
    return policy.mlp_extractor.forward_actor(features[0]), policy.mlp_extractor.forward_critic(features[1])
