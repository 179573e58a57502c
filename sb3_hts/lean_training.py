"""Spares SB3's ``train()`` what the interpreter does around the arithmetic; bitwise the same result.

``train()`` itself stays SB3's. While it runs, some methods of the policy are shadowed by cheaper ones that give the same:
``evaluate_actions`` (:mod:`sb3_hts.lean_policy`), and ``parameters`` and ``train``, which otherwise search all modules each
time. torch's own optimizers update all parameters with one call per operator (``foreach``), as they do by default on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_hts.lean_policy import lean_evaluation

EXACT_FOREACH = (th.optim.SGD, th.optim.Adam, th.optim.AdamW, th.optim.RMSprop)
"""Optimizers whose result does not depend on ``foreach``."""


@contextmanager
def lean_training(policy: ActorCriticPolicy) -> Iterator[None]:
    """The scope of an update, within which modules and parameters of the policy stay the same objects."""
    methods = _cheaper_methods(policy)
    methods["__getstate__"] = partial(_state_without, policy, frozenset([*methods, "__getstate__"]))
    groups = _foreach_groups(policy.optimizer)
    for group in groups:
        group["foreach"] = True
    hidden = policy.optimizer.register_state_dict_post_hook(partial(_hide_foreach, groups))
    # Past nn.Module.__setattr__, which is slow and has nothing to do here
    vars(policy).update(methods)
    try:
        yield
    finally:
        for name in methods:
            vars(policy).pop(name, None)
        for group in groups:
            group["foreach"] = None
        hidden.remove()


def _hide_foreach(groups: list[dict[str, Any]], optimizer: th.optim.Optimizer, state: dict[str, Any]) -> None:
    """Leave no trace in a file that is saved meanwhile."""
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        if any(group is ours for ours in groups):
            saved["foreach"] = None


def _state_without(policy: ActorCriticPolicy, names: frozenset[str]) -> dict[str, Any]:
    """For copies that are made meanwhile: they must not have this policy's methods."""
    own = getattr(type(policy), "__getstate__", None)
    state = dict(vars(policy)) if own is getattr(object, "__getstate__", None) else own(policy)  # type: ignore[misc]
    return {name: value for name, value in state.items() if name not in names}


def _cheaper_methods(policy: ActorCriticPolicy) -> dict[str, Any]:
    modules = _modules(policy)
    methods: dict[str, Any] = {"evaluate_actions": lean_evaluation(policy)}
    if all(_has_plain_mode(module) for module in modules):

        def train(mode: bool = True) -> ActorCriticPolicy:
            for module in modules:
                vars(module)["training"] = mode
            return policy

        methods["train"] = train
    if not any(_overrides(policy, name) for name in ("parameters", "named_parameters")):
        stock = policy.parameters
        # In this order, each once: it decides the rounding of the gradient's norm
        parameters = dict.fromkeys(
            parameter for module in modules for parameter in module._parameters.values() if parameter is not None
        )
        methods["parameters"] = lambda recurse=True: iter(parameters) if recurse else stock(recurse)
    return methods


def _has_plain_mode(module: th.nn.Module) -> bool:
    """Whether ``train()`` only sets an attribute; TorchScript and compiled modules keep their mode elsewhere."""
    return not (_overrides(module, "train") or _overrides(module, "__setattr__") or hasattr(type(module), "training"))


def _modules(root: th.nn.Module) -> list[th.nn.Module]:
    """As ``root.modules()``, in the same order."""
    found: dict[th.nn.Module, None] = {}

    def visit(module: th.nn.Module) -> None:
        if module not in found:
            found[module] = None
            for child in module._modules.values():
                if child is not None:
                    visit(child)

    visit(root)
    return list(found)


def _overrides(module: th.nn.Module, method: str) -> bool:
    return method in vars(module) or getattr(type(module), method) is not getattr(th.nn.Module, method)


def _foreach_groups(optimizer: th.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups of parameters for which nobody has decided how they are updated."""
    if type(optimizer) not in EXACT_FOREACH:
        return []
    return [group for group in optimizer.param_groups if group["foreach"] is None and not group.get("fused")]
