"""What a loader counts while it runs."""

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """Running counters of one loader, for a training log."""

    batches: int = 0
    """Batches handed over."""
    copied_bytes: int = 0
    """Bytes copied to the device."""
    depth: int = 0
    """Batches that are launched ahead now: 0 is in line."""
    ready: int = 0
    """Batches that were launched already when the last one was handed over."""
    starved: int = 0
    """Times that nothing was ready and the training thread waited for the wrapped loader."""
    starved_ms: float = 0.0
    """How long it waited so."""
    slot_batches: int = 0
    """Batches that came through a page-locked slot."""
    other_batches: int = 0
    """Batches that came as they would from the loader itself."""
    held_back: int = 0
    """Times that the training thread was too far ahead of the device and waited for it."""
    held_back_ms: float = 0.0
    """How long it waited so."""
    replaced: int = 0
    """Samples whose image could not be decoded, replaced by another sample of the batch."""
    decode_waits: int = 0
    """Times that the training thread waited for images to be decoded, most of them with no batch launched."""
    decode_wait_ms: float = 0.0
    """Milliseconds of these waits, in all."""
