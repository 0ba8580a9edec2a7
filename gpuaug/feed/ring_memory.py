"""Shared memory of the ring: its layout, its slots, and the descriptions that workers send instead of batches.

The *ring* (``ring.py``) is memory that worker processes and the training process share. It consists of a header, one byte per
slot (its *flag*), and the slots. A *slot* holds one batch of one worker. Slots that were added together, and have one size, are
a *generation*. Workers use the newest generation. A *leaf* is a value in a batch that is not a container, such as a tensor.
"""

import itertools
import math
import mmap
import os
import weakref
from contextlib import suppress
from contextvars import ContextVar
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentTypeError
from gpuaug.core.packed_targets import can_be_packed, pack_targets, unpack_targets
from gpuaug.feed.shared_storage import private_memfd

ALIGN = 512
"""Alignment of tensors in a slot, in bytes: that of torch's CUDA allocator."""

MAX_GENERATIONS, MAX_SLOTS = 8, 4096
"""Maximum number of generations, and of slots per generation."""

FLAGS_OFFSET = 4096
"""Size of the header in bytes, and offset of the flags: one byte per slot of each generation, 1 if the slot is in use."""

DATA_OFFSET = FLAGS_OFFSET + MAX_GENERATIONS * MAX_SLOTS
"""Offset of the first byte that a slot may use."""

_keys = itertools.count()
"""Iterator over the keys of new memories."""


memories: "weakref.WeakValueDictionary[int, Memory]" = weakref.WeakValueDictionary()
"""``Memory.key`` → memory that this process has mapped. The ``DataLoader``'s iterator keeps the memory of its workers alive."""

reads_for_feed: ContextVar[bool] = ContextVar("reads_for_feed", default=False)
"""Whether the current thread reads the user's loader for gpuaug, which keeps slots in use until they are copied."""


class Memory:
    """Shared file of the ring, and its mapping in this process.

    Args:
        num_bytes: Size of the file.
        descriptor: File descriptor of an existing memory, as it was sent to this process. Default: a new file.
        key: Key of an existing memory. Default: a new key.

    Raises:
        OSError: If the file cannot be created or mapped.
    """

    def __init__(self, num_bytes: int, descriptor: Any = None, key: int | None = None) -> None:
        self.num_bytes = num_bytes
        self.key = next(_keys) if key is None else key
        """Identifier of the memory in all processes that share it."""
        memories[self.key] = self
        self.slots_in_use: set[tuple[int, int]] = set()
        """(generation, slot) of each slot with a batch that this process has received."""
        self._process = os.getpid()
        self.fd = private_memfd("gpuaug-ring") if descriptor is None else descriptor.detach()
        # A function, not a method: it runs when this object has been deleted, or when the interpreter ends.
        weakref.finalize(self, _close_in, self._process, self.fd)
        os.ftruncate(self.fd, num_bytes)
        self.map = mmap.mmap(self.fd, num_bytes)
        with torch.inference_mode(False):  # otherwise the tensor could not be written to outside of inference mode
            self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        # 64-bit integers: number of the newest generation, then, per generation, the three values that ``generation`` returns.
        self.header = self.bytes[:FLAGS_OFFSET].view(torch.int64).numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        # For workers that are spawned, not forked: sends a duplicate of the file descriptor.
        return Memory, (self.num_bytes, reduction.DupFd(self.fd), self.key)

    def flag_at(self, generation: int, slot: int) -> int:
        """Return the offset of a slot's flag."""
        return FLAGS_OFFSET + (generation - 1) * MAX_SLOTS + slot

    def newest_generation(self) -> tuple[int, int, int, int]:
        """Return (number, offset of the first slot, bytes per slot, slots per worker) of the newest generation.

        Generations are counted from 1. All values are 0 if there are no slots.
        """
        number = int(self.header[0])
        return number, *self.generation(number)

    def generation(self, number: int) -> tuple[int, int, int]:
        """Return (offset of the first slot, bytes per slot, slots per worker) of a generation."""
        start, slot_bytes, slots_per_worker = self.header[1 + 3 * number : 4 + 3 * number].tolist()
        return start, slot_bytes, slots_per_worker

    def take_slot(self, worker: int) -> "Writer | None":
        """Mark a free slot of the worker with index ``worker`` as in use. Return its writer; ``None`` if no slot is free."""
        number, first_start, slot_bytes, slots_per_worker = self.newest_generation()
        for slot in range(worker * slots_per_worker, (worker + 1) * slots_per_worker):
            flag_offset = self.flag_at(number, slot)
            if not self.map[flag_offset]:
                self.map[flag_offset] = 1
                start = first_start + slot * slot_bytes
                return Writer(self, (number, slot), start, start + slot_bytes)
        return None

    def free(self, number: tuple[int, int]) -> None:
        """Give the slot ``number``, (generation, slot), back to its worker."""
        if os.getpid() == self._process:  # not in a forked child, which must not free slots of its parent
            self.slots_in_use.discard(number)
            self.map[self.flag_at(*number)] = 0


