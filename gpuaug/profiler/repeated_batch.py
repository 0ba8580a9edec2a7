"""One batch for repeated calls of a training step or stage: each call gets the batch as it was before earlier calls."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch


class RepeatedBatch:
    """Batch that is returned in new containers at every call, and with copies of its tensors if the caller writes to them.

    A training step may remove labels from a dictionary, or change labels in place. With the same objects, the second step would
    see the changes of the first step.

    Cost:
        A few microseconds of host time per call. The tensors are copied on the current stream: for the first call only, or for
        every call if the caller writes to them.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._returned: list[tuple[torch.Tensor, int]] | None = None
        """(tensor, number of writes to it) of the copies that the last call returned; ``None`` if it returned no copies."""
        self._clones_tensors = True
        """Whether the next call copies the tensors. The first call does, to find out whether the caller writes to them."""

    def __call__(self) -> Batch:
        """Return the batch for the next step."""
        if self._returned:
            self._clones_tensors = any(_write_count(tensor) != version for tensor, version in self._returned)
        # ``map_leaves`` creates new containers only if leaves change, so each leaf is put into a box and taken out.
        # ``cached_by_id``: a leaf that occurs twice in the batch is one object again.
        boxed = batches.map_leaves(batches.cached_by_id(self._boxed), self._batch)
        batch = batches.map_leaves(lambda box: box.leaf, boxed)
        self._returned = [(tensor, _write_count(tensor)) for tensor in batches.tensors(batch)] if self._clones_tensors else None
        return batch

    def _boxed(self, leaf: Any) -> "_Box":
        """Return a box with a leaf of the batch: a value that is no container, or a mapping with a method ``to``."""
        if isinstance(leaf, torch.Tensor):
            return _Box(leaf.clone() if self._clones_tensors else leaf)
        return _Box(copy.copy(leaf) if isinstance(leaf, Mapping) else leaf)


class _Box:
    """Box around a leaf. Not a dataclass, because dataclasses are containers."""

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf


def _write_count(tensor: torch.Tensor) -> int:
    """Return the number of writes to a tensor; 0 for an inference tensor, which does not count them."""
    return 0 if tensor.is_inference() else tensor._version
