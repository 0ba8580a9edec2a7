"""Shared memory of the ring: its layout, its slots, and the descriptions that workers send instead of batches.

The *ring* (``ring.py``) is memory that worker processes and the training process share. It consists of a header, one byte per
slot (its *flag*), and the slots. A *slot* holds one batch of one worker. Slots that were added together, and have one size, are
a *generation*. Workers use the newest generation. A *leaf* is a value in a batch that is not a container, such as a tensor.
"""

import itertools
import math
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from contextvars import ContextVar
from multiprocessing import reduction
from typing import Any, Protocol

import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
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


class SlotOwner(Protocol):
    """Part of ``ring.Ring`` that a ``Slot`` uses."""

    slots_in_use: set[tuple[int, int]]
    """(generation, slot) of each slot for which a ``Slot`` exists."""

    def free(self, number: tuple[int, int]) -> None:
        """Give the slot ``number``, (generation, slot), back to its worker."""


rings: "weakref.WeakValueDictionary[int, SlotOwner]" = weakref.WeakValueDictionary()
"""``Memory.key`` → ring of this process."""

memories: "weakref.WeakValueDictionary[int, Memory]" = weakref.WeakValueDictionary()
"""``Memory.key`` → memory that this process has mapped. The ``DataLoader``'s iterator keeps the memory of its workers alive."""

is_feed_thread: ContextVar[bool] = ContextVar("is_feed_thread", default=False)
"""Whether the current thread reads the user's loader for gpuaug, which keeps slots in use until they are copied."""


class Memory:
    """Shared file of the ring, and its mapping in this process.

    Args:
        num_bytes: Size of the file.
        fd: File descriptor of an existing memory. Default: a new file.
        key: Key of an existing memory. Default: a new key.

    Raises:
        OSError: If the file cannot be created or mapped.
    """

    def __init__(self, num_bytes: int, fd: int | None = None, key: int | None = None) -> None:
        self.num_bytes = num_bytes
        self.key = next(_keys) if key is None else key
        """Identifier of the memory in all processes that share it."""
        memories[self.key] = self
        process = os.getpid()
        self.fd = private_memfd("gpuaug-ring") if fd is None else fd
        # A function, not a method: it runs when this object has been deleted, or when the interpreter ends.
        weakref.finalize(self, _close_in, process, self.fd)
        if fd is None:
            os.ftruncate(self.fd, num_bytes)
        self.map = mmap.mmap(self.fd, num_bytes)
        with torch.inference_mode(False):  # otherwise the tensor could not be written to outside of inference mode
            self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        # 64-bit integers: number of the newest generation, then, per generation, the three values that ``generation`` returns.
        self.header = self.bytes[:FLAGS_OFFSET].view(torch.int64).numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        # For workers that are spawned, not forked: sends a duplicate of the file descriptor.
        return _attach, (self.num_bytes, reduction.DupFd(self.fd), self.key)

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
                return Writer(self, number, slot, start, start + slot_bytes)
        return None


def _attach(num_bytes: int, descriptor: Any, key: int) -> Memory:
    """Return the ``Memory`` for an existing file, in a spawned worker."""
    return Memory(num_bytes, descriptor.detach(), key)


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

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorInSlot, (self.offset, self.shape, self.stride, self.dtype)

    def tensor(self, buffer: Any) -> Tensor:
        """Return the tensor, which shares the memory of ``buffer``.

        Its storage covers only its own values, because pickling a tensor copies its whole storage.

        Args:
            buffer: ``Memory.map``, or a view of it. The storage of the tensor keeps a reference to this object.
        """
        count = _extent(self.shape, self.stride)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        flat = torch.frombuffer(buffer, dtype=self.dtype, count=count, offset=self.offset)
        return flat.as_strided(self.shape, self.stride)


class Writer:
    """Writer of one batch into one slot, in the worker.

    Args:
        memory: Memory of the ring.
        generation: Generation of the slot.
        slot: Index of the slot in its generation.
        start: Offset of the slot in the memory, in bytes.
        end: Offset of the end of the slot.
    """

    def __init__(self, memory: Memory, generation: int, slot: int, start: int, end: int) -> None:
        self.memory, self.generation, self.slot = memory, generation, slot
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
        num_bytes = _extent(shape, stride) * dtype.itemsize
        if self._next_offset + num_bytes > self._end:
            return None
        description = TensorInSlot(self._next_offset, tuple(shape), tuple(stride), dtype)
        self._next_offset += math.ceil(num_bytes / ALIGN) * ALIGN
        tensor = description.tensor(self.memory.map)
        self._tensors[id(tensor)] = tensor, description
        return tensor

    def describe(self, batch: Batch) -> "BatchInSlot | Batch":
        """Return the description of a batch, after copying its tensors into the slot, except those that are in it already.

        Tensors for which the slot has no room stay in the description. If the slot has no tensor, ``batch`` is returned.
        """

        def describe_leaf(leaf: Any) -> Any:
            if id(leaf) in self._tensors:
                return self._tensors[id(leaf)][1]
            return self._copy(leaf) if can_be_stored(leaf) else leaf

        batch = pack_targets(batch, self.allocate)
        batch_of_descriptions = batches.map_leaves(batches.cached_by_id(describe_leaf), batch)
        if not self.used:
            return batch
        return BatchInSlot(self.memory.key, self.generation, self.slot, batch_of_descriptions)

    def _copy(self, tensor: Tensor) -> Any:
        """Copy a tensor into the slot, and return its description; ``tensor`` itself if the slot has no room for it."""
        target = self.allocate(tuple(tensor.shape), tensor.dtype, preserved_stride(tensor))
        if target is None:
            return tensor
        target.copy_(tensor)
        return self._tensors[id(target)][1]

    def free(self) -> None:
        """Mark the slot as free."""
        self.memory.map[self.memory.flag_at(self.generation, self.slot)] = 0


