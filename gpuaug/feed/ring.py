"""The ring: slots of memory that workers write batches into, and that the device reads them from.

A ``DataLoader`` moves a batch through memory that its worker has freshly allocated, its pin thread has freshly mapped, and
that thread copies it once more; nearly all of that is page faults. The ring is shared, mapped and page-locked once. A worker
collates straight into a slot of it and sends a description; the copy lane reads the slot; the slot is free again when that
copy's event has been passed, which is seen without waiting.

**Memory.** One anonymous file, reserved before the workers start and sparse, so that it takes memory only where it is written.
It needs no ``/dev/shm`` and goes with the last process that has it. Slots are carved: the first bytes and the size are
chosen once a batch has shown its size. Larger batches have larger slots carved behind those, a new *generation*, and the older
ones are given back.

**A slot's byte** in that memory is 0 if it is free and 1 if it is in use. Every slot belongs to one worker. That worker alone
sets its byte to 1, this process alone sets it to 0, so there is no lock that a killed worker could keep.

A batch that does not fit, or finds no free slot, travels as it would without a ring.
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

_PORTABLE = 1  # registered for all of this process's contexts
_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered
GROWTH = 1.25
"""Size of a slot of a later generation, over the size of the batch that it is made for."""

POISON = False
"""Whether freed slots are overwritten, for tests: a read that comes too late is then wrong for certain."""

Registered = dict[tuple[int, int], tuple[int, int]]
"""(offset, bytes) of each slot that may be page-locked, by (generation, slot)."""

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
        each: Number of slots for each worker.
        budget_bytes: Most bytes of all slots together.

    Raises:
        OSError: If the memory cannot be had.
    """

    def __init__(self, workers: int, each: int, budget_bytes: int) -> None:
        self.workers, self.each, self._budget = workers, each, budget_bytes
        for key, left in list(_locked.items()):
            if key not in rings:  # it was interrupted when its ring went
                _unregister(*left)
        # Older generations drain while the newest, within the budget, is in use; unwritten memory takes none.
        self.memory = Memory(DATA_OFFSET + MAX_GENERATIONS * (budget_bytes + mmap.PAGESIZE))
        self.held: set[tuple[int, int]] = set()
        rings[self.memory.key] = self
        self._process = os.getpid()
        self._registered: Registered = {}
        # Events of slots that are being read, in order. Apart from the slots, which hold the ring: the finaliser may not.
        self._events: deque[Event] = deque()
        self._slots: deque[Slot] = deque()
        self._carving = threading.Lock()  # the feed's thread carves larger slots, the training thread more of them
        self._larger_bytes = 0
        self._said_too_large = False
        self._cannot_lock = False
        self._to_unregister = self._process, self.memory, self._registered, self._events
        weakref.finalize(self, _unregister, *self._to_unregister)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the slots that are page-locked."""
        # A copy: another thread may be adding to it.
        return sum(num_bytes for _, num_bytes in list(self._registered.values()))

    @property
    def size(self) -> str:
        """Number of slots and bytes of each, for the loader's ``repr``."""
        _, _, slot_bytes, each = self.memory.generation()
        return f"{each * self.workers} slots of {slot_bytes / 1e6:.1f} MB" if each else "no slots yet"

    def received(self, described: Described) -> tuple[Batch, Slot]:
        """The batch whose description arrived, with tensors that share the slot's memory."""
        slot = described.slot or Slot(self, *described.number)

        def tensor(leaf: Any) -> Any:
            return leaf.tensor(self.memory) if type(leaf) is Leaf else leaf

        return batches.map_leaves(batches.cached_by_id(tensor), described.batch), slot

    def make_room(self, batch: Batch) -> bool:
        """Carve slots large enough for ``batch``, which arrived without one. Returns whether slots exist, maybe too small."""
        wanted = batch_bytes(batch)
        with self._carving:
            number, _, slot_bytes, _ = self.memory.generation()
            if wanted <= slot_bytes or not wanted:
                return number > 0
            wanted = math.ceil(wanted * (GROWTH if number else 1) / mmap.PAGESIZE) * mmap.PAGESIZE
            # Workers may be writing into the older slots, whose memory stays until the next pass.
            older = sum(each * size for _, size, each in map(self.memory.carved, range(1, number + 1))) * self.workers
            slots = self._slots_within_budget(wanted, older)
            if slots and number < MAX_GENERATIONS:
                self._carve(wanted, slots)
                return True
            if self._slots_within_budget(wanted):
                self._larger_bytes = max(self._larger_bytes, wanted)
                return number > 0
            self._warn_of_size(wanted)
            return number > 0

    def _warn_of_size(self, slot_bytes: int) -> None:
        """Warn once of batches that are too large for a slot per worker."""
        if self._said_too_large:
            return
        self._said_too_large = True
        writers = "one slot takes" if self.workers == 1 else f"one slot for each of {self.workers} workers takes"
        warnings.warn(
            f"Batches of {slot_bytes / 1e6:.1f} MB travel without slots, which is slower, because {writers} "
            f"{slot_bytes * self.workers} bytes and feed_bytes is {self._budget}. Raise feed_bytes of the StreamedLoader, or "
            "lower batch_size or num_workers of the DataLoader.",
            GpuAugWarning,
            stacklevel=2,
        )

    def enlarge(self) -> None:
        """Carve larger slots that had no room beside the older ones. The iteration that begins drops the older ones."""
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
        """Number of slots a worker can have beside older ones."""
        within = max(self._budget - older_bytes, 0) // (slot_bytes * self.workers)
        return min(self.each, within, MAX_SLOTS // self.workers)

    def _carve(self, slot_bytes: int, each: int) -> None:
        """Begin a generation. The caller holds the lock."""
        number, first, old_bytes, old_each = self.memory.generation()
        start = max(first + old_bytes * old_each * self.workers, math.ceil(DATA_OFFSET / mmap.PAGESIZE) * mmap.PAGESIZE)
        header, after = self.memory.header, number + 1
        header[1 + 3 * after : 4 + 3 * after] = start, slot_bytes, each
        header[0] = after

    def new_workers(self) -> None:
        """Free the slots that ended workers left in use. Call before others are started."""
        number, *_ = self.memory.generation()
        for generation in range(1, number + 1):
            each = self.memory.carved(generation)[2]
            for slot in range(self.workers * each):
                if (generation, slot) not in self.held:
                    self.memory.map[self.memory.flag_at(generation, slot)] = 0
        self.drop_old()

    def drop_old(self) -> None:
        """Return memory of older generations to the system. Call when no worker writes into them any more."""
        for generation in range(1, self.memory.generation()[0]):
            first, slot_bytes, each = self.memory.carved(generation)
            # A copy: the feed's thread may be adding to it.
            if each and not any(number == generation for number, _ in self.held.copy()):
                end = first + slot_bytes * each * self.workers
                old = [number for number in self._registered if number[0] == generation]
                if _unregister_all(self.memory, self._registered, old):
                    self.memory.map.madvise(mmap.MADV_REMOVE, first, end - first)
                    self.memory.header[3 + 3 * generation] = 0

    def register(self, slot: Slot) -> None:
        """Page-lock a slot, the first time that it is read. Only where CUDA calls may be made.

        Cost:
            Once a slot, a millisecond for some megabytes.
        """
        if slot.number in self._registered or self._cannot_lock:
            return
        generation, index = slot.number
        first, slot_bytes, _ = self.memory.carved(generation)
        offset = first + index * slot_bytes
        # Noted first: as the call returns, a signal may raise an interrupt, or that a worker of the DataLoader has died.
        _locked[self.memory.key] = self._to_unregister
        self._registered[slot.number] = offset, slot_bytes
        error = int(torch.cuda.cudart().cudaHostRegister(self.memory.bytes.data_ptr() + offset, slot_bytes, _PORTABLE))
        if error:
            self._cannot_lock = True
            del self._registered[slot.number]
            _clear_error()
            self._warn_of_locking(slot_bytes, error)

    def _warn_of_locking(self, slot_bytes: int, error: int) -> None:
        """Warn of slots that stay pageable, because CUDA has refused to page-lock one more."""
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
        """Hold a slot until ``event``, recorded after its last copy, has passed."""
        self._slots.append(slot)  # first: after an interrupt between the two, slots are freed late and not early
        self._events.append(event)

    def free_read_slots(self) -> None:
        """Drop the slots whose copies have ended, which frees them (``Slot.__del__``). Does not wait."""
        while self._events and self._events[0].query():
            self._events.popleft()
            self._slots.popleft()
        if not self._events:
            self._slots.clear()

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
        """Wait for copies out of the ring, then release its memory. Idempotent."""
        _unregister(*self._to_unregister)
        self._slots.clear()


def _unregister(process: int, memory: Memory, registered: Registered, events: deque[Event]) -> None:
    """Unregister slots once they have been read. The next call goes on after an error or an interrupt."""
    if os.getpid() != process:
        return
    # At the interpreter's end the device may be gone already, and all of this with it.
    with suppress(Exception):
        while events:
            events[0].synchronize()
            events.popleft()
        if _unregister_all(memory, registered, list(registered)):
            _locked.pop(memory.key, None)


def _unregister_all(memory: Memory, registered: Registered, slots: Sequence[tuple[int, int]]) -> bool:
    """Unregister some of the slots. Returns whether none of these is registered any more."""
    for slot in slots:
        error = int(torch.cuda.cudart().cudaHostUnregister(memory.bytes.data_ptr() + registered[slot][0]))
        if error:
            _clear_error()
        if error in (0, _NOT_REGISTERED):  # an earlier call, or that which was to register it, was interrupted
            del registered[slot]
    return not any(slot in registered for slot in slots)


def _clear_error() -> None:
    """Clear CUDA's error of a failed call, which the user's next launch would raise."""
    with suppress(Exception):
        torch.empty(1, device="cuda").fill_(1)


def default_budget_bytes() -> int:
    """An eighth of the memory that this process may use, divided among torchrun's processes on this machine."""
    return memory_share_bytes() // 8


def why_not_here() -> str | None:
    """Why there can be no ring on this system, or ``None``."""
    return None if sys.platform == "linux" and hasattr(os, "memfd_create") else "the ring is for Linux"
