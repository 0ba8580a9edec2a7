"""Slots of the ring that are overwritten when they are freed, so that a read of a freed slot returns wrong values."""

import os

from gpuaug.feed.ring_memory import Memory


def overwrite_freed_slots(monkeypatch):
    """Fill each slot with 0xAA before it is freed, in the process that reads the ring."""
    free = Memory.free

    def poisoned(memory, number):
        generation, index = number
        start, slot_bytes, _ = memory.generation(generation)
        if os.getpid() == memory._process:
            memory.bytes[start + index * slot_bytes : start + (index + 1) * slot_bytes] = 0xAA
        free(memory, number)

    monkeypatch.setattr(Memory, "free", poisoned)
