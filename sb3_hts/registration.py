"""Environments registered in the main process, for workers, which do not import the main module.

``gym.make("ALE/Pong-v5")`` in an ``env_fn`` needs what ``gym.register_envs(ale_py)`` or ``gym.register(...)`` did in the
user's script. Gymnasium's own environments are registered by its import, everything else travels with the ``env_fns``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from sb3_hts.serialization import dumps_by_value, loads


def dump_registrations() -> bytes:
    """Serialise what has been registered here beyond Gymnasium's own; what cannot be serialised stays behind."""
    specs = {name: spec for name, spec in gym.registry.items() if not str(spec.entry_point).startswith("gymnasium.envs.")}
    try:
        return dumps_by_value(specs)
    except Exception:  # one bad registration, which may have nothing to do with us, must not spoil the others
        return dumps_by_value({name: spec for name, spec in specs.items() if _can_travel(spec)})


def load_registrations(data: bytes) -> None:
    """Register what :func:`dump_registrations` found, unless the name is taken."""
    # A package that an environment imports later may register the same names once more
    warnings.filterwarnings("ignore", message=".*Overriding environment .* already in registry")
    specs: Mapping[str, EnvSpec] = loads(data)
    for name, spec in specs.items():
        gym.registry.setdefault(name, spec)


def _can_travel(spec: EnvSpec) -> bool:
    try:
        dumps_by_value(spec)
    except Exception:
        return False
    return True
