"""One batch for repeated calls, restored if a call changes it."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch


class RepeatedBatch:
    """Gives a batch again and again: its containers made anew each time, its tensors too if a call writes to them.

    A training step may take labels out of a dictionary, or change them in place. With the same objects, the second call would
    see the changes of the first.

    Cost:
        Some microseconds of host time. One copy of the tensors on the current stream; one a call where calls write to them.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._given: list[tuple[torch.Tensor, int]] | None = None
        self._copies = True  # the first time, to see whether it is written to

    def __call__(self) -> Batch:
        """The batch, for one more call."""
        if self._given:
            self._copies = any(_version(tensor) != version for tensor, version in self._given)
        boxed = batches.map_leaves(batches.cached_by_id(self._boxed), self._batch)
        # Through boxes: containers whose leaves are the same objects would be the same, too.
        given = batches.map_leaves(lambda box: box.leaf, boxed)
        self._given = [(tensor, _version(tensor)) for tensor in batches.tensors(given)] if self._copies else None
        return given

    def _boxed(self, leaf: Any) -> "_Box":
        if isinstance(leaf, torch.Tensor):
            return _Box(leaf.clone() if self._copies else leaf)
        return _Box(copy.copy(leaf) if isinstance(leaf, Mapping) else leaf)


class _Box:
    """Stands for a leaf. No dataclass: those are containers."""

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
