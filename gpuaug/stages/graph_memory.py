"""Memory of an encoder's CUDA graphs: the pool that they share, and the choice of the input shapes to capture.

Whether a batch is captured or runs eagerly is the same at every depth. So the choice depends only on the sequence of batches of
one iterator: not on graphs of earlier iterators, nor on the current size of the pool. The memory of a shape is measured at its
first batch, which runs eagerly. The bytes of the pool are measured too, and decide when graphs of earlier iterators are
deleted.
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

Signature = tuple[Any, ...]
"""Shapes, dtypes, strides, arithmetic settings and weight addresses."""

MOST_GRAPHS = 64
"""Maximum number of graphs per encoder and lane. Each takes memory of the driver that PyTorch does not count."""
MOST_SIGNATURES = 4096
"""Maximum number of signatures that an iterator remembers. Batches with further signatures run eagerly."""


class Need(NamedTuple):
    """Device memory of one graph."""

    peak_bytes: int
    """Peak of the allocated bytes during a run. Graphs that run one after another share them."""
    kept_bytes: int
    """Bytes of the inputs and outputs, which are not shared."""


def total_bytes(needs: Iterable[Need]) -> int:
    """Return the bytes of graphs that share a pool."""
    peak = 0
    kept = 0
    for need in needs:
        peak = max(peak, need.peak_bytes)
        kept += need.kept_bytes
    return peak + kept


def held_bytes(leaves: Iterable[Any]) -> int:
    """Return the bytes of the storages of the tensors among ``leaves``. A view keeps the whole storage of its base."""
    storage_bytes: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            with suppress(NotImplementedError):  # a sparse tensor has no storage
                storage = leaf.untyped_storage()
                storage_bytes[storage.data_ptr()] = storage.nbytes()
    return sum(storage_bytes.values())


class Signatures:
    """Signatures of the batches of one iterator, and the choice of the signatures to capture."""

    def __init__(self) -> None:
        self.needs: dict[Signature, Need] = {}
        self._captured: dict[Signature, bool] = {}

    def has_room(self, signature: Signature, most_bytes: int) -> bool:
        """Return whether to capture a signature that occurs again: first come, first served, while there is room."""
        if signature not in self._captured:
            needs = [self.needs[other] for other, captured in self._captured.items() if captured]
            fits = len(needs) < MOST_GRAPHS and total_bytes([*needs, self.needs[signature]]) <= most_bytes
            self._captured[signature] = fits
        return self._captured[signature]


class Pool:
    """Device memory of one runner's graphs.

    After its last graph is deleted, PyTorch keeps the memory of a pool reserved and unused until the cache is emptied. Emptying
    the cache waits for the device, so it is postponed until the next pool is created.
    """

    was_deleted = False
    """Whether a pool was deleted since the cache was emptied."""

    def __init__(self) -> None:
        if Pool.was_deleted:
            Pool.was_deleted = False
            with suppress(RuntimeError):  # another thread may be capturing a graph
                torch.cuda.synchronize()  # expandable segments wait for the allocating stream only, not for streams that read
                torch.cuda.empty_cache()
        self.handle = torch.cuda.graph_pool_handle()

    def __del__(self) -> None:
        Pool.was_deleted = True

    @property
    def num_bytes(self) -> int:
        """Bytes that the pool has reserved, summed over its segments; 0 if the allocator does not report them."""
        try:
            # Not memory_snapshot(self.handle), which drops references to the handle's integers that it does not own (PyTorch
            # 2.14 and earlier): in a process with more than 256 pools, Python's memory is corrupted.
            segments = torch.cuda.memory_snapshot()
        except RuntimeError:  # backend:cudaMallocAsync has no snapshots
            return 0
        return sum(int(segment["total_size"]) for segment in segments if segment["segment_pool_id"] == self.handle)


class PeakAllocation:
    """Peak of the bytes that a call allocates, read from PyTorch's counters after each of its operations.

    The user's peak counters are not reset. Everything that an operation allocates, workspaces included, counts as still
    allocated at its end.
    """

    def __init__(self) -> None:
        self._start, self._total = self._read()
        self._current = self._start
        self.peak_bytes = 0

    def note(self) -> None:
        """Update the peak. Call after each operation."""
        current, total = self._read()
        self.peak_bytes = max(self.peak_bytes, self._current - self._start + total - self._total)
        self._current = current
        self._total = total

    @staticmethod
    def _read() -> tuple[int, int]:
        # Requested bytes, because the sizes of blocks depend on earlier deallocations.
        counted = torch.cuda.memory_stats_as_nested_dict().get("requested_bytes", {}).get("all", {})
        return counted.get("current", 0), counted.get("allocated", 0)


def default_bytes(device: torch.device) -> int:
    """Return a quarter of the device's memory, in bytes."""
    return int(torch.cuda.get_device_properties(device).total_memory) // 4
