"""What a worker does with a batch where there is a ring: collate into a slot, and send a description."""

import os
from collections.abc import Callable, Sequence
from multiprocessing import queues
from typing import Any

import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentTypeError
from gpuaug.feed.collate_members import placing_into
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
        self._sends_errors = False

    def __call__(self, samples: Any) -> Batch:
        """Collate: a description where there is a free slot, else what the user's function returns."""
        worker = get_worker_info()
        if worker is not None and not self._sends_errors:
            self._send_errors(f"in DataLoader worker process {worker.id}")
        writer = self._memory.take(worker.id) if worker is not None else None
        if writer is None:
            return self._collate_fn(samples)
        try:
            with placing_into(writer.place):
                batch = _stacked(samples, writer) if self._collate_fn is default_collate else self._collate_fn(samples)
            written = writer.used
            described = described_or_not(batch, writer)
        except BaseException:
            writer.give_back()
            raise
        if type(described) is not Described and written:
            return self._collate_fn(samples)  # what was stacked or packed lies in a slot that is free again
        return described

    def _send_errors(self, where: str) -> None:
        """Have the error of a batch that cannot be sent, for lack of shared memory or of a way to pickle it, sent in its place.

        The queue's thread would print it and go on, and the loader would wait for that batch for ever.
        """
        print_error = queues.Queue._on_queue_feeder_error  # type: ignore[attr-defined]

        def send(queue: Any, error: Exception, item: Any) -> None:
            if not (type(item) is tuple and len(item) == 2 and type(item[0]) is int):
                print_error(error, item)  # of a queue of the user's
                return
            number, batch = item
            if isinstance(batch, ExceptionWrapper):
                os._exit(1)  # nothing can be sent, which DataLoader sees
            if type(batch) is Described:
                self._memory.map[self._memory.flag_at(*batch.number)] = 0
            # As put() does, but first in the queue, on whose own thread this is: after it may be the end of an epoch.
            queue._sem.acquire()
            queue._buffer.appendleft((number, ExceptionWrapper((type(error), error, error.__traceback__), where)))

        queues.Queue._on_queue_feeder_error = send  # type: ignore[attr-defined]
        self._sends_errors = True


def described_or_not(batch: Batch, writer: Writer) -> Batch:
    """The description of a batch whose tensors are in the slot now; or the batch, where there is none, and the slot is free."""
    try:
        described = writer.describe(batch)
    except ArgumentTypeError:  # a container that cannot be rebuilt, which whoever reads the batch will hear of
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