def _close_in(process: int, fd: int) -> None:
    """Close a file descriptor, unless this process is a forked child of ``process``, the id of its owner."""
    if os.getpid() == process:
        with suppress(OSError):
            os.close(fd)


class TensorInSlot:
    """Description of a tensor in a slot, which replaces the tensor in a batch that a worker sends.

    Not a dataclass or named tuple, because functions such as ``map_leaves`` would treat it as a container of the batch.

    Args:
        offset: Offset of the first element in the memory, in bytes.
        shape: Shape of the tensor.
        stride: Strides of the tensor, in elements.
        dtype: dtype of the tensor.
    """

    __slots__ = ("dtype", "offset", "shape", "stride")

    def __init__(self, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
        self.offset, self.shape, self.stride, self.dtype = offset, shape, stride, dtype

    def tensor(self, buffer: Any) -> Tensor:
        """Return the tensor, which shares the memory of ``buffer``.

        Its storage covers only its own values, because pickling a tensor copies its whole storage.

        Args:
            buffer: ``Memory.map``, or a view of it. The storage of the tensor keeps a reference to this object.
        """
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        flat = torch.frombuffer(buffer, dtype=self.dtype, count=count, offset=self.offset)
        return flat.as_strided(self.shape, self.stride)


class Writer:
    """Writer of one batch into one slot, in the worker.

    Args:
        memory: Memory of the ring.
        number: (generation, slot) of the slot.
        start: Offset of the slot in the memory, in bytes.
        end: Offset of the end of the slot.
    """

    def __init__(self, memory: Memory, number: tuple[int, int], start: int, end: int) -> None:
        self.memory, self.number = memory, number
        self._start = self._next_offset = start  # ``_next_offset``: where the next tensor begins
        self._end = end
        self._tensors: dict[int, tuple[Tensor, TensorInSlot]] = {}
        """``id`` of each tensor in the slot → (tensor, description). The tensors are kept, so that no ``id`` is reused."""

    @property
    def used(self) -> bool:
        """Whether a tensor has been allocated in the slot."""
        return self._next_offset > self._start

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...] | None = None) -> Tensor | None:
        """Return a new tensor in the slot, contiguous unless ``stride`` is passed; ``None`` if the slot has no room for it."""
        stride = torch.empty(shape, device="meta").stride() if stride is None else stride
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._next_offset + num_bytes > self._end:
            return None
        description = TensorInSlot(self._next_offset, tuple(shape), tuple(stride), dtype)
        self._next_offset += math.ceil(num_bytes / ALIGN) * ALIGN
        tensor = description.tensor(self.memory.map)
        self._tensors[id(tensor)] = tensor, description
        return tensor

    def describe(self, batch: Batch) -> "BatchInSlot | None":
        """Return the description of a batch, after copying its tensors into the slot, except those that are in it already.

        Tensors for which the slot has no room stay in the description. If no tensor is in the slot, if a container cannot be
        rebuilt, or after an error, the slot is freed. Without an error, ``None`` is returned then.
        """

        def describe_leaf(leaf: Any) -> Any:
            if id(leaf) not in self._tensors:
                target = self.allocate(leaf.shape, leaf.dtype, preserved_stride(leaf)) if can_be_stored(leaf) else None
                if target is None:
                    return leaf
                leaf = target.copy_(leaf)
            return self._tensors[id(leaf)][1]

        description = None
        try:
            with suppress(ArgumentTypeError):  # the loader raises the error about a container when it copies the batch
                described = batches.map_leaves(batches.cached_by_id(describe_leaf), pack_targets(batch, self.allocate))
                if self.used:
                    description = BatchInSlot(self.memory, self.number, described)
            return description
        finally:
            if description is None:
                self.free()

    def free(self) -> None:
        """Mark the slot as free."""
        self.memory.map[self.memory.flag_at(*self.number)] = 0


