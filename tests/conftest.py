"""Settings of all tests: one torch thread, poisoned shared memory, no process or descriptor left behind."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch as th

from sb3_hts import inference as inference_module
from sb3_hts import shared_arrays
from sb3_hts.processes import ForkServerLease


@pytest.fixture(scope="session", autouse=True)
def _forkserver() -> Iterator[None]:
    """Keep the forkserver between tests: starting it imports torch."""
    lease = ForkServerLease()
    yield
    lease.release()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    th.set_num_threads(1)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_arrays, "POISON", 0xA5)


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


@pytest.fixture(params=["local", "central"])
def inference(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What ``inference="auto"`` means on the CPU; two actors if it is central."""
    if request.param == "central":

        def choose(inference: str, policy: Any, actor_class: Any, n_actors: int, *others: Any) -> Any:
            if inference == "auto":
                inference, n_actors = "central", 2
            return inference_module.choose(inference, policy, actor_class, n_actors, *others)

        monkeypatch.setattr("sb3_hts.algorithm.choose", choose)
    return str(request.param)
