"""The ring: slots of shared page-locked memory, into which workers write batches and from which the device reads them.

A *slot* holds one batch of one worker process. Without a ring, a worker of a ``DataLoader`` allocates shared memory for each
batch, and the pin thread maps this memory and copies the batch once more; most of the time of this copy is spent in page
faults. The ring is shared, mapped and page-locked once. A worker collates directly into a slot, and sends a description of the
batch to the training process. The loader's copy stream reads the slot. The slot is free again when the event that was recorded
after the copy has passed, and all tensors that share the memory of the slot have been deleted. The host queries the event
without waiting.

**Memory.** One anonymous file, reserved before the workers start. The file is sparse: only its written pages take memory. It
needs no ``/dev/shm``, and the system frees it when the last process that has it open ends. The size of the first batch is the
size of the first slots. For a larger batch, larger slots are added after the existing slots. Slots that were added together are
a *generation*; workers use the newest one. The memory of older generations is returned to the system.

**Flags.** Each slot has a byte in this memory, its flag, which is 0 if the slot is free and 1 if it is in use. Every slot
belongs to one worker. Only this worker sets the byte to 1, and only the process that reads the ring sets it to 0, so there is
no lock that a killed worker could hold.

A batch that is larger than a slot, or for which no slot is free, is sent without a slot (``shared_storage.py``).
"""

import logging
import math
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import warn
from gpuaug.core.machine import memory_share_bytes
from gpuaug.core.streams import Event
from gpuaug.feed.ring_memory import (
    DATA_OFFSET,
    MAX_GENERATIONS,
    MAX_SLOTS,
    Memory,
    batch_bytes,
    can_be_stored,
    takes_room,
)

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all CUDA contexts of this process
_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered: the memory is not page-locked
GROWTH = 1.25
"""Ratio of the size of new slots to the size of the batch that was too large for the existing slots."""

PageLockedSlots = dict[tuple[int, int], tuple[int, int]]
"""(generation, slot) → (address, bytes) of each page-locked slot.

After an interrupt, the dictionary may contain a slot that is not page-locked.
"""

Copies = deque[tuple[Event, list[Any]]]
"""(event after a copy, objects of the batch), in order, for each batch from which a copy was queued.

The objects keep the slots in use. They do not refer to the ring, whose finaliser refers to this queue.
"""

rings: "weakref.WeakValueDictionary[int, Ring]" = weakref.WeakValueDictionary()
"""``Memory.key`` → ring of this process."""

_page_locked_memories: dict[int, tuple[int, Memory, PageLockedSlots, Copies]] = {}
"""``Memory.key`` → arguments of ``_end_page_locking``, for each memory that may have page-locked slots.

The references keep the memory mapped until no slot is page-locked any more, which an interrupt may delay. If the memory was
unmapped earlier, the process could map other pages at the same addresses, and CUDA would copy from the old pages.
"""

_log = logging.getLogger("gpuaug")


class Slots(NamedTuple):
    """Slots to keep in use until a batch was read. True if ``has_tensors`` is true."""

    ring: "Ring"
    objects: list[Any]
    """Tensors of the batch, objects with a ``to`` method, and the values in these objects. The references keep the slots of the
    tensors in use as long as this object exists."""
    has_tensors: bool = True
    """Whether a tensor of the batch is known to be in a slot. If not, a slot may still be read: the user's loader may have put
    tensors into objects whose tensors cannot be listed, or may have called their ``requires_grad_``."""

    def __bool__(self) -> bool:
        return self.has_tensors


