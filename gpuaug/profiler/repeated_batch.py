"""One batch for repeated calls, restored before each call."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch


class RepeatedBatch:
    """Batch that is returned for every call with new containers, and with new tensors if calls write to them.

    A training step may remove labels from a dictionary, or change labels in place. With the same objects, the second call would
    see the changes of the first call.

    Cost:
        A few microseconds of host time per call. One copy of the tensors on the current stream, or one copy per call if calls
        write to the tensors.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._returned: list[tuple[torch.Tensor, int]] | None = None
        """(tensor, its version counter) of the tensors that were returned last."""
        self._clones_tensors = True  # in the first call, to detect whether calls write to the tensors

    def __call__(self) -> Batch:
        """Return the batch for one more call."""
        if self._returned:
            self._clones_tensors = any(_version(tensor) != version for tensor, version in self._returned)
        # Leaves are boxed and unboxed, because map_leaves returns the same container object if no leaf has changed.
        boxed = batches.map_leaves(batches.cached_by_id(self._boxed), self._batch)
        batch = batches.map_leaves(lambda box: box.leaf, boxed)
        self._returned = [(tensor, _version(tensor)) for tensor in batches.tensors(batch)] if self._clones_tensors else None
        return batch

    def _boxed(self, leaf: Any) -> "_Box":
        if isinstance(leaf, torch.Tensor):
            return _Box(leaf.clone() if self._clones_tensors else leaf)
        return _Box(copy.copy(leaf) if isinstance(leaf, Mapping) else leaf)


class _Box:
    """Box around a leaf. Not a dataclass, because dataclasses are containers."""

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
