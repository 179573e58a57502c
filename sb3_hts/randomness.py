"""Where policies draw from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch as th
from torch.overrides import TorchFunctionMode

_FUNCTIONS = (
    "bernoulli",
    "binomial",
    "multinomial",
    "normal",
    "poisson",
    "rand",
    "randint",
    "randn",
    "randperm",
    "_sample_dirichlet",
    "_standard_gamma",
)
_METHODS = (
    "bernoulli",
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "multinomial",
    "normal_",
    "random_",
    "uniform_",
)


class DrawingFrom(TorchFunctionMode):
    """Within the block, what this thread draws by torch's functions (not the ``*_like`` ones) comes from the given generator.

    :mod:`torch.distributions`, and with it every SB3 policy, knows the global generator only, which another thread may be
    using at the same time. A mode holds for one thread alone.
    """

    _samplers = frozenset([*(getattr(th, name) for name in _FUNCTIONS), *(getattr(th.Tensor, name) for name in _METHODS)])

    def __init__(self, generator: th.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._samplers and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self._generator}
        return func(*args, **kwargs)


def seed_process(device: th.device) -> Callable[[int], None]:
    """Seeds the global generators that a policy may draw from, in a process that has nothing else to do.

    :param device: Where the policy acts.
    """
    module = getattr(th, device.type)
    # Without "all": of the device that is current. The CPU's module has neither
    seed_device = getattr(module, "manual_seed_all", getattr(module, "manual_seed", None))

    def seed(number: int) -> None:
        random.seed(number)
        np.random.seed(number % 2**32)
        th.default_generator.manual_seed(number)
        if seed_device is not None:
            seed_device(number)

    return seed
