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
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    MultiCategoricalDistribution,
)
from stable_baselines3.common.policies import ActorCriticPolicy

Forward = Callable[[Any], tuple[th.Tensor, th.Tensor, th.Tensor]]
Parameters = tuple[th.Tensor, ...]
"""Of a distribution, each ``(batch, ...)``."""
Network = Callable[[Any], tuple[Parameters, th.Tensor]]
Sampler = Callable[[Parameters], tuple[th.Tensor, th.Tensor]]
Evaluation = Callable[[Any, th.Tensor], tuple[th.Tensor, th.Tensor, th.Tensor | None]]


@dataclass(frozen=True)
class _Categorical:
    """As ``Categorical(logits=logits)``."""

    log_pmf: th.Tensor

    @classmethod
    def of(cls, logits: th.Tensor) -> _Categorical:
        return cls(logits - logits.logsumexp(dim=-1, keepdim=True))

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
    """As ``Normal(mean, scale)``, independent over dimensions."""

    mean: th.Tensor
    scale: th.Tensor

    @classmethod
    def of(cls, mean: th.Tensor, scale: th.Tensor) -> _Gaussian:
        return cls(mean, scale)

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


_METHODS = ("forward", "evaluate_actions", "predict_values", "_get_action_dist_from_latent")
_STOCK = {name: getattr(ActorCriticPolicy, name) for name in _METHODS}
_DISTRIBUTIONS: dict[type[Any], type[_Categorical] | type[_Gaussian]] = {
    CategoricalDistribution: _Categorical,
    DiagGaussianDistribution: _Gaussian,
}
_DIVISIBLE = (*_DISTRIBUTIONS, MultiCategoricalDistribution, BernoulliDistribution)


def lean_forward(policy: ActorCriticPolicy) -> Forward:
    """The cheapest function that does what ``policy(obs)`` does.

    :param policy: In evaluation mode.
    :return: Observations to ``(actions, values, log_probs)``; call it without gradients.
    """
    distribution_class = _distribution_of(policy, "forward")
    network = lean_network(policy)
    if distribution_class is None or network is None:
        return policy
    sample = lean_sampler(policy)

    def forward(obs: Any) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        parameters, values = network(obs)
        actions, log_probs = sample(parameters)
        return actions, values, log_probs

    return forward


def lean_network(policy: ActorCriticPolicy) -> Network | None:
    """``policy(obs)`` up to where it draws from the distribution; ``None`` if it does not divide there.

    :param policy: In evaluation mode.
    :return: Observations to ``(parameters of the distribution, values)``; call it without gradients.
    """
    # Calling the module itself runs its hooks
    if not is_stock(policy, "forward") or policy._forward_hooks or policy._forward_pre_hooks:
        return None
    if type(policy.action_dist) not in _DIVISIBLE:
        return None

    def network(obs: Any) -> tuple[Parameters, th.Tensor]:
        latent_pi, latent_vf = _latents(policy, obs)
        values = policy.value_net(latent_vf)
        return _parameters(policy, latent_pi), values

    return network


def lean_sampler(policy: ActorCriticPolicy) -> Sampler:
    """What ``policy(obs)`` does from where :func:`lean_network` ends.

    :return: Parameters of the distribution, on any device, to ``(actions, log_probs)``.
    """
    shape: Any = policy.action_space.shape
    distribution_class = _DISTRIBUTIONS.get(type(policy.action_dist))

    def sample(parameters: Parameters) -> tuple[th.Tensor, th.Tensor]:
        if distribution_class is not None:
            distribution: Any = distribution_class.of(*parameters)
            actions = distribution.sample()
        else:
            distribution = policy.action_dist.proba_distribution(*parameters)
            actions = distribution.get_actions()
        return actions.reshape((-1, *shape)), distribution.log_prob(actions)

    return sample


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
        distribution = distribution_class.of(*_parameters(policy, latent_pi))
        log_probs = distribution.log_prob(actions)
        if math.isnan(log_probs.detach().sum().item()):
            return stock(obs, actions)  # which says what is wrong
        return policy.value_net(latent_vf), log_probs, distribution.entropy()

    return evaluate_actions


def is_stock(policy: ActorCriticPolicy, method: str) -> bool:
    """Whether neither a method nor how it makes its distribution has been overridden."""
    names = (method, "_get_action_dist_from_latent")
    return all(name not in vars(policy) and getattr(type(policy), name, None) is _STOCK[name] for name in names)


def _distribution_of(policy: ActorCriticPolicy, method: str) -> type[_Categorical] | type[_Gaussian] | None:
    """What takes the place of the policy's distribution in a method; ``None`` if the method must be called as it is."""
    return _DISTRIBUTIONS.get(type(policy.action_dist)) if is_stock(policy, method) else None


def _parameters(policy: ActorCriticPolicy, latent_pi: th.Tensor) -> Parameters:
    """Of one of SB3's distributions that have no state."""
    outputs = policy.action_net(latent_pi)
    if isinstance(policy.action_dist, DiagGaussianDistribution):
        return outputs, th.ones_like(outputs) * policy.log_std.exp()
    return (outputs,)


def _latents(policy: ActorCriticPolicy, obs: Any) -> Any:
    """Inputs of the action net and of the value net."""
    features = policy.extract_features(obs)
    if policy.share_features_extractor:
        return policy.mlp_extractor(features)
    return policy.mlp_extractor.forward_actor(features[0]), policy.mlp_extractor.forward_critic(features[1])
