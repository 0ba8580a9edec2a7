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
        # ``deepcopy`` creates new containers. It takes the leaves from its memo: id of an object → copy.
        leaves = batches.leaves(self._batch)
        batch = copy.deepcopy(self._batch, {id(leaf): self._copy_of(leaf) for leaf in leaves})
        self._returned = [(tensor, _write_count(tensor)) for tensor in batches.tensors(batch)] if self._clones_tensors else None
        return batch

    def _copy_of(self, leaf: Any) -> Any:
        """Return what the next batch has for a leaf: a value that is no container, or a mapping with a method ``to``."""
        if isinstance(leaf, torch.Tensor):
            return leaf.clone() if self._clones_tensors else leaf
        return copy.copy(leaf) if isinstance(leaf, Mapping) else leaf


def _write_count(tensor: torch.Tensor) -> int:
    """Return the number of writes to a tensor; 0 for an inference tensor, which does not count them."""
    return 0 if tensor.is_inference() else tensor._version
