"""Parameter slots: the snapshots of the behaviour policy that one rollout acts with.

A slot is as many bytes as all storages of the policy's parameters and buffers need, one after the other, each aligned.
There are two sets of them, as there are two halves of the storage: the learner writes a slot before it announces the
snapshot, and not again until the rollout has been trained on; workers only read. Each slot has a version
``(update, gradient step)``, so that every transition can say who made it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sb3_hts.shared_arrays import ArraySpec, SharedBlock, aligned, block_nbytes, carve


class ParameterSlots:
    """``n_slots`` slots of ``slot_nbytes`` bytes.

    :param block: A shared block of :meth:`required_nbytes`, or ``None`` to make one.
    """

    def __init__(self, slot_nbytes: int, n_slots: int, block: SharedBlock | None = None) -> None:
        specs = {
            "versions": ArraySpec((n_slots, 2), np.dtype(np.int64)),
            "slots": ArraySpec((n_slots, aligned(slot_nbytes)), np.dtype(np.uint8)),
        }
        self.slot_nbytes = slot_nbytes
        self.n_slots = n_slots
        self.block = SharedBlock(block_nbytes(specs)) if block is None else block
        arrays = carve(self.block.bytes, specs)
        self.versions: npt.NDArray[np.int64] = arrays["versions"]
        self.slots: npt.NDArray[np.uint8] = arrays["slots"]

    @staticmethod
    def required_nbytes(slot_nbytes: int, n_slots: int) -> int:
        """Size of the block for the given slots."""
        return aligned(n_slots * 2 * 8) + n_slots * aligned(slot_nbytes)