class Ring:
    """The ring, in the process that reads it: the training process.

    Args:
        workers: Number of processes that write into the ring.
        slots_per_worker: Number of slots per worker.
        budget_bytes: Maximum number of bytes of all slots (``feed_bytes`` of the ``StreamedLoader``).

    Raises:
        OSError: If the memory cannot be allocated.
    """

    def __init__(self, workers: int, slots_per_worker: int, budget_bytes: int) -> None:
        self.workers = workers
        self.slots_per_worker = slots_per_worker
        self._budget_bytes = budget_bytes
        for key, arguments in list(_page_locked_memories.items()):
            if key not in rings:  # the ring was deleted, and ``_end_page_locking`` was interrupted
                _end_page_locking(*arguments)
        # Address space for all generations, because slots of older generations may still be read while the newest generation
        # is in use. Unwritten pages take no memory.
        self.memory = Memory(DATA_OFFSET + MAX_GENERATIONS * (budget_bytes + mmap.PAGESIZE))
        self.writers: list[weakref.ref[BaseProcess]] = []
        """Worker processes that write into the slots, or have written into them."""
        rings[self.memory.key] = self  # a weak reference
        self._page_locked_slots: PageLockedSlots = {}
        self._copies: Copies = deque()
        # The thread that reads the user's loader calls ``make_room``, and the training thread ``add_slots``.
        self._generation_lock = threading.Lock()
        self._next_slot_bytes = 0  # size of larger slots that ``make_room`` has left to ``add_slots``; 0: none
        self._warned_of_size = False
        self._page_locking_failed = False
        self._end_page_locking_arguments = os.getpid(), self.memory, self._page_locked_slots, self._copies
        weakref.finalize(self, _end_page_locking, *self._end_page_locking_arguments)

    @property
    def has_writers(self) -> bool:
        """Whether worker processes that write into the slots are alive."""
        return any((process := reference()) is not None and process.is_alive() for reference in self.writers)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of page-locked slots."""
        # A copy: another thread may be adding entries.
        return sum(num_bytes for _, num_bytes in list(self._page_locked_slots.values()))

    @property
    def size_text(self) -> str:
        """Text for the loader's ``repr``: number and size of the slots of the newest generation."""
        _, _, slot_bytes, count = self.memory.newest_generation()
        return f"{count * self.workers} slots of {slot_bytes / 1e6:.1f} MB" if count else "no slots yet"

    def receive(self, batch: Batch) -> tuple[Batch, Slots]:
        """Return (batch, its slots) for a batch from the user's loader, which may have joined batches of several slots.

        If the batch is not in a slot, or the slot had no room for a tensor, larger slots are added if the batch does not fit
        into the existing ones.
        """
        objects = [*batches.objects_to_keep((batch,))]
        tensors = [leaf for leaf in batches.leaves(objects) if takes_room(leaf) and leaf.numel()]
        start = self.memory.bytes.data_ptr()
        outside = {id(leaf): leaf for leaf in tensors if not start <= leaf.data_ptr() < start + self.memory.num_bytes}
        has_slots = any(id(leaf) not in outside for leaf in tensors)
        # Workers write neither tensors of subclasses nor tensors inside other objects into slots: these need no larger slots.
        if outside and (not has_slots or any(id(leaf) in outside and can_be_stored(leaf) for leaf in objects)):
            self.make_room(tensors)
        # Only objects that the device may read: others could refer to the loader, so ``Copies`` would keep the ring forever.
        return batch, Slots(self, [leaf for leaf in objects if type(leaf) is list or hasattr(leaf, "to")], has_slots)

    def make_room(self, batch: Batch) -> bool:
        """Add slots of the size of ``batch`` if it is larger than the existing slots, and the budget suffices.

        Call for a batch that came without a slot.

        Returns:
            Whether the ring has slots, of any size.
        """
        needed_bytes = batch_bytes(batch)
        with self._generation_lock:
            newest_number, _, slot_bytes, _ = self.memory.newest_generation()
            if needed_bytes > slot_bytes:
                needed_bytes = math.ceil(needed_bytes * (GROWTH if newest_number else 1) / mmap.PAGESIZE) * mmap.PAGESIZE
                # Older slots count against the budget: workers may be writing into them until the next epoch begins.
                generations = map(self.memory.generation, range(1, newest_number + 1))
                older_bytes = sum(count * size for _, size, count in generations) * self.workers
                slots = self._slots_within_budget(needed_bytes, older_bytes)
                if slots and newest_number < MAX_GENERATIONS:
                    self._add_generation(needed_bytes, slots)
                    return True
                if self._slots_within_budget(needed_bytes):  # the budget will suffice when older slots are released
                    self._next_slot_bytes = max(self._next_slot_bytes, needed_bytes)
                else:
                    self._warn_of_size(needed_bytes)
            return newest_number > 0

    def _warn_of_size(self, slot_bytes: int) -> None:
        """Warn, once, that one slot of ``slot_bytes`` bytes per worker exceeds the budget."""
        if self._warned_of_size:
            return
        self._warned_of_size = True
        subject = "one slot takes" if self.workers == 1 else f"one slot for each of {self.workers} workers takes"
        warn(
            f"Batches of {slot_bytes / 1e6:.1f} MB travel without slots, which is slower, because {subject} "
            f"{slot_bytes * self.workers} bytes and feed_bytes is {self._budget_bytes}. Raise feed_bytes of the "
            "StreamedLoader, or lower batch_size or num_workers of the DataLoader."
        )

    def add_slots(self, slots_per_worker: int) -> None:
        """Add a generation of slots if ``make_room`` has postponed larger slots, or if ``slots_per_worker`` increases.

        Call when an epoch begins, immediately before older slots are released. Running workers use the slots from their next
        batch on.
        """
        with self._generation_lock:
            newest_number, _, slot_bytes, current_slots = self.memory.newest_generation()
            needed_bytes = max(self._next_slot_bytes, slot_bytes)
            is_increased = slots_per_worker > self.slots_per_worker
            self.slots_per_worker = max(slots_per_worker, self.slots_per_worker)
            self._next_slot_bytes = 0
            slots = self._slots_within_budget(needed_bytes) if needed_bytes else 0
            if not (slots and needed_bytes > slot_bytes) and not (is_increased and slots > current_slots):
                return  # neither larger nor more slots are needed, or they exceed the budget
            if newest_number < MAX_GENERATIONS:
                self._add_generation(needed_bytes, slots)
            elif is_increased:
                _log.warning(
                    "Workers have %d slots each, fewer than the %d for this depth, because the slots of a ring can be changed "
                    "only %d times. Call loader.close() between two loops: workers then start again with a new ring.",
                    current_slots,
                    slots_per_worker,
                    MAX_GENERATIONS,
                )

    def _slots_within_budget(self, slot_bytes: int, older_bytes: int = 0) -> int:
        """Return the number of new slots per worker that fit into the budget beside older slots of ``older_bytes`` in all."""
        slots_in_budget = max(self._budget_bytes - older_bytes, 0) // (slot_bytes * self.workers)
        return min(self.slots_per_worker, slots_in_budget, MAX_SLOTS // self.workers)

    def _add_generation(self, slot_bytes: int, slots_per_worker: int) -> None:
        """Add a generation of slots. Call with ``_generation_lock`` held."""
        newest_number, old_start, old_bytes, old_count = self.memory.newest_generation()
        old_end = old_start + old_bytes * old_count * self.workers
        start = max(old_end, math.ceil(DATA_OFFSET / mmap.PAGESIZE) * mmap.PAGESIZE)
        header = self.memory.header
        new_number = newest_number + 1
        # Layout of the header, in 64-bit integers: number of the newest generation, then (offset of the first slot, bytes per
        # slot, slots per worker) of each generation. Generation 0 has no slots.
        header[1 + 3 * new_number : 4 + 3 * new_number] = start, slot_bytes, slots_per_worker
        header[0] = new_number  # written last, because workers read the number before the values of the generation

    def free_slots_of_ended_workers(self) -> None:
        """Free the slots into which workers were writing when they ended, and release older generations.

        Call before new workers start.
        """
        for generation in range(1, self.memory.newest_generation()[0] + 1):
            slots_per_worker = self.memory.generation(generation)[2]
            for slot in range(self.workers * slots_per_worker):
                if (generation, slot) not in self.memory.slots_in_use:
                    self.memory.map[self.memory.flag_at(generation, slot)] = 0
        self.release_old_generations()

    def release_old_generations(self) -> None:
        """Release the memory of older generations to the system. Call when no worker writes into older slots any more."""
        for generation in range(1, self.memory.newest_generation()[0]):
            start, slot_bytes, slots_per_worker = self.memory.generation(generation)  # no slots if it was released earlier
            # A copy of the set, because another thread may be adding entries.
            used_generations = {number for number, _ in self.memory.slots_in_use.copy()}
            if slots_per_worker and generation not in used_generations:
                num_bytes = slot_bytes * slots_per_worker * self.workers
                old_slots = [slot for slot in self._page_locked_slots if slot[0] == generation]
                if _end_page_locking_of(self._page_locked_slots, old_slots):
                    self.memory.map.madvise(mmap.MADV_REMOVE, start, num_bytes)
                    self.memory.header[3 + 3 * generation] = 0  # slots per worker: the generation has no slots any more

    def page_lock(self) -> None:
        """Page-lock all slots in use that are not page-locked. Call before one is read, on a thread that may make CUDA calls.

        If CUDA fails, warn, and page-lock no other slots.

        Cost:
            Once per slot, a millisecond for a few megabytes.
        """
        for number in self.memory.slots_in_use.copy():  # a copy, because another thread may be adding entries
            if number in self._page_locked_slots or self._page_locking_failed:
                continue
            start, slot_bytes, _ = self.memory.generation(number[0])
            address = self.memory.bytes.data_ptr() + start + number[1] * slot_bytes
            # Stored before the CUDA call: a signal handler may raise KeyboardInterrupt or an error when the call returns.
            _page_locked_memories[self.memory.key] = self._end_page_locking_arguments
            self._page_locked_slots[number] = address, slot_bytes
            error = int(torch.cuda.cudart().cudaHostRegister(address, slot_bytes, _PORTABLE))
            if error:
                self._page_locking_failed = True
                del self._page_locked_slots[number]
                _clear_error()
                self._warn_of_page_locking(slot_bytes, error)

    def _warn_of_page_locking(self, slot_bytes: int, error: int) -> None:
        """Warn that CUDA could not page-lock a slot. No other slot is page-locked afterwards."""
        if self.pinned_bytes >= slot_bytes * self.workers:
            advice = f"Lower feed_bytes of the StreamedLoader to {self.pinned_bytes}, the bytes that could be page-locked."
        else:
            advice = (
                "Lower batch_size of the DataLoader, or pass feed='plain' to the StreamedLoader and pin_memory=True to the "
                "DataLoader."
            )
        warn(
            f"Copies of batches make the training thread wait, because a slot of {slot_bytes / 1e6:.1f} MB could not be "
            f"page-locked (CUDA error {error}). {advice}"
        )

    def free_after(self, slots: Slots, event: Event) -> None:
        """Keep slots in use until ``event``, which was recorded after the copy from them, has passed. Does not wait."""
        self._copies.append((event, slots.objects))

    def free_read_slots(self) -> None:
        """Drop the objects of each batch whose copy has ended, which frees its slots. Does not wait."""
        while self._copies and self._copies[0][0].query():
            self._copies.popleft()

    def close(self) -> None:
        """Wait for copies from slots, then end the page-locking of all slots. Idempotent."""
        _end_page_locking(*self._end_page_locking_arguments)


def _end_page_locking(process: int, memory: Memory, page_locked_slots: PageLockedSlots, copies: Copies) -> None:
    """End the page-locking of all slots, after copies from them. After an error or an interrupt, another call continues.

    A function, not a method, because it also runs as the finaliser of the ring. It does nothing in other processes than
    ``process``, the id of the process that created the ring.
    """
    if os.getpid() != process:
        return
    # Errors are suppressed: when the interpreter ends, the CUDA context may have ended, and page-locking with it.
    with suppress(Exception):
        while copies:
            copies[0][0].synchronize()
            copies.popleft()
        if _end_page_locking_of(page_locked_slots, list(page_locked_slots)):
            _page_locked_memories.pop(memory.key, None)


def _end_page_locking_of(page_locked_slots: PageLockedSlots, slots: Sequence[tuple[int, int]]) -> bool:
    """End the page-locking of ``slots``. Return whether none of them is page-locked any more."""
    for slot in slots:
        error = int(torch.cuda.cudart().cudaHostUnregister(page_locked_slots[slot][0]))
        if error:
            _clear_error()
        if error in (0, _NOT_REGISTERED):  # not registered: an earlier call was interrupted after it had ended the page-locking
            del page_locked_slots[slot]
    return not any(slot in page_locked_slots for slot in slots)


def _clear_error() -> None:
    """Clear the error that CUDA has stored after a failed call. Otherwise the next launch of the user would raise it."""
    with suppress(Exception):  # this launch raises the stored error, and so clears it
        torch.empty(1, device="cuda").fill_(1)


def default_budget_bytes() -> int:
    """Return the default of ``feed_bytes``: an eighth of the host's memory, divided by the number of torchrun's processes."""
    return memory_share_bytes() // 8


def unsupported_reason() -> str:
    """Return the reason why this system does not support the ring; an empty string if it does."""
    return "" if sys.platform == "linux" and hasattr(os, "memfd_create") else "the ring needs Linux"
