"""Shared memory of the ring: its layout, its slots, and the descriptions that workers send instead of batches."""

import itertools
import math
import mmap
import os
import weakref
from contextlib import suppress
from multiprocessing import reduction
from typing import Any, Protocol

import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.packed_targets import are_packable, pack_targets

ALIGN = 512
"""Alignment of a tensor in bytes, equal to that of torch's CUDA allocator."""


MAX_GENERATIONS, MAX_SLOTS = 8, 4096
FLAGS_OFFSET = 4096
"""Size of the header in bytes. Behind it: one byte per slot of each generation."""
DATA_OFFSET = FLAGS_OFFSET + MAX_GENERATIONS * MAX_SLOTS
"""Offset of the first byte that a slot may use."""

_keys = itertools.count()


class SlotOwner(Protocol):
    """The process that reads the slots: a ``gpuaug.feed.ring.Ring``."""

    held: set[tuple[int, int]]

    def free(self, number: tuple[int, int]) -> None:
        """Give a slot back to its worker."""


rings: "weakref.WeakValueDictionary[int, SlotOwner]" = weakref.WeakValueDictionary()
"""Key of a memory → the ring of this process that uses it."""


class Memory:
    """The shared file and its mapping in this process.

    Raises:
        OSError: If the file cannot be created or mapped.
    """

    def __init__(self, num_bytes: int, fd: int | None = None, key: int | None = None) -> None:
        self.num_bytes = num_bytes
        self.key = next(_keys) if key is None else key
        """Identifier of the memory in all processes that share it."""
        process = os.getpid()
        self.fd = os.memfd_create("gpuaug-ring") if fd is None else fd
        # A function, not a method: it runs after this object has been collected, or when the interpreter ends.
        weakref.finalize(self, _close_in, process, self.fd)
        if fd is None:
            os.fchmod(self.fd, 0o600)  # otherwise other users could open the file through /proc
            os.ftruncate(self.fd, num_bytes)
        self.map = mmap.mmap(self.fd, num_bytes)
        with torch.inference_mode(False):  # an inference tensor could not be written to outside of inference mode
            self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        # Numbers: the generation in use; then per generation its first byte, bytes per slot, and slots per worker.
        self.header = self.bytes[:FLAGS_OFFSET].view(torch.int64).numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled for a worker that is not forked, with the file descriptor.
        return _attached, (self.num_bytes, reduction.DupFd(self.fd), self.key)

    def flag_at(self, generation: int, slot: int) -> int:
        """Offset of a slot's byte."""
        return FLAGS_OFFSET + (generation - 1) * MAX_SLOTS + slot

    def generation(self) -> tuple[int, int, int, int]:
        """(generation in use or 0, its first byte, bytes per slot, slots per worker)."""
        number = int(self.header[0])
        return number, *self.carved(number)

    def carved(self, generation: int) -> tuple[int, int, int]:
        """(first byte, bytes per slot, slots per worker) of a generation."""
        first, slot_bytes, each = self.header[1 + 3 * generation : 4 + 3 * generation].tolist()
        return first, slot_bytes, each

    def take(self, worker: int) -> "Writer | None":
        """Mark a free slot of a worker as used and return its writer; ``None`` if no slot is free."""
        number, first, slot_bytes, each = self.generation()
        for slot in range(worker * each, (worker + 1) * each):
            flag = self.flag_at(number, slot)
            if not self.map[flag]:
                self.map[flag] = 1
                start = first + slot * slot_bytes
                return Writer(self, number, slot, start, start + slot_bytes)
        return None


def _attached(num_bytes: int, descriptor: Any, key: int) -> Memory:
    return Memory(num_bytes, descriptor.detach(), key)


def _close_in(process: int, fd: int) -> None:
    if os.getpid() == process:
        with suppress(OSError):
            os.close(fd)


class Leaf:
    """Offset, shape, stride and dtype of a tensor in the ring. It replaces the tensor in a batch that a worker sends."""

    __slots__ = ("dtype", "offset", "shape", "stride")

    def __init__(self, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
        self.offset, self.shape, self.stride, self.dtype = offset, shape, stride, dtype

    def __reduce__(self) -> tuple[Any, ...]:
        return Leaf, (self.offset, self.shape, self.stride, self.dtype)

    def tensor(self, memory: Memory) -> Tensor:
        """Return the tensor as a view of the memory."""
        count = _extent(self.shape, self.stride)
        flat = memory.bytes[self.offset : self.offset + count * self.dtype.itemsize].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)

    def apart(self, memory: Memory) -> Tensor:
        """Return the tensor with a storage over its values only, so that pickling it copies nothing else."""
        count = _extent(self.shape, self.stride)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory.map, dtype=self.dtype, count=count, offset=self.offset)
        return flat.as_strided(self.shape, self.stride)


