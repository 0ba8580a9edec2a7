"""The ring: slots of shared page-locked memory, into which workers write batches and from which the device reads them.

A ``DataLoader`` allocates shared memory for each batch in the worker; its pin thread maps that memory and copies the batch once
more. Nearly all of the time is spent in page faults. The ring is shared, mapped and page-locked once. A worker collates
directly into a slot and sends a description of the batch; the copy lane reads the slot; the slot is free again when the event
recorded after the copy has passed, which is queried without waiting.

**Memory.** One anonymous file, reserved before the workers start. It is sparse, so that it takes memory only where it is
written. It needs no ``/dev/shm``, and the system frees it when the last process that has it open ends. It is divided into slots
when the first batch has shown its size. Larger batches get larger slots behind the existing ones, a new *generation*, and the
memory of older generations is returned to the system.

**A slot's byte** in that memory is 0 if it is free and 1 if it is in use. Every slot belongs to one worker. That worker alone
sets its byte to 1, this process alone sets it to 0, so there is no lock that a killed worker could keep.

A batch that is larger than a slot, or for which no slot is free, travels as it would without a ring.
"""

import logging
import math
import mmap
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import GpuAugWarning
from gpuaug.core.machine import memory_share_bytes
from gpuaug.core.streams import Event
from gpuaug.feed.ring_memory import DATA_OFFSET, MAX_GENERATIONS, MAX_SLOTS, Described, Leaf, Memory, Slot, batch_bytes, rings

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all CUDA contexts of this process
_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered
GROWTH = 1.25
"""Ratio of the slot size of a later generation to the size of the batch that required it."""

POISON = False
"""Whether freed slots are overwritten, for tests: a read that comes too late then returns wrong values."""

Registered = dict[tuple[int, int], tuple[int, int]]
"""(generation, slot) → (offset, bytes) of each slot that may be page-locked."""

_locked: dict[int, tuple[int, Memory, Registered, deque[Event]]] = {}
"""Arguments of ``_unregister`` for each memory that may be page-locked, by its key.

CUDA copies from the pages that it has locked, even if the process has mapped others at their addresses since. So memory stays
mapped until CUDA has unregistered all of it, although the call that does so may be interrupted.
"""

_log = logging.getLogger("gpuaug")


