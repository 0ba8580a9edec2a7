"""The ring: slots of memory that workers write batches into, and that the device reads them from.

A ``DataLoader`` moves a batch through memory that its worker has freshly allocated, its pin thread has freshly mapped, and
that thread copies it once more; nearly all of that is page faults. The ring is shared, mapped and page-locked once. A worker
collates straight into a slot of it and sends a description; the copy lane reads the slot; the slot is free again when that
copy's mark has been passed, which is seen without waiting.

**Memory.** One anonymous file, reserved before the workers start and sparse, so that it takes memory only where it is written.
It needs no ``/dev/shm`` and goes with the last process that has it. Slots are carved from it once a batch has shown its size.
Larger batches have larger slots carved behind those, a new *generation*, and the older ones are given back.

**Whose a slot is** stands in a byte of that memory: 0, free; 1, in use. Every slot belongs to one worker. That worker alone
sets its byte to 1, this process alone sets it to 0, so there is no lock that a killed worker could take along.

Whatever does not fit, or finds no free slot, travels as it would without a ring.
"""

import itertools
import logging
import math
import mmap
import os
import sys
import weakref
from collections import deque
from contextlib import suppress
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.streams import Mark

ALIGN = 512
"""Where a leaf begins, in bytes: at what torch's own allocators begin."""

_GENERATIONS, _MOST_SLOTS = 8, 4096
_FLAGS = 4096
_DATA = _FLAGS + _GENERATIONS * _MOST_SLOTS
_PORTABLE = 1  # registered for all of this process's contexts
GROWTH = 1.25
"""How much larger than what it has to hold a slot of a later generation is."""

POISON = False
"""Whether slots are overwritten when they are given back, for tests: what reads one too late is then wrong for certain."""

_log = logging.getLogger("gpuaug")
_keys = itertools.count()
_rings: "weakref.WeakValueDictionary[int, Ring]" = weakref.WeakValueDictionary()
"""Those of this process, by the key of their memory."""


class Memory:
    """The shared file and its mapping in this process.

    Raises:
        OSError: If it cannot be made or mapped here.
    """

    def __init__(self, num_bytes: int, fd: int | None = None, key: int | None = None) -> None:
        self.num_bytes = num_bytes
        self.key = next(_keys) if key is None else key
        """The same in all processes that share it."""
        self.fd = os.memfd_create("gpuaug-ring") if fd is None else fd
        try:
            if fd is None:
                os.ftruncate(self.fd, num_bytes)
            self.map = mmap.mmap(self.fd, num_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        with torch.inference_mode(False):  # or nothing could write to it outside of the consumer's inference mode
            self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        # Five numbers: the generation in use, then of each its first byte, the bytes of a slot, and the slots of a worker.
        self.header = self.bytes[:_FLAGS].view(torch.int64).numpy()
        # Not a method: it runs when this is collected, and when the interpreter ends.
        self._close = weakref.finalize(self, _close_in, os.getpid(), self.fd)

    def __reduce__(self) -> tuple[Any, ...]:
        # To a worker that is not forked: the descriptor goes along.
        return _attached, (self.num_bytes, reduction.DupFd(self.fd), self.key)

    def flag_at(self, generation: int, slot: int) -> int:
        """Where a slot's byte is."""
        return _FLAGS + (generation - 1) * _MOST_SLOTS + slot

    def generation(self) -> tuple[int, int, int, int]:
        """The generation in use, 0 for none, its first byte, the bytes of a slot, and how many slots a worker has."""
        number = int(self.header[0])
        return number, *self.carved(number)

    def carved(self, generation: int) -> tuple[int, int, int]:
        """Of a generation the first byte, the bytes of a slot, and how many slots a worker has."""
        first, slot_bytes, each = self.header[1 + 3 * generation : 4 + 3 * generation].tolist()
        return first, slot_bytes, each

    def take(self, worker: int) -> "Writer | None":
        """A free slot of a worker, or ``None``."""
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
    """Where a tensor of a batch lies in the ring. Stands in its place while the batch is on its way."""

    __slots__ = ("dtype", "offset", "shape", "stride")

    def __init__(self, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
        self.offset, self.shape, self.stride, self.dtype = offset, shape, stride, dtype

    def __reduce__(self) -> tuple[Any, ...]:
        return Leaf, (self.offset, self.shape, self.stride, self.dtype)

    def tensor(self, memory: Memory) -> Tensor:
        """The tensor itself, which shares the slot's memory."""
        count = _extent(self.shape, self.stride)
        flat = memory.bytes[self.offset : self.offset + count * self.dtype.itemsize].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)

    def apart(self, memory: Memory) -> Tensor:
        """The tensor with a storage of its own, that of its values: what is pickled of it takes along no more than those."""
        count = _extent(self.shape, self.stride)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory.map, dtype=self.dtype, count=count, offset=self.offset)
        return flat.as_strided(self.shape, self.stride)


