"""Counters of a running loader."""

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """Running counters of one loader, for a training log."""

    batches: int = 0
    """Batches handed over."""
    copied_bytes: int = 0
    """Bytes copied to the device."""
    depth: int = 0
    """Batches that may be launched ahead now. 0 is in line."""
    ready: int = 0
    """Batches launched besides the last one when that was handed over. 0 on a CPU; loaded batches on the host do not count."""
    starved: int = 0
    """Waits of the training thread for the wrapped loader, while no batch was launched or being decoded."""
    starved_ms: float = 0.0
    """Milliseconds of these waits, in all."""
    slot_batches: int = 0
    """Batches that came through a page-locked slot."""
    other_batches: int = 0
    """Batches that came without a slot."""
    held_back: int = 0
    """Waits of the training thread for the device, because ``depth + 2`` batches were queued. Healthy."""
    held_back_ms: float = 0.0
    """Milliseconds of these waits, in all."""
    replaced: int = 0
    """Samples whose image could not be decoded, replaced by another sample of the batch."""
    undecoded_pixels: int = 0
    """Pixels of images that were not decoded, because the fused stage behind reads a window of each image alone."""
    decode_waits: int = 0
    """Waits of the training thread for images to be decoded."""
    decode_wait_ms: float = 0.0
    """Milliseconds of these waits, in all."""
    pinned_bytes: int = 0
    """Page-locked bytes of slots, of images that are being decoded and of decoders, when ``stats()`` was called."""
    decode_bytes: int = 0
    """Bytes on the device for decoded pixels of batches that were not freed, and of decoders, when ``stats()`` was called."""
    captured: int = 0
    """CUDA graphs of encoders captured. With several encoders, each counts here and in the next two."""
    replayed: int = 0
    """Batches that an encoder ran on from a CUDA graph."""
    eager: int = 0
    """Batches that an encoder ran on with its kernels launched one by one."""
    graph_bytes: int = 0
    """Bytes on the device for CUDA graphs of encoders, when ``stats()`` was called."""
