"""How many threads the learner trains with while workers run."""

from __future__ import annotations

import os

import torch as th

LARGE_POLICY = 500_000
"""Number of parameters from which on training profits from all cores, even though workers use them too."""


def learner_threads(policy: th.nn.Module, n_threads: int) -> int:
    """How many threads torch may use for training while workers run.

    An OpenMP team that needs every core stands still whenever a worker holds one of them. Small networks lose more by that
    than they gain by the team, so for them it gets half of the cores; for large ones and convolutions all. A smaller
    number that the user has set stays. Neither timing nor the number of workers may matter: thread counts change
    floating-point results.

    :param policy: What is trained.
    :param n_threads: torch's present number of threads.
    """
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    large = sum(parameter.numel() for parameter in policy.parameters()) >= LARGE_POLICY
    convolutional = any(isinstance(module, (th.nn.Conv1d, th.nn.Conv2d, th.nn.Conv3d)) for module in policy.modules())
    if large or convolutional or n_threads < n_cores:
        return n_threads
    return max(1, n_cores // 2)
