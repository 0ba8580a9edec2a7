"""Code that workers run: the collate function that writes into the *ring*, and errors about batches that cannot be sent.

The ring is shared memory, divided into *slots* for one batch each. A batch cannot be sent if shared memory is full, or if the
batch cannot be pickled.

Private names of ``multiprocessing``, tried with Python 3.11 to 3.13: ``Queue._on_queue_feeder_error``, ``_sem``, ``_buffer``,
to send an error in place of a batch that cannot be pickled.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import queues
from typing import Any

import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from gpuaug.core.batch import Batch
from gpuaug.core.errors import add_note
from gpuaug.core.packed_targets import pack_targets
from gpuaug.feed.collate_members import allocate_tensor, allocating_with
from gpuaug.feed.ring_memory import FLAGS_OFFSET, BatchInSlot, Memory, Writer, can_be_stored
from gpuaug.feed.shared_storage import use_memfd
from gpuaug.feed.wrapped_loader import awaited_worker, inner_iterator, is_of_worker


class SlotCollate:
    """Collate function that writes its result into the ring.

    Args:
        collate_fn: The user's collate function. ``default_collate`` stacks samples directly into the slot. ``collate_ragged``
            and ``collate_encoded`` pack images directly into the slot, also if another function calls them. Other tensors of
            the result are copied into the slot.
        memory: Memory of the ring.
        for_loader: Whether the code of the user's loader reads the batches, and needs them as the user's function returns them.
    """

    def __init__(self, collate_fn: Callable[[Any], Batch], memory: Memory, *, for_loader: bool = False) -> None:
        self._collate_fn = collate_fn
        self._memory = memory
        self._for_loader = for_loader

    def __call__(self, samples: Any) -> Batch:
        """Return a description of the batch if a slot is free, else the result of the user's function."""
        worker = get_worker_info()
        writer = self._memory.take_slot(worker.id) if worker is not None else None
        if writer is None:
            return self._without_slot(self._collate_fn(samples))
        try:
            with allocating_with(writer.allocate):
                batch = _stack_into_slot(samples, writer) if self._collate_fn is default_collate else self._collate_fn(samples)
            is_slot_written = writer.used
            description = writer.describe(batch)
        except BaseException:
            writer.free()
            raise
        if description is not None:
            description.for_loader = self._for_loader
            return description
        # Collate again if tensors of the first result are in the slot, which has been freed.
        return self._without_slot(self._collate_fn(samples) if is_slot_written else batch)

    def _without_slot(self, batch: Batch) -> Batch:
        """Return the batch in the form in which it is sent without a slot."""
        return batch if self._for_loader else pack_targets(batch, allocate_tensor)


def _stack_into_slot(samples: Any, writer: Writer) -> Batch:
    """Collate samples as ``default_collate`` does, and stack tensors of equal shapes directly into the slot."""

    def stack(tensors: Sequence[Tensor], *, collate_fn_map: Any = None) -> Tensor:
        first = tensors[0]
        if all(can_be_stored(part) and part.shape == first.shape and part.dtype == first.dtype for part in tensors):
            out = writer.allocate((len(tensors), *first.shape), first.dtype)
            if out is not None:
                return torch.stack(tuple(tensors), 0, out=out)
        stacked: Tensor = collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
        return stacked

    return collate(samples, collate_fn_map={**default_collate_fn_map, Tensor: stack})


READ_EVENT = "gpuaug.read"
"""Audit event before gpuaug reads a file without opening it. Its argument is the path."""

_ENTRY_BYTES = 4096
"""Bytes per worker: Linux' limit of a path."""

_CODE = (".py", ".pyc", ".so")
"""Suffixes of files that Python opens itself, to import a module."""


