"""Collate function of workers with a ring: writes the batch into a slot and returns a description of the batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentTypeError
from gpuaug.core.packed_targets import pack_targets
from gpuaug.feed.collate_members import allocated, allocating_with
from gpuaug.feed.ring_memory import Described, Memory, Writer, can_be_placed


class SlotCollate:
    """Collate function that writes its result into the ring.

    Args:
        collate_fn: The user's collate function. ``default_collate`` stacks samples directly into the slot; ``collate_ragged``
            and ``collate_encoded`` pack images there, also if another function calls them; other tensors of the result are
            copied there.
        memory: Memory of the ring.
    """

    def __init__(self, collate_fn: Callable[[Any], Batch], memory: Memory) -> None:
        self._collate_fn = collate_fn
        self._memory = memory

    def __call__(self, samples: Any) -> Batch:
        """Return a description of the batch if a slot is free, else the result of the user's function."""
        worker = get_worker_info()
        writer = self._memory.take(worker.id) if worker is not None else None
        if writer is None:
            return pack_targets(self._collate_fn(samples), allocated)
        try:
            with allocating_with(writer.allocate):
                batch = _stacked(samples, writer) if self._collate_fn is default_collate else self._collate_fn(samples)
            written = writer.used
            described = described_or_not(batch, writer)
        except BaseException:
            writer.free()
            raise
        if type(described) is not Described and written:
            return self._collate_fn(samples)  # again, because the first result is in a slot that has been freed
        return described


def described_or_not(batch: Batch, writer: Writer) -> Batch:
    """Copy a batch's tensors into the slot and return its description.

    If no tensor can be copied, free the slot and return ``batch``.
    """
    try:
        described = writer.describe(batch)
    except ArgumentTypeError:  # a container that cannot be rebuilt; the error is raised when the batch is read
        described = batch
    if type(described) is not Described:
        writer.free()
    return described


def _stacked(samples: Any, writer: Writer) -> Batch:
    def stack(tensors: Sequence[Tensor], *, collate_fn_map: Any = None) -> Tensor:
        first = tensors[0]
        if all(can_be_placed(part) and part.shape == first.shape and part.dtype == first.dtype for part in tensors):
            shape = (len(tensors), *first.shape)
            out = writer.allocate(shape, torch.empty(shape, device="meta").stride(), first.dtype)
            if out is not None:
                return torch.stack(tuple(tensors), 0, out=out)
        stacked: Tensor = collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
        return stacked

    return collate(samples, collate_fn_map={**default_collate_fn_map, Tensor: stack})
