"""How values of users cross process borders.

What is defined in ``__main__`` or in a notebook travels by value (cloudpickle), because workers do not import the main
module. Towards the workers everything does; back from them plain pickle is tried first, since it is ten times faster
and infos are many.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle


@contextmanager
def main_by_value() -> Iterator[None]:
    """Within the block, cloudpickle treats the main module as such under its other name, too.

    In processes that :mod:`multiprocessing` has spawned, those of a pool for instance, it is called ``__mp_main__``.
    """
    main = sys.modules.get("__mp_main__")
    if main is None or main.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(main)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(main)


def dumps_by_value(value: object) -> bytes:
    """Serialise a value for a worker, including what only the main module defines."""
    with main_by_value():
        return bytes(cloudpickle.dumps(value))


def dumps(value: object) -> bytes:
    """Serialise a value of a worker for the main process."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # pickle raises PicklingError, AttributeError, TypeError, ... depending on the reason
        return bytes(cloudpickle.dumps(value))


def loads(data: bytes) -> Any:
    """Inverse of both. Only ever given what came through one of our own pipes."""
    return pickle.loads(data)
