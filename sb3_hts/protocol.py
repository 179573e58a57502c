"""The messages between the main process and its workers, and the phases of an :class:`~sb3_hts.vec_env.HTSVecEnv`.

One pipe per worker, and per actor where there are any. The main process sends a *request*; the worker answers each with
exactly one *reply*, in order; an actor that fails while it serves says so unasked. The exceptions are the two *notices*
(:class:`Published`, :class:`Cancel`), which have no reply and which a worker that does not wait for them ignores. Values
that come from users travel inside as bytes (see :mod:`sb3_hts.serialization`), so that a value which cannot be rebuilt is
an error of that one call and not of the pipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

Rows = tuple[int, ...]
"""Indices of environments, counted from the first environment of the worker."""


class Phase(Enum):
    """Life of an :class:`~sb3_hts.vec_env.HTSVecEnv`."""

    IDLE = "idle"
    STEPPING = "stepping"
    COLLECTING = "collecting"
    BROKEN = "broken"
    CLOSED = "closed"


class Activity(IntEnum):
    """What a worker is doing; kept in shared memory so that it survives the worker."""

    STARTING = 0
    WAITING = 1
    CONSTRUCTING = 2
    RESETTING = 3
    STEPPING = 4
    ACTING = 5
    CALLING = 6
    CLOSING = 7
    AWAITING_SNAPSHOT = 8
    REPORTING = 9
    AWAITING_ACTION = 10
    AWAITING_OBSERVATION = 11

    def __str__(self) -> str:
        return _ACTIVITY_WORDS[self]


_ACTIVITY_WORDS = {
    Activity.STARTING: "starting",
    Activity.WAITING: "waiting for a request",
    Activity.CONSTRUCTING: "constructing the environment",
    Activity.RESETTING: "in reset()",
    Activity.STEPPING: "in step()",
    Activity.ACTING: "computing actions",
    Activity.CALLING: "answering a call",
    Activity.CLOSING: "closing",
    Activity.AWAITING_SNAPSHOT: "waiting for the learner",
    Activity.REPORTING: "serialising its info dict",
    Activity.AWAITING_ACTION: "waiting for an action",
    Activity.AWAITING_OBSERVATION: "waiting for observations",
}


# --- requests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttachLockstep:
    """Form the groups, and use the arrays for lockstep stepping; their file descriptor follows."""

    nbytes: int


@dataclass(frozen=True)
class Reset:
    """Reset all environments of the worker; ``seeds`` and ``options`` have one entry per environment."""

    seeds: tuple[int | None, ...]
    options: bytes


@dataclass(frozen=True)
class Step:
    """Step all environments of the worker.

    :param actions: Serialised list of their actions; ``None``: they are in shared memory.
    """

    actions: bytes | None = None


@dataclass(frozen=True)
class GetAttr:
    name: str
    rows: Rows


@dataclass(frozen=True)
class HasAttr:
    name: str
    rows: Rows


@dataclass(frozen=True)
class SetAttr:
    name: str
    value: bytes
    rows: Rows


@dataclass(frozen=True)
class CallMethod:
    """Call ``name(*args, **kwargs)`` on the given environments; ``arguments`` holds ``(args, kwargs)``."""

    name: str
    arguments: bytes
    rows: Rows


@dataclass(frozen=True)
class IsWrapped:
    wrapper_class: bytes
    rows: Rows


@dataclass(frozen=True)
class Render:
    rows: Rows


@dataclass(frozen=True)
class Configure:
    """Prepare to collect rollouts, or to act in them. File descriptors follow: those of shared blocks, then of token queues.

    :param program: What to do, serialised: for workers a :class:`~sb3_hts.rollout_runner.Program`, for actors an
        :class:`~sb3_hts.actor.ActorProgram`.
    :param sizes: Bytes of each block.
    :param n_queues: Number of token queues.
    """

    program: bytes
    sizes: tuple[int, ...]
    n_queues: int


@dataclass(frozen=True)
class Unconfigure:
    """Release what :class:`Configure` gave."""


@dataclass(frozen=True)
class Collect:
    """Collect one rollout.

    :param rollout: Serial number; notices name it.
    :param half: Which half of the storage to write.
    :param first_step: Global step (never restarts) of the rollout's first step; part of the noise key.
    :param n_snapshots: Step ``t`` acts with snapshot ``t * n_snapshots // n_steps``.
    :param first_slot: Slot of snapshot 0; the others follow.
    :param wrapper_states: Per group of this worker, the state of its wrappers, from the innermost outwards.
    """

    rollout: int
    half: int
    first_step: int
    n_snapshots: int
    first_slot: int
    wrapper_states: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Close:
    """Close the environments and exit."""


# --- notices --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """Snapshot number ``snapshot`` of the given rollout is in its slot."""

    rollout: int
    snapshot: int


@dataclass(frozen=True)
class Cancel:
    """Stop the given rollout at the next step boundary."""

    rollout: int


# --- replies --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """The request is carried out; ``value`` is its result, serialised."""

    value: bytes | None = None


@dataclass(frozen=True)
class Stepped:
    """Result of :class:`Step`; observations, rewards and dones are in shared memory.

    :param infos: Environment index to serialised info dict, for infos that are not the plain one.
    :param reset_infos: Environment index to serialised reset info, for environments that were reset.
    """

    infos: Mapping[int, bytes]
    reset_infos: Mapping[int, bytes]


@dataclass(frozen=True)
class Collected:
    """Result of :class:`Collect`; the arrays are in the storage half.

    :param steps_done: Per group of this worker; fewer than ``n_steps`` after a cancellation. The last row of the
        observations holds the latest ones even then.
    :param infos: ``(t, environment index)`` to serialised info dict, for infos that are not the plain one.
    :param reset_infos: Environment index to serialised reset info, for environments that were reset.
    :param wrapper_states: As in :class:`Collect`, after the last step.
    :param finished_at: ``time.monotonic()`` when the last step was done.
    :param step_time: Median seconds that a group took to act and step once.
    """

    steps_done: tuple[int, ...]
    infos: Mapping[tuple[int, int], bytes]
    reset_infos: Mapping[int, bytes]
    wrapper_states: tuple[tuple[Any, ...], ...]
    finished_at: float
    step_time: float


@dataclass(frozen=True)
class Failed:
    """The request failed with an exception.

    :param env_index: Index of the environment over all workers, ``None`` if no single one is to blame.
    :param activity: What the worker was doing.
    :param exception: The serialised exception, ``None`` if it cannot be serialised.
    :param summary: Type and text of the exception, in one line.
    :param traceback: The formatted traceback.
    """

    env_index: int | None
    activity: Activity
    exception: bytes | None
    summary: str
    traceback: str


Notice = Published | Cancel
Request = (
    AttachLockstep
    | Reset
    | Step
    | GetAttr
    | HasAttr
    | SetAttr
    | CallMethod
    | IsWrapped
    | Render
    | Configure
    | Unconfigure
    | Collect
    | Close
)
Reply = Done | Stepped | Collected | Failed
