"""Collating in a worker with a ring: the batch goes into a slot, and its description into the queue."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from gpuaug.core.batch import Batch
from gpuaug.core.columns import pack_targets
from gpuaug.core.errors import ArgumentTypeError
from gpuaug.feed.collate_members import allocated, placing_into
from gpuaug.feed.ring_memory import Described, Memory, Writer, can_be_placed


class SlotCollate:
    """A collate function that leaves its result in the ring.

    Args:
        collate_fn: The user's. The default one stacks samples straight into the slot; ``collate_ragged`` and
            ``collate_encoded`` pack images there, also where another function calls them; what else a function returns is
            copied there.
        memory: The ring's.
    """

    def __init__(self, collate_fn: Callable[[Any], Batch], memory: Memory) -> None:
        self._collate_fn = collate_fn
        self._memory = memory

    def __call__(self, samples: Any) -> Batch:
        """Collate: a description where there is a free slot, else what the user's function returns."""
        worker = get_worker_info()
        writer = self._memory.take(worker.id) if worker is not None else None
        if writer is None:
            return pack_targets(self._collate_fn(samples), allocated)
        try:
            with placing_into(writer.place):
                batch = _stacked(samples, writer) if self._collate_fn is default_collate else self._collate_fn(samples)
            written = writer.used
            described = described_or_not(batch, writer)
        except BaseException:
            writer.give_back()
            raise
        if type(described) is not Described and written:
            return self._collate_fn(samples)  # the first result lies in a slot that is free again
        return described


def described_or_not(batch: Batch, writer: Writer) -> Batch:
    """Describe a batch, copying its tensors into the slot. Returns the batch itself, and frees the slot, if that cannot be."""
    try:
        described = writer.describe(batch)
    except ArgumentTypeError:  # a container that cannot be rebuilt: an error where the batch is read
        described = batch
    if type(described) is not Described:
        writer.give_back()
    return described


def _stacked(samples: Any, writer: Writer) -> Batch:
    def stack(tensors: Sequence[Tensor], *, collate_fn_map: Any = None) -> Tensor:
        first = tensors[0]
        if all(can_be_placed(each) and each.shape == first.shape and each.dtype == first.dtype for each in tensors):
            shape = (len(tensors), *first.shape)
            out = writer.place(shape, torch.empty(shape, device="meta").stride(), first.dtype)
            if out is not None:
                return torch.stack(tuple(tensors), 0, out=out)
        made: Tensor = collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
        return made

    return collate(samples, collate_fn_map={**default_collate_fn_map, Tensor: stack})
