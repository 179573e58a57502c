"""Snapshots of the behaviour policy, published while an update runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch as th

from sb3_hts.collector import Collector


@contextmanager
def publish_during(optimizer: th.optim.Optimizer, collector: Collector, update: int, n_gradient_steps: int) -> Iterator[None]:
    """Publish snapshot i of S after floor(i G / S) of the G gradient steps that the block takes.

    :param optimizer: Whose steps are counted.
    :param collector: Of the rollout in flight, if any.
    :param update: Number of the update.
    :param n_gradient_steps: G; if the block takes fewer, the last snapshots are left.
    """
    n_snapshots = collector.n_snapshots
    due = [i * n_gradient_steps // n_snapshots for i in range(n_snapshots)]
    steps = 0

    def publish_due() -> None:
        while collector.n_unpublished and due[-collector.n_unpublished] <= steps:
            collector.publish((update, steps))

    def after_step(*_: Any) -> None:
        nonlocal steps
        steps += 1
        publish_due()

    publish_due()
    handle = optimizer.register_step_post_hook(after_step)
    try:
        yield
    finally:
        handle.remove()
