"""Environments registered in the main process, for workers, which do not import the main module.

``gym.make("ALE/Pong-v5")`` in an ``env_fn`` needs what ``gym.register_envs(ale_py)`` or ``gym.register(...)`` did in the
user's script, and what their entry points name in the main module. Gymnasium's own environments are registered by its import,
everything else travels with the ``env_fns``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from sb3_hts.serialization import dumps_by_value, loads


def dump_registrations() -> bytes:
    """Serialise what has been registered here beyond Gymnasium's own; what cannot be serialised stays behind."""
    specs = {name: spec for name, spec in gym.registry.items() if not str(spec.entry_point).startswith("gymnasium.envs.")}
    named = _named_in_main(specs)
    try:
        return dumps_by_value((specs, named))
    except Exception:  # one bad registration, which may have nothing to do with us, must not spoil the others
        return dumps_by_value(
            tuple({key: value for key, value in part.items() if _can_travel(value)} for part in (specs, named))
        )


def _named_in_main(specs: Mapping[str, EnvSpec]) -> dict[str, Any]:
    """What entry points such as ``"__main__:MyEnv"`` refer to, by the name that has to be in the main module."""
    entry_points = [spec.entry_point for spec in specs.values()]
    entry_points += [wrapper.entry_point for spec in specs.values() for wrapper in spec.additional_wrappers]
    main = vars(sys.modules["__main__"])
    named = {}
    for entry_point in entry_points:
        module, _, attribute = str(entry_point).partition(":")
        name = attribute.partition(".")[0]
        if module == "__main__" and name in main:
            named[name] = main[name]
    return named


def load_registrations(data: bytes) -> None:
    """Register what :func:`dump_registrations` found, unless the name is taken."""
    # A package that an environment imports later may register the same names once more
    warnings.filterwarnings("ignore", message=".*Overriding environment .* already in registry")
    specs, named = loads(data)
    for name, value in named.items():
        vars(sys.modules["__main__"]).setdefault(name, value)
    for name, spec in specs.items():
        gym.registry.setdefault(name, spec)


def _can_travel(value: Any) -> bool:
    try:
        dumps_by_value(value)
    except Exception:
        return False
    return True