class Ring:
    """The ring, in the process that reads it.

    Args:
        workers: Number of processes that write into it.
        each: Number of slots per worker.
        budget_bytes: Limit of the bytes of all slots.

    Raises:
        OSError: If the memory cannot be allocated.
    """

    def __init__(self, workers: int, each: int, budget_bytes: int) -> None:
        self.workers, self.each, self._budget = workers, each, budget_bytes
        for key, arguments in list(_locked.items()):
            if key not in rings:  # unregistering was interrupted when that ring was collected
                _unregister(*arguments)
        # Slots of older generations may still be read while the newest, within the budget, is in use. Unwritten memory is free.
        self.memory = Memory(DATA_OFFSET + MAX_GENERATIONS * (budget_bytes + mmap.PAGESIZE))
        self.held: set[tuple[int, int]] = set()
        rings[self.memory.key] = self
        self._process = os.getpid()
        self._registered: Registered = {}
        # Events of slots that are being read, in order. Not stored with the slots: slots hold the ring, which the arguments of
        # the finaliser must not hold.
        self._events: deque[Event] = deque()
        self._slots: deque[Slot] = deque()
        self._carving = threading.Lock()  # the feed's thread carves larger slots, the training thread carves more slots
        self._larger_bytes = 0
        self._warned_of_size = False
        self._cannot_lock = False
        self._to_unregister = self._process, self.memory, self._registered, self._events
        weakref.finalize(self, _unregister, *self._to_unregister)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of page-locked slots."""
        # A copy: another thread may be adding entries.
        return sum(num_bytes for _, num_bytes in list(self._registered.values()))

    @property
    def size(self) -> str:
        """Text about the number and size of slots, for the loader's ``repr``."""
        _, _, slot_bytes, each = self.memory.generation()
        return f"{each * self.workers} slots of {slot_bytes / 1e6:.1f} MB" if each else "no slots yet"

    def received(self, described: Described) -> tuple[Batch, Slot]:
        """(batch, slot) of a description that arrived. The batch's tensors share the memory of the slot."""
        slot = described.slot or Slot(self, *described.number)

        def tensor(leaf: Any) -> Any:
            return leaf.tensor(self.memory) if type(leaf) is Leaf else leaf

        return batches.map_leaves(batches.cached_by_id(tensor), described.batch), slot

    def make_room(self, batch: Batch) -> bool:
        """Carve slots large enough for ``batch``, which arrived without a slot. Return whether slots exist, of any size."""
        needed_bytes = batch_bytes(batch)
        with self._carving:
            number, _, slot_bytes, _ = self.memory.generation()
            if needed_bytes <= slot_bytes or not needed_bytes:
                return number > 0
            needed_bytes = math.ceil(needed_bytes * (GROWTH if number else 1) / mmap.PAGESIZE) * mmap.PAGESIZE
            # Workers may be writing into older slots, whose memory stays until the next iteration.
            older = sum(each * size for _, size, each in map(self.memory.carved, range(1, number + 1))) * self.workers
            slots = self._slots_within_budget(needed_bytes, older)
            if slots and number < MAX_GENERATIONS:
                self._carve(needed_bytes, slots)
                return True
            if self._slots_within_budget(needed_bytes):
                self._larger_bytes = max(self._larger_bytes, needed_bytes)
                return number > 0
            self._warn_of_size(needed_bytes)
            return number > 0

    def _warn_of_size(self, slot_bytes: int) -> None:
        """Warn once that batches are too large for one slot per worker."""
        if self._warned_of_size:
            return
        self._warned_of_size = True
        writers = "one slot takes" if self.workers == 1 else f"one slot for each of {self.workers} workers takes"
        warnings.warn(
            f"Batches of {slot_bytes / 1e6:.1f} MB travel without slots, which is slower, because {writers} "
            f"{slot_bytes * self.workers} bytes and feed_bytes is {self._budget}. Raise feed_bytes of the StreamedLoader, or "
            "lower batch_size or num_workers of the DataLoader.",
            GpuAugWarning,
            stacklevel=2,
        )

    def enlarge(self) -> None:
        """Carve the larger slots for which there was no memory beside the older ones. Call before ``drop_old``."""
        with self._carving:
            slots = self._slots_within_budget(self._larger_bytes) if self._larger_bytes else 0
            if slots and self.memory.generation()[0] < MAX_GENERATIONS:
                self._carve(self._larger_bytes, slots)
            self._larger_bytes = 0

    def widen(self, each: int) -> None:
        """Raise the slots per worker to ``each``, within the budget. Running workers see the new number at their next batch."""
        with self._carving:
            self.each = each
            number, _, slot_bytes, now = self.memory.generation()
            slots = self._slots_within_budget(slot_bytes) if number else 0
            if slots > now and number < MAX_GENERATIONS:
                self._carve(slot_bytes, slots)
            elif slots > now:
                _log.warning(
                    "A worker must have %d slots at this depth, got %d, because a ring can be carved %d times only. "
                    "Call loader.close() between two loops: workers are then started anew, with another ring.",
                    each,
                    now,
                    MAX_GENERATIONS,
                )

    def _slots_within_budget(self, slot_bytes: int, older_bytes: int = 0) -> int:
        """Number of slots per worker within the budget, beside ``older_bytes`` of older slots."""
        within = max(self._budget - older_bytes, 0) // (slot_bytes * self.workers)
        return min(self.each, within, MAX_SLOTS // self.workers)

    def _carve(self, slot_bytes: int, each: int) -> None:
        """Begin a new generation of slots. The caller holds the lock."""
        number, first, old_bytes, old_each = self.memory.generation()
        start = max(first + old_bytes * old_each * self.workers, math.ceil(DATA_OFFSET / mmap.PAGESIZE) * mmap.PAGESIZE)
        header, after = self.memory.header, number + 1
        header[1 + 3 * after : 4 + 3 * after] = start, slot_bytes, each
        header[0] = after

    def new_workers(self) -> None:
        """Free slots that were in use by workers that have ended. Call before new workers start."""
        number, *_ = self.memory.generation()
        for generation in range(1, number + 1):
            each = self.memory.carved(generation)[2]
            for slot in range(self.workers * each):
                if (generation, slot) not in self.held:
                    self.memory.map[self.memory.flag_at(generation, slot)] = 0
        self.drop_old()

    def drop_old(self) -> None:
        """Return the memory of older generations to the system. Call when no worker writes into them any more."""
        for generation in range(1, self.memory.generation()[0]):
            first, slot_bytes, each = self.memory.carved(generation)
            # A copy of ``held``: the feed's thread may be adding entries.
            if each and not any(number == generation for number, _ in self.held.copy()):
                end = first + slot_bytes * each * self.workers
                old = [number for number in self._registered if number[0] == generation]
                if _unregister_all(self.memory, self._registered, old):
                    self.memory.map.madvise(mmap.MADV_REMOVE, first, end - first)
                    self.memory.header[3 + 3 * generation] = 0

    def register(self, slot: Slot) -> None:
        """Page-lock a slot when it is read for the first time. Call on a thread that may make CUDA calls.

        Cost:
            Once per slot, a millisecond for a few megabytes.
        """
        if slot.number in self._registered or self._cannot_lock:
            return
        generation, index = slot.number
        first, slot_bytes, _ = self.memory.carved(generation)
        offset = first + index * slot_bytes
        # Recorded first: when the call returns, a signal handler may raise KeyboardInterrupt or an error about a dead worker.
        _locked[self.memory.key] = self._to_unregister
        self._registered[slot.number] = offset, slot_bytes
        error = int(torch.cuda.cudart().cudaHostRegister(self.memory.bytes.data_ptr() + offset, slot_bytes, _PORTABLE))
        if error:
            self._cannot_lock = True
            del self._registered[slot.number]
            _clear_error()
            self._warn_of_locking(slot_bytes, error)

    def _warn_of_locking(self, slot_bytes: int, error: int) -> None:
        """Warn that slots stay pageable, because CUDA could not page-lock another one."""
        if self.pinned_bytes >= slot_bytes * self.workers:
            way_out = f"Lower feed_bytes of the StreamedLoader to {self.pinned_bytes}, which could be page-locked."
        else:
            way_out = (
                "Lower batch_size of the DataLoader, or pass feed='plain' to the StreamedLoader and pin_memory=True to the "
                "DataLoader."
            )
        warnings.warn(
            f"Copies of batches make the training thread wait, because a slot of {slot_bytes / 1e6:.1f} MB could not be "
            f"page-locked (CUDA error {error}). {way_out}",
            GpuAugWarning,
            stacklevel=2,
        )

    def read_until(self, slot: Slot, event: Event) -> None:
        """Keep a slot in use until ``event``, recorded after its last copy, has passed."""
        self._slots.append(slot)  # first: after an interrupt between the two, slots are freed late and not early
        self._events.append(event)

    def free_read_slots(self) -> None:
        """Drop slots whose copies have ended, which frees them (``Slot.__del__``). Does not wait."""
        while self._events and self._events[0].query():
            self._events.popleft()
            self._slots.popleft()
        if not self._events:
            self._slots.clear()

    def free(self, number: tuple[int, int]) -> None:
        """Give a slot back to its worker."""
        if os.getpid() != self._process:
            return  # in a forked process, the slot belongs to the parent
        self.held.discard(number)
        generation, index = number
        if POISON:
            first, slot_bytes, _ = self.memory.carved(generation)
            self.memory.bytes[first + index * slot_bytes : first + (index + 1) * slot_bytes] = 0xAA
        self.memory.map[self.memory.flag_at(generation, index)] = 0

    def close(self) -> None:
        """Wait for copies out of the ring, then unlock its memory. Idempotent."""
        _unregister(*self._to_unregister)
        self._slots.clear()


def _unregister(process: int, memory: Memory, registered: Registered, events: deque[Event]) -> None:
    """Unregister slots after they have been read. After an error or an interrupt, another call continues."""
    if os.getpid() != process:
        return
    # When the interpreter ends, the CUDA context may be gone already, and the registrations with it.
    with suppress(Exception):
        while events:
            events[0].synchronize()
            events.popleft()
        if _unregister_all(memory, registered, list(registered)):
            _locked.pop(memory.key, None)


def _unregister_all(memory: Memory, registered: Registered, slots: Sequence[tuple[int, int]]) -> bool:
    """Unregister ``slots``. Return whether all of them are unregistered."""
    for slot in slots:
        error = int(torch.cuda.cudart().cudaHostUnregister(memory.bytes.data_ptr() + registered[slot][0]))
        if error:
            _clear_error()
        if error in (0, _NOT_REGISTERED):  # not registered: an earlier call that (un)registers the slot was interrupted
            del registered[slot]
    return not any(slot in registered for slot in slots)


def _clear_error() -> None:
    """Clear CUDA's error of a failed call, which the user's next launch would raise."""
    with suppress(Exception):
        torch.empty(1, device="cuda").fill_(1)


def default_budget_bytes() -> int:
    """Default of ``feed_bytes``: an eighth of the memory that this process may use, per process of torchrun on this machine."""
    return memory_share_bytes() // 8


def why_not_here() -> str | None:
    """Why this system does not support the ring, or ``None``."""
    return None if sys.platform == "linux" and hasattr(os, "memfd_create") else "the ring is for Linux"
