"""HTS-RL ("High-Throughput Synchronous Deep RL", NeurIPS 2020) for Stable-Baselines3.

``HTSPPO`` and ``HTSA2C`` replace SB3's ``PPO`` and ``A2C``; ``HTSVecEnv`` replaces ``SubprocVecEnv``.
"""

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