class BatchInSlot:
    """Description of a batch in a slot. Unpickling a description returns the batch, see ``received``.

    Args:
        memory: Memory of the ring.
        number: (generation, slot) of the slot.
        batch: The batch, in which ``TensorInSlot`` replaces tensors.
        for_loader: Whether lists of target dicts are unpacked in ``received``, because code of the user's loader reads them.
    """

    __slots__ = ("batch", "for_loader", "memory", "number")

    def __init__(self, memory: Memory, number: tuple[int, int], batch: Batch, for_loader: bool = False) -> None:
        self.memory, self.number, self.batch, self.for_loader = memory, number, batch, for_loader

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_batch, (self.memory.key, self.number, self.batch, self.for_loader)

    def received(self) -> Batch:
        """Return the batch, in the training process.

        On a thread that reads the loader for gpuaug (``reads_for_feed``), the tensors share the memory of the slot, which is
        freed after all these tensors have been deleted. On other threads, the tensors are copies.
        """
        buffer = memoryview(self.memory.map)  # referred to by all tensors in the slot
        weakref.finalize(buffer, self.memory.free, self.number).atexit = False
        self.memory.slots_in_use.add(self.number)

        def tensor(leaf: Any) -> Any:
            return leaf.tensor(buffer) if type(leaf) is TensorInSlot else leaf

        batch = batches.map_leaves(batches.cached_by_id(tensor), self.batch)
        batch = batch if reads_for_feed.get() else cloned(batch)
        return unpack_targets(batch) if self.for_loader else batch


def _unpickle_batch(key: int, *arguments: Any) -> Batch:
    """Return the batch of a ``BatchInSlot``."""
    return BatchInSlot(memories[key], *arguments).received()


def can_be_stored(leaf: Any) -> bool:
    """Return whether a leaf can be stored in a slot: a strided CPU tensor, not of a subclass, that does not require grad."""
    return (
        type(leaf) is Tensor
        and leaf.is_cpu
        and leaf.layout is torch.strided
        and not (leaf.requires_grad or leaf.is_nested or leaf.is_quantized or leaf.is_neg() or leaf.is_conj())
    )


def cloned(batch: Batch) -> Batch:
    """Return ``batch`` with copies of the tensors that can be stored in a slot."""
    return batches.map_leaves(batches.cached_by_id(lambda leaf: leaf.clone() if can_be_stored(leaf) else leaf), batch)


def preserved_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a dense copy of ``tensor``, as ``torch.empty_like(tensor)`` has them."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def batch_bytes(batch: Batch) -> int:
    """Return the number of bytes of a batch in a slot: the sum over its tensors, rounded up to multiples of ``ALIGN``."""
    unique: dict[int, Tensor] = {id(leaf): leaf for leaf in batches.tensors(batch) if takes_room(leaf)}
    return sum(math.ceil(leaf.nbytes / ALIGN) * ALIGN for leaf in unique.values())


def takes_room(leaf: Any) -> bool:
    """Return whether a leaf takes room in a slot: it can be stored, or packed with the other tensors of target dicts."""
    if type(leaf) is Tensor or not isinstance(leaf, Tensor):
        return can_be_stored(leaf)
    return can_be_packed(leaf)