class Writer:
    """Writer of one slot, in the worker."""

    def __init__(self, memory: Memory, generation: int, slot: int, start: int, end: int) -> None:
        self.memory, self.generation, self.slot = memory, generation, slot
        self._start = self._at = start
        self._end = end
        self._placed: dict[int, tuple[Tensor, Leaf]] = {}

    @property
    def used(self) -> bool:
        """Whether memory of the slot has been allocated."""
        return self._at > self._start

    def allocate(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Allocate a tensor in the slot; ``None`` if the slot is full."""
        num_bytes = _extent(shape, stride) * dtype.itemsize
        if self._at + num_bytes > self._end:
            return None
        leaf = Leaf(self._at, tuple(shape), tuple(stride), dtype)
        self._at += math.ceil(num_bytes / ALIGN) * ALIGN
        tensor = leaf.apart(self.memory)
        self._placed[id(tensor)] = tensor, leaf
        return tensor

    def describe(self, batch: Batch) -> "Described | Batch":
        """Copy the batch's tensors into the slot and return the description; ``batch`` itself if no tensor was copied."""

        def describe(leaf: Any) -> Any:
            if id(leaf) in self._placed:
                return self._placed[id(leaf)][1]
            return self._copied(leaf) if can_be_placed(leaf) else leaf

        batch = pack_targets(batch, self._contiguous)
        described = batches.map_leaves(batches.cached_by_id(describe), batch)
        if not self.used:
            return batch
        return Described(self.memory.key, self.generation, self.slot, described)

    def _contiguous(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        return self.allocate(shape, torch.empty(shape, device="meta").stride(), dtype)

    def _copied(self, tensor: Tensor) -> Any:
        stride = preserved_stride(tensor)
        target = self.allocate(tuple(tensor.shape), stride, tensor.dtype)
        if target is None:
            return tensor
        target.copy_(tensor)
        return self._placed[id(target)][1]

    def free(self) -> None:
        """Mark the slot as free."""
        self.memory.map[self.memory.flag_at(self.generation, self.slot)] = 0


class Described:
    """Description of a batch in a slot: the number of the slot, and the batch with a ``Leaf`` for each tensor in the slot."""

    __slots__ = ("_key_and_number", "batch", "slot")

    def __init__(self, key: int, generation: int, slot: int, batch: Batch) -> None:
        self._key_and_number, self.batch = (key, generation, slot), batch
        self.slot: Slot | None = None

    @property
    def number(self) -> tuple[int, int]:
        """(generation, slot)."""
        return self._key_and_number[1:]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_described, (*self._key_and_number, self.batch)


def _unpickle_described(key: int, generation: int, slot: int, batch: Batch) -> Described:
    described = Described(key, generation, slot, batch)
    ring = rings.get(key)
    # The slot is created here: a DataLoader that starts a new epoch drops descriptions in its queue, which frees their slots.
    described.slot = Slot(ring, generation, slot) if ring is not None else None
    return described


class Slot:
    """Slot that holds a batch, in the process that reads it. Deleting this object frees the slot."""

    __slots__ = ("__weakref__", "number", "ring")

    def __init__(self, ring: SlotOwner, generation: int, slot: int) -> None:
        self.ring, self.number = ring, (generation, slot)
        ring.held.add(self.number)

    def __del__(self) -> None:
        self.ring.free(self.number)


def can_be_placed(leaf: Any) -> bool:
    """Whether a leaf of a batch can be stored in a slot: it must be a plain strided CPU tensor without gradients."""
    return (
        type(leaf) is Tensor
        and leaf.is_cpu
        and leaf.layout is torch.strided
        and not (leaf.requires_grad or leaf.is_nested or leaf.is_quantized or leaf.is_neg() or leaf.is_conj())
    )


def preserved_stride(tensor: Tensor) -> tuple[int, ...]:
    """Strides of a copy of ``tensor``: its strides if it is dense, else those of ``torch.empty_like``."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def batch_bytes(batch: Batch) -> int:
    """Size in bytes of a slot for all tensors of a batch that can be stored in a slot."""
    leaves = (leaf for leaf in batches.tensors(batch) if can_be_placed(leaf) or _can_be_packed(leaf))
    unique: dict[int, Tensor] = {id(leaf): leaf for leaf in leaves}
    sizes = (_extent(leaf.shape, preserved_stride(leaf)) * leaf.dtype.itemsize for leaf in unique.values())
    return sum(math.ceil(size / ALIGN) * ALIGN for size in sizes)


def _can_be_packed(leaf: Tensor) -> bool:
    """Whether a tensor of one of torchvision's classes may be packed with others."""
    return type(leaf) is not Tensor and are_packable((leaf,), any_size=True)


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