class Writer:
    """A slot that is being written."""

    def __init__(self, memory: Memory, generation: int, slot: int, start: int, end: int) -> None:
        self.memory, self.generation, self.slot = memory, generation, slot
        self._start = self._at = start
        self._end = end
        self._placed: dict[int, tuple[Tensor, Leaf]] = {}

    @property
    def used(self) -> bool:
        """Whether anything has been placed."""
        return self._at > self._start

    def place(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Memory for a tensor, or ``None`` if there is no room."""
        num_bytes = _extent(shape, stride) * dtype.itemsize
        if self._at + num_bytes > self._end:
            return None
        leaf = Leaf(self._at, tuple(shape), tuple(stride), dtype)
        self._at += math.ceil(num_bytes / ALIGN) * ALIGN
        tensor = leaf.apart(self.memory)
        self._placed[id(tensor)] = tensor, leaf
        return tensor

    def describe(self, batch: Batch) -> "Described | Batch":
        """The batch with its tensors in the slot and descriptions in their place; or itself, if nothing could be placed."""

        def describe(leaf: Any) -> Any:
            if id(leaf) in self._placed:
                return self._placed[id(leaf)][1]
            return self._copied(leaf) if can_be_placed(leaf) else leaf

        described = batches.map_leaves(batches.once_each(describe), batch)
        if not self.used:
            return batch
        return Described(self.memory.key, self.generation, self.slot, described)

    def _copied(self, tensor: Tensor) -> Any:
        stride = preserved_stride(tensor)
        place = self.place(tuple(tensor.shape), stride, tensor.dtype)
        if place is None:
            return tensor
        place.copy_(tensor)
        return self._placed[id(place)][1]

    def give_back(self) -> None:
        """Free the slot unused."""
        self.memory.map[self.memory.flag_at(self.generation, self.slot)] = 0


class Described:
    """A batch on its way, as a worker puts it into the queue."""

    __slots__ = ("_whose", "batch", "slot")

    def __init__(self, key: int, generation: int, slot: int, batch: Batch) -> None:
        self._whose, self.batch = (key, generation, slot), batch
        self.slot: Slot | None = None

    @property
    def number(self) -> tuple[int, int]:
        """The slot's generation and place."""
        return self._whose[1:]

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (*self._whose, self.batch)


def _arrived(key: int, generation: int, slot: int, batch: Batch) -> Described:
    described = Described(key, generation, slot, batch)
    ring = _rings.get(key)
    # Held from here on: a DataLoader that starts a new epoch drops what it still finds in its queue.
    described.slot = Slot(ring, generation, slot) if ring is not None else None
    return described


class Slot:
    """A slot that holds a batch, in the process that reads it. It is free again when this object is gone."""

    __slots__ = ("__weakref__", "number", "ring")

    def __init__(self, ring: "Ring", generation: int, slot: int) -> None:
        self.ring, self.number = ring, (generation, slot)
        ring.held.add(self.number)

    def __del__(self) -> None:
        self.ring.free(self.number)


class Ring:
    """The ring as the process that reads it has it.

    Args:
        workers: How many write into it.
        each: How many slots a worker is to have.
        budget_bytes: How much memory all slots together may take.

    Raises:
        OSError: If the memory cannot be had.
    """

    def __init__(self, workers: int, each: int, budget_bytes: int) -> None:
        self.workers, self._each, self._budget = workers, each, budget_bytes
        # Older generations drain while the newest, within the budget, is in use; unwritten memory takes none.
        self.memory = Memory(_DATA + _GENERATIONS * (budget_bytes + mmap.PAGESIZE))
        self.held: set[tuple[int, int]] = set()
        _rings[self.memory.key] = self
        self._process = os.getpid()
        self._registered: dict[int, int] = {}
        # Of slots that are being read, in order. Apart from the slots, which hold the ring: the finaliser may not.
        self._marks: deque[Mark] = deque()
        self._slots: deque[Slot] = deque()
        self._said_too_large = False
        self._cannot_lock = False
        self._finish = weakref.finalize(self, _unregister, self._process, self.memory, self._registered, self._marks)

    def received(self, described: Described) -> tuple[Batch, Slot]:
        """The batch whose description arrived, with tensors that share the slot's memory."""
        slot = described.slot or Slot(self, *described.number)

        def tensor(leaf: Any) -> Any:
            return leaf.tensor(self.memory) if type(leaf) is Leaf else leaf

        return batches.map_leaves(batches.once_each(tensor), described.batch), slot

    def make_room(self, batch: Batch) -> bool:
        """Have slots carved that hold batches like this one, which travelled without; whether there are some now."""
        wanted = batch_bytes(batch)
        number, first, slot_bytes, each = self.memory.generation()
        if wanted <= slot_bytes or not wanted:
            return number > 0
        wanted = math.ceil(wanted * (GROWTH if number else 1) / mmap.PAGESIZE) * mmap.PAGESIZE
        slots = min(self._each, self._budget // (wanted * self.workers), _MOST_SLOTS // self.workers)
        if not slots or number == _GENERATIONS:
            if not self._said_too_large:
                _log.info("Batches of %.1f MB do not fit into the feed's %.0f MB of slots.", wanted / 1e6, self._budget / 1e6)
                self._said_too_large = True
            return number > 0
        start = max(first + slot_bytes * each * self.workers, math.ceil(_DATA / mmap.PAGESIZE) * mmap.PAGESIZE)
        header, after = self.memory.header, number + 1
        header[1 + 3 * after : 4 + 3 * after] = start, wanted, slots
        header[0] = after
        return True

    def new_workers(self) -> None:
        """Free what workers that are gone have left behind. To be called before others are started."""
        number, *_ = self.memory.generation()
        for generation in range(1, number + 1):
            each = self.memory.carved(generation)[2]
            for slot in range(self.workers * each):
                if (generation, slot) not in self.held:
                    self.memory.map[self.memory.flag_at(generation, slot)] = 0
        self._drop_old(number)

    def _drop_old(self, current: int) -> None:
        """Give memory of older generations back to the system."""
        for generation in range(1, current):
            first, slot_bytes, each = self.memory.carved(generation)
            if each and not any(number == generation for number, _ in self.held):
                end = first + slot_bytes * each * self.workers
                for offset in [offset for offset in self._registered if first <= offset < end]:
                    _unregister_at(self.memory, offset)
                    del self._registered[offset]
                self.memory.map.madvise(mmap.MADV_REMOVE, first, end - first)
                self.memory.header[3 + 3 * generation] = 0

    def register(self, slot: Slot) -> None:
        """Page-lock a slot, the first time that it is read. Only where CUDA calls may be made.

        Cost:
            Once a slot, a millisecond for some megabytes.
        """
        generation, index = slot.number
        first, slot_bytes, _ = self.memory.carved(generation)
        offset = first + index * slot_bytes
        if offset in self._registered or self._cannot_lock:
            return
        error = torch.cuda.cudart().cudaHostRegister(self.memory.bytes.data_ptr() + offset, slot_bytes, _PORTABLE)
        if int(error):
            self._cannot_lock = True
            # A call that failed leaves its error for the next launch to find, which would be one of the user's.
            with suppress(RuntimeError):
                torch.empty(1, device="cuda").fill_(1)
            _log.warning(
                "A slot of %.1f MB could not be page-locked (CUDA error %s), so copies will hold up the training thread. "
                "Lower feed_bytes, or raise the limit of locked memory.",
                slot_bytes / 1e6,
                error,
            )
            return
        self._registered[offset] = slot_bytes

    def read_until(self, slot: Slot, mark: Mark) -> None:
        """Keep a slot until ``mark`` has been passed, after which its memory has been read."""
        self._marks.append(mark)
        self._slots.append(slot)

    def collect(self) -> None:
        """Free the slots that have been read. Waits for nothing."""
        while self._marks and self._marks[0].query():
            self._marks.popleft()
            self._slots.popleft()

    def free(self, number: tuple[int, int]) -> None:
        """Give a slot back to its worker."""
        if os.getpid() != self._process:
            return  # a copy in a forked worker, whose slots are not its own
        self.held.discard(number)
        generation, index = number
        if POISON:
            first, slot_bytes, _ = self.memory.carved(generation)
            self.memory.bytes[first + index * slot_bytes : first + (index + 1) * slot_bytes] = 0xAA
        self.memory.map[self.memory.flag_at(generation, index)] = 0

    def close(self) -> None:
        """Wait for copies out of the ring and let go of its memory. Idempotent."""
        self._finish()
        self._slots.clear()


def _unregister(process: int, memory: Memory, registered: dict[int, int], marks: deque[Mark]) -> None:
    if os.getpid() != process:
        return
    # At the interpreter's end the device may be gone already, and all of this with it.
    with suppress(Exception):
        for mark in marks:
            mark.synchronize()
        for offset in list(registered):
            _unregister_at(memory, offset)
    marks.clear()
    registered.clear()


def _unregister_at(memory: Memory, offset: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.bytes.data_ptr() + offset)


def can_be_placed(leaf: Any) -> bool:
    """Whether a leaf of a batch may travel in a slot: only a plain tensor of plain values does."""
    return (
        type(leaf) is Tensor
        and leaf.is_cpu
        and leaf.layout is torch.strided
        and not (leaf.requires_grad or leaf.is_nested or leaf.is_quantized or leaf.is_neg() or leaf.is_conj())
    )


def preserved_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a copy: the same where values fill their memory, else those of a fresh tensor in that order."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def batch_bytes(batch: Batch) -> int:
    """How large a slot has to be to hold all of a batch that can be placed."""
    seen: dict[int, Tensor] = {id(leaf): leaf for leaf in batches.tensors(batch) if can_be_placed(leaf)}
    sizes = (_extent(leaf.shape, preserved_stride(leaf)) * leaf.dtype.itemsize for leaf in seen.values())
    return sum(math.ceil(size / ALIGN) * ALIGN for size in sizes)


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def default_budget_bytes() -> int:
    """An eighth of the memory that this process may use."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError), open(path, encoding="ascii") as limit:
            most = min(most, int(limit.read()))
    return most // 8


def why_not_here() -> str | None:
    """Why there can be no ring on this system, or ``None``."""
    return None if sys.platform == "linux" and hasattr(os, "memfd_create") else "the ring is for Linux"