class OpenedFiles:
    """Shared memory with the path of the file that each worker opened last, for the error after a ``DataLoader``'s ``timeout``.

    torch's error about a worker that sends no batch does not say what the worker does. An audit hook of Python also sees files
    that the user's dataset opens.

    Args:
        workers: Number of workers.
    """

    def __init__(self, workers: int) -> None:
        self._memory = Memory(FLAGS_OFFSET + workers * _ENTRY_BYTES)  # after the header that a ring would have

    def record(self, worker: int) -> None:
        """Record the files that this process, a worker, opens from now on."""
        shared = self._memory.map
        start = FLAGS_OFFSET + worker * _ENTRY_BYTES

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in ("open", READ_EVENT) or not isinstance(arguments[0], str | bytes):  # a descriptor has no path
                return
            path = os.fsdecode(arguments[0])
            if not path.endswith(_CODE):
                data = path.encode(errors="replace")[: _ENTRY_BYTES - 1] + b"\0"
                shared[start : start + len(data)] = data

        sys.addaudithook(hook)

    def of(self, worker: int) -> str:
        """Return the path of the file that a worker opened last; an empty string without one."""
        start = FLAGS_OFFSET + worker * _ENTRY_BYTES
        return self._memory.map[start : start + _ENTRY_BYTES].partition(b"\0")[0].decode(errors="replace")


def opened_files(loader: Any) -> OpenedFiles | None:
    """Return the memory for the workers of a ``DataLoader``; ``None`` without a ``timeout``, or on a system without memfds.

    A memfd is an anonymous file in memory.
    """
    return OpenedFiles(loader.num_workers) if loader.timeout > 0 and hasattr(os, "memfd_create") else None


def add_opened_file(error: BaseException, iterator: Any) -> None:
    """Add the file that the awaited worker opened last to an error of a ``DataLoader``, as a note.

    Does nothing for an error that a worker raised: its traceback says what the worker did.
    """
    files: OpenedFiles | None = getattr(inner_iterator(iterator), "opened_files", None)
    worker = None if files is None or is_of_worker(error) else awaited_worker(iterator)
    if files is not None and worker is not None and (path := files.of(worker)):
        advice = "Check the storage of the file, or raise timeout of the DataLoader."
        add_note(error, f"gpuaug: worker {worker} of the DataLoader was reading {path}, the last file that it opened. {advice}")


@dataclass(frozen=True, eq=False)
class SendsErrors:
    """``worker_init_fn`` that makes a worker send an error in place of a batch that cannot be sent.

    Otherwise the thread of the worker's queue would print the error, and the loader would wait for the batch forever.

    Args:
        init: The user's ``worker_init_fn``, or ``None``.
        keeps_state: Whether workers send (batch, worker, state), like torchdata's workers, or the batch only.
        files: Memory for the file that each worker opened last; ``None`` without a ``timeout``.
    """

    init: Callable[[int], None] | None
    keeps_state: bool
    files: OpenedFiles | None

    def __call__(self, worker: int) -> None:
        """Prepare a worker process."""
        print_error = queues.Queue._on_queue_feeder_error  # type: ignore[attr-defined]

        def send(queue: Any, error: Exception, item: Any) -> None:
            if not (type(item) is tuple and len(item) == 2 and type(item[0]) is int):
                print_error(error, item)  # a queue of the user, not of the DataLoader
                return
            number, content = item
            batch = content[0] if self.keeps_state else content
            if isinstance(batch, ExceptionWrapper):
                os._exit(1)  # the item is an error that cannot be sent. The DataLoader detects that the worker has ended
            if type(batch) is BatchInSlot:
                batch.memory.map[batch.memory.flag_at(*batch.number)] = 0  # frees the slot of the batch
            wrapped = ExceptionWrapper((type(error), error, error.__traceback__), f"in DataLoader worker process {worker}")
            # Like put(), which this thread cannot call, but at the front: the end of the epoch may be in the queue already.
            queue._sem.acquire()
            queue._buffer.appendleft((number, (wrapped, worker, None) if self.keeps_state else wrapped))

        queues.Queue._on_queue_feeder_error = send  # type: ignore[attr-defined]
        use_memfd()
        if self.files is not None:
            self.files.record(worker)
        if self.init is not None:
            self.init(worker)
