"""HTS-RL ("High-Throughput Synchronous Deep RL", NeurIPS 2020) for Stable-Baselines3.

``HTSPPO`` and ``HTSA2C`` replace SB3's ``PPO`` and ``A2C``; ``HTSVecEnv`` replaces ``SubprocVecEnv``. With the extra
``contrib``, ``HTSMaskablePPO``, ``HTSRecurrentPPO`` and ``HTSTRPO`` replace sb3-contrib's algorithms.
"""

from typing import TYPE_CHECKING, Any

from sb3_hts.a2c import HTSA2C
from sb3_hts.errors import (
    ClosedError,
    HTSError,
    ProtocolError,
    WorkerDied,
    WorkerError,
    WorkerRaised,
    WorkerTimeout,
)
from sb3_hts.ppo import HTSPPO
from sb3_hts.vec_env import HTSVecEnv
from sb3_hts.version import __version__

if TYPE_CHECKING:
    from sb3_hts.contrib import HTSTRPO as HTSTRPO
    from sb3_hts.contrib import HTSMaskablePPO as HTSMaskablePPO
    from sb3_hts.contrib import HTSRecurrentPPO as HTSRecurrentPPO

_CONTRIB = ("HTSMaskablePPO", "HTSRecurrentPPO", "HTSTRPO")

__all__ = [
    "HTSA2C",
    "HTSPPO",
    "ClosedError",
    "HTSError",
    "HTSVecEnv",
    "ProtocolError",
    "WorkerDied",
    "WorkerError",
    "WorkerRaised",
    "WorkerTimeout",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Only when asked for, because sb3-contrib need not be there
    if name not in _CONTRIB:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from sb3_hts import contrib
    except ModuleNotFoundError as error:
        raise ImportError(f'{name} needs sb3-contrib: pip install "sb3-hts[contrib]".') from error
    return getattr(contrib, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_CONTRIB])
