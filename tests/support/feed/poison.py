"""Slots of the ring that are overwritten when they are freed, so that a read of a freed slot returns wrong values."""

import os

from gpuaug.feed.ring import Ring


def overwrite_freed_slots(monkeypatch):
    """Fill each slot with 0xAA before it is freed, in the process that reads the ring."""
    free = Ring.free

    def poisoned(ring, number):
        generation, index = number
        start, slot_bytes, _ = ring.memory.generation(generation)
        if os.getpid() == ring._process:
            ring.memory.bytes[start + index * slot_bytes : start + (index + 1) * slot_bytes] = 0xAA
        free(ring, number)

    monkeypatch.setattr(Ring, "free", poisoned)
