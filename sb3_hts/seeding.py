"""The noise of (seed, group, step).

Before each forward of the behaviour policy the generator is seeded with a pure function of three numbers, so what is
sampled does not depend on which process served the group, nor on when (the paper, section 3.2: the random numbers go
with the state).
"""

from __future__ import annotations

import hashlib
import secrets
import struct

_MASK = (1 << 64) - 1
_pack = struct.Struct("<3Q").pack


def stream_seed(noise_key: int, group: int, step: int) -> int:
    """Seed of the generator for one forward.

    :param noise_key: The run's key, see :func:`draw_noise_key`; any integer.
    :param group: Index of the group of environments.
    :param step: Global step of the run: how many vector steps have been taken before; never restarts.
    :return: An integer in ``[0, 2**63)``.
    """
    digest = hashlib.blake2b(_pack(noise_key & _MASK, group, step), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draw_noise_key(seed: int | None) -> int:
    """The noise key of a run: its seed, or a fresh random number.

    :param seed: The algorithm's ``seed`` argument.
    """
    return secrets.randbits(63) if seed is None else int(seed)