class BatchInSlot:
    """Description of a batch in a slot: number of the slot, and the batch, in which ``TensorInSlot`` replaces tensors."""

    __slots__ = ("_key_and_number", "batch", "for_loader", "slot")

    def __init__(self, key: int, generation: int, slot: int, batch: Batch) -> None:
        self._key_and_number = (key, generation, slot)
        self.batch = batch
        self.for_loader = False
        """Whether unpickling gives the batch itself instead of its description, because code of the user's loader reads it."""
        self.slot: Slot | None = None
        """The slot, in the training process; ``None`` in a worker."""

    @property
    def number(self) -> tuple[int, int]:
        """(generation, slot) of the slot."""
        return self._key_and_number[1:]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_batch_in_slot, (*self._key_and_number, self.batch, self.for_loader)

    def user_batch(self) -> Batch:
        """Return the batch for code of the user's loader, which may keep the batch.

        On the thread that reads the loader for gpuaug (``is_feed_thread``), the tensors share the memory of the slot, which is
        freed after all these tensors have been deleted. On other threads, the tensors are copies.
        """
        buffer = memoryview(memories[self._key_and_number[0]].map)
        if not is_feed_thread.get():
            return unpack_targets(cloned(self.batch_in(buffer)))
        # The finaliser keeps the slot in use until the last tensor with a reference to ``buffer`` is deleted.
        weakref.finalize(buffer, _drop, self.slot).atexit = False
        return unpack_targets(self.batch_in(buffer))

    def batch_in(self, buffer: Any) -> Batch:
        """Return the batch. Its tensors share the memory of ``buffer``, see ``TensorInSlot.tensor``."""

        def tensor(leaf: Any) -> Any:
            return leaf.tensor(buffer) if type(leaf) is TensorInSlot else leaf

        return batches.map_leaves(batches.cached_by_id(tensor), self.batch)


def _unpickle_batch_in_slot(key: int, generation: int, slot: int, batch: Batch, for_loader: bool) -> "BatchInSlot | Batch":
    """Return a description, or the batch itself if ``for_loader`` is true, in the training process."""
    description = BatchInSlot(key, generation, slot, batch)
    ring = rings.get(key)
    # If a DataLoader drops the description, as when a new epoch starts early, the deletion of its ``Slot`` frees the slot.
    description.slot = Slot(ring, generation, slot) if ring is not None else None
    return description.user_batch() if for_loader else description


def _drop(_slot: "Slot | None") -> None:
    """Do nothing. After a finaliser has called this function, its reference to the slot is dropped, which frees the slot."""


class SlotsOfBatch:
    """Slots whose memory may be shared by tensors of a batch that the user's loader has joined from several batches.

    Args:
        ring: The ring.
        numbers: (generation, slot) of each slot in use; empty if no tensor of the batch is in a slot.
        leaves: Leaves of the batch. References to them keep the slots of their tensors in use as long as this object exists.
    """

    def __init__(self, ring: SlotOwner, numbers: Collection[tuple[int, int]], leaves: list[Any]) -> None:
        self.ring, self.numbers, self._leaves = ring, numbers, leaves

    def __len__(self) -> int:
        return len(self.numbers)


class Slot:
    """Slot with a batch, in the training process. Deleting this object frees the slot.

    ``numbers`` has one element, the (generation, slot) of the slot, for the same interface as ``SlotsOfBatch``.
    """

    __slots__ = ("__weakref__", "numbers", "ring")

    def __init__(self, ring: SlotOwner, generation: int, slot: int) -> None:
        self.ring, self.numbers = ring, ((generation, slot),)
        ring.slots_in_use.update(self.numbers)

    # ``is_finalizing`` is a default argument, because at the end of the process Python may have cleared global names. Slots
    # need not be freed then.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self.ring.free(*self.numbers)


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

    def clone(leaf: Any) -> Any:
        return leaf.clone() if can_be_stored(leaf) else leaf

    return batches.map_leaves(batches.cached_by_id(clone), batch)


def preserved_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a dense copy of ``tensor``, as ``torch.empty_like(tensor)`` has them."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def batch_bytes(batch: Batch) -> int:
    """Return the number of bytes of a batch in a slot: the sum over its tensors, rounded up to multiples of ``ALIGN``."""
    unique: dict[int, Tensor] = {id(leaf): leaf for leaf in batches.tensors(batch) if takes_room(leaf)}
    sizes = (_extent(leaf.shape, preserved_stride(leaf)) * leaf.dtype.itemsize for leaf in unique.values())
    return sum(math.ceil(size / ALIGN) * ALIGN for size in sizes)


def takes_room(leaf: Any) -> bool:
    """Return whether a leaf takes room in a slot: it can be stored, or packed with the other tensors of target dicts."""
    if type(leaf) is Tensor or not isinstance(leaf, Tensor):
        return can_be_stored(leaf)
    return can_be_packed(leaf)


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the number of elements from the first to the last element in memory, gaps included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * axis_stride for size, axis_stride in zip(shape, stride, strict=True))
