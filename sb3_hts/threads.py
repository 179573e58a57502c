"""How many threads the learner trains with while workers run, and how they wait for each other."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def beside_workers(policy: th.nn.Module) -> Iterator[None]:
    """The scope of training while workers run: :func:`learner_threads`, and they do not spin."""
    n_threads = th.get_num_threads()
    try:
        th.set_num_threads(learner_threads(policy, n_threads))
        with _second_team():
            yield
    finally:
        th.set_num_threads(n_threads)


@contextmanager
def _second_team() -> Iterator[None]:
    """Make the threads of an OpenMP team sleep, not spin, while they wait for each other.

    GNU's OpenMP lets them spin for milliseconds as long as it has started no more threads than there are cores. It does not
    know of the workers, who could use that time: with all cores in the team, every fifth CPU second of a convolutional
    ``train()`` is spent spinning. A second team that does nothing but exist teaches it otherwise; nothing else can, once torch
    has been imported. Where OpenMP is another one, this has no effect.
    """
    if th.get_num_threads() == 1:
        yield
        return
    started, end = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            th.zeros(LARGE_POLICY).add_(1)  # enough to be divided among threads, who then are this one's
        finally:
            started.set()
        end.wait()

    holder = threading.Thread(target=hold, name="second-team", daemon=True)
    holder.start()
    try:
        started.wait()
        yield
    finally:
        end.set()
        holder.join()
