"""Memory of an encoder's CUDA graphs: the *pool* that the graphs share, and the choice of the graphs to capture.

A *signature* (``Signature``) is the key of a graph, which can run only batches of this signature. Whether a batch runs from a
graph must not depend on how many batches the loader launches ahead (``depth``). So the choice depends only on the sequence of
batches of one iterator, and not on graphs of earlier iterators, or on the current size of the pool. These determine only when
graphs of earlier iterators are deleted. The memory of a graph is measured at the first batch of its signature, which runs
without a graph.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

Signature = tuple[Any, ...]
"""Shapes, dtypes and strides of the encoder's inputs, arithmetic settings of torch, and addresses of the weights."""

MAX_GRAPHS = 64
"""Maximum number of graphs per encoder and *lane* (CUDA stream). A graph takes driver memory that PyTorch does not count."""
MAX_SIGNATURES = 4096
"""Maximum number of signatures per iterator. Batches with further signatures run without a graph."""


class MemoryNeed(NamedTuple):
    """Device memory of one graph."""

    peak_bytes: int
    """Peak of the bytes that a run allocates. Graphs share this memory, because they run one after another."""
    io_bytes: int
    """Bytes of the inputs and outputs, which graphs do not share."""


def total_bytes(needs: Sequence[MemoryNeed]) -> int:
    """Return the bytes of graphs that share a pool: the largest peak, and all inputs and outputs."""
    return max((need.peak_bytes for need in needs), default=0) + sum(need.io_bytes for need in needs)


def fit(needs: Sequence[MemoryNeed], max_bytes: int) -> bool:
    """Return whether graphs that share a pool are at most ``MAX_GRAPHS`` and need at most ``max_bytes``."""
    return len(needs) <= MAX_GRAPHS and total_bytes(needs) <= max_bytes


def count_storage_bytes(leaves: Iterable[Any]) -> int:
    """Return the bytes of the storages of the tensors among ``leaves``. A storage is counted once, and as a whole.

    ``leaves``: values that are not containers.
    """
    storage_bytes: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            with suppress(RuntimeError):  # sparse tensors and some nested tensors have no storage
                storage = leaf.untyped_storage()
                storage_bytes[storage.data_ptr()] = storage.nbytes()
    return sum(storage_bytes.values())


class Signatures:
    """Signatures of the batches of one iterator, and the choice of the graphs to capture."""

    def __init__(self) -> None:
        self.needs: dict[Signature, MemoryNeed] = {}
        """Signature that has occurred → memory of its graph, captured or not."""
        self._choices: dict[Signature, bool] = {}
        """Signature that has occurred twice → result of ``should_capture``."""

    def should_capture(self, signature: Signature, max_bytes: int) -> bool:
        """Return whether to capture the graph of a signature. Call from the second occurrence on, when ``needs`` has it.

        The first call for a signature decides: the graph is captured if it fits (``fit``) beside the graphs that were accepted
        before. A smaller graph may be accepted after a larger one was rejected.
        """
        if signature not in self._choices:
            needs = [self.needs[other] for other, is_captured in self._choices.items() if is_captured]
            self._choices[signature] = fit([*needs, self.needs[signature]], max_bytes)
        return self._choices[signature]


class Pool:
    """Device memory that the graphs of one ``GraphRunner`` (``cuda_graph.py``) share.

    The runner deletes the pool with its last graph. PyTorch's cache of device memory then keeps the memory of the pool. The
    cache is emptied only when the next pool is created, because emptying waits for the device.
    """

    is_deleted_pool_cached = False
    """Whether the cache holds memory of a deleted pool, of any runner."""

    def __init__(self) -> None:
        if Pool.is_deleted_pool_cached:
            Pool.is_deleted_pool_cached = False
            with suppress(RuntimeError):  # another thread may be capturing a graph
                torch.cuda.synchronize()  # with expandable segments, empty_cache waits only for the allocating stream
                torch.cuda.empty_cache()
        self.handle = torch.cuda.graph_pool_handle()

    def __del__(self) -> None:
        Pool.is_deleted_pool_cached = True

    @property
    def num_bytes(self) -> int:
        """Bytes that the pool has reserved, summed over its segments; 0 if the allocator does not report them."""
        try:
            # Not memory_snapshot(self.handle), which in PyTorch 2.14 and earlier releases references that it does not own, to
            # integers of the handle. Python never frees integers up to 256, so a process with more pools would be corrupted.
            segments = torch.cuda.memory_snapshot()
        except RuntimeError:  # backend:cudaMallocAsync has no snapshots
            return 0
        return sum(int(segment["total_size"]) for segment in segments if segment["segment_pool_id"] == self.handle)


class PeakAllocation:
    """Measurement of the peak of the bytes that a function allocates, from PyTorch's counters after each of its operations.

    PyTorch's peak counters are not used, because they would have to be reset. The result is an upper bound: the peak
    within an operation is taken as the bytes in use before the operation, plus all bytes that the operation allocates,
    workspaces included.
    """

    def __init__(self) -> None:
        self._start, self._total = self._read()
        self._current = self._start
        self.peak_bytes = 0
        """Peak so far, without the bytes that were in use before this object was created."""

    def update(self) -> None:
        """Update the peak. Call after each operation."""
        current, total = self._read()
        used_before = self._current - self._start
        allocated = total - self._total  # by the operation
        self.peak_bytes = max(self.peak_bytes, used_before + allocated)
        self._current = current
        self._total = total

    @staticmethod
    def _read() -> tuple[int, int]:
        """Return (bytes in use, bytes of all allocations so far)."""
        # Requested bytes, because the sizes of the allocator's blocks depend on earlier deallocations.
        requested = torch.cuda.memory_stats_as_nested_dict().get("requested_bytes", {}).get("all", {})
        return requested.get("current", 0), requested.get("allocated", 0)


def default_max_bytes(device: torch.device) -> int:
    """Return a quarter of the device's memory, in bytes."""
    return int(torch.cuda.get_device_properties(device).total_memory) // 4
