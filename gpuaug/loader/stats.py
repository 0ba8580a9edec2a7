"""Counters of a running loader. A batch is *launched* when its copy and stages are queued on the device."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Stats:
    """Running counters of one loader, for a training log."""

    batches: int = 0
    """Number of batches handed over."""
    copied_bytes: int = 0
    """Number of bytes copied to the device."""
    depth: int = 0
    """Current limit of batches launched ahead. 0: no batches ahead and no separate CUDA streams."""
    ready: int = 0
    """Number of batches launched ahead when the last batch was handed over. 0 on a CPU."""
    starved: int = 0
    """Number of waits of the training thread for the wrapped loader, while no batch was launched or being decoded."""
    starved_ms: float = 0.0
    """Total time of the waits counted by ``starved``, in milliseconds."""
    slot_batches: int = 0
    """Number of batches that came through a slot: page-locked memory for one batch."""
    other_batches: int = 0
    """Number of batches that came without a slot."""
    held_back: int = 0
    """Number of waits of the training thread for the device, because ``depth + 2`` batches were queued."""
    held_back_ms: float = 0.0
    """Total time of the waits counted by ``held_back``, in milliseconds."""
    replaced: int = 0
    """Number of samples whose image could not be decoded, replaced by another sample of the batch."""
    undecoded_pixels: int = 0
    """Number of pixels that were not decoded, because the next fused stage reads only a window of each image."""
    decode_waits: int = 0
    """Number of waits of the training thread for decoding."""
    decode_wait_ms: float = 0.0
    """Total time of the waits counted by ``decode_waits``, in milliseconds."""
    pinned_bytes: int = 0
    """Bytes of page-locked memory in slots, in decoders, and for images that are being decoded, when ``stats()`` was called."""
    decode_bytes: int = 0
    """Bytes of device memory for decoded pixels and decoders, when ``stats()`` was called."""
    captured: int = 0
    """Number of captured CUDA graphs of encoders, summed over all encoders."""
    replayed: int = 0
    """Number of runs of encoders from a CUDA graph, summed over all encoders."""
    eager: int = 0
    """Number of runs of encoders without a CUDA graph, summed over all encoders."""
    graph_bytes: int = 0
    """Bytes of device memory for CUDA graphs of encoders, when ``stats()`` was called."""
    rows_read: int = 0
    """Number of rows that were read from a feature cache, when ``stats()`` was called."""
    rows_encoded: int = 0
    """Number of samples that were encoded because the feature cache had no row for them, when ``stats()`` was called."""
    rows_written: int = 0
    """Number of rows that were written to the feature cache, when ``stats()`` was called."""
    rows_dropped: int = 0
    """Number of rows that were not written, because the disk was too slow, when ``stats()`` was called."""
    replaced_files: dict[str, str] = field(default_factory=dict)
    """File of each sample that was replaced → reason, when ``stats()`` was called. After ``load_state_dict`` also the files of
    the runs before; at most 10 000 files. The key of a sample without a file is its position."""
