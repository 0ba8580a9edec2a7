"""Memory of an encoder's CUDA graphs: the *pool* that the graphs share, and the choice of the signatures to capture.

A *signature* is the key of a graph. Whether a batch runs from a graph must not depend on the loader's ``depth``. So the choice
depends only on the sequence of batches of one iterator: not on graphs of earlier iterators, nor on the current size of the
pool, which determines only when graphs of earlier iterators are deleted. The memory of a graph is measured at the first batch
of its signature, which runs without a graph.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

Signature = tuple[Any, ...]
"""Shapes, dtypes and strides of the inputs, arithmetic settings of torch, and addresses of the weights."""

MAX_GRAPHS = 64
"""Maximum number of graphs per encoder and *lane* (CUDA stream). A graph takes driver memory that PyTorch does not count."""
MAX_SIGNATURES = 4096
"""Maximum number of signatures per iterator (``cuda_graph.py``). Batches with further signatures run without a graph."""


class MemoryNeed(NamedTuple):
    """Device memory of one graph."""

    peak_bytes: int
    """Peak of the allocated bytes during a run. Graphs share this memory, because they run one after another."""
    io_bytes: int
    """Bytes of the inputs and outputs, which graphs do not share."""


def total_bytes(needs: Sequence[MemoryNeed]) -> int:
    """Return the bytes of graphs that share a pool."""
    return max((need.peak_bytes for need in needs), default=0) + sum(need.io_bytes for need in needs)


def fit(needs: Sequence[MemoryNeed], max_bytes: int) -> bool:
    """Return whether graphs that share a pool are at most ``MAX_GRAPHS`` and need at most ``max_bytes``."""
    return len(needs) <= MAX_GRAPHS and total_bytes(needs) <= max_bytes


def count_storage_bytes(leaves: Iterable[Any]) -> int:
    """Return the bytes of the storages of the tensors among ``leaves``. A view keeps the whole storage of its base."""
    storage_bytes: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            with suppress(RuntimeError):  # sparse tensors and some nested tensors have no storage
                storage = leaf.untyped_storage()
                storage_bytes[storage.data_ptr()] = storage.nbytes()
    return sum(storage_bytes.values())


class Signatures:
    """Signatures of the batches of one iterator, and the choice of the signatures to capture."""

    def __init__(self) -> None:
        self.needs: dict[Signature, MemoryNeed] = {}
        """Memory of the graph of each signature, captured or not."""
        self._choices: dict[Signature, bool] = {}
        """Result of ``should_capture`` for each signature that has occurred twice."""

    def should_capture(self, signature: Signature, max_bytes: int) -> bool:
        """Return whether to capture a graph of a signature. Call from its second occurrence on, when ``needs`` has its memory.

        The result is the same for all calls with a signature: whether its graph fits beside the graphs of all signatures that
        were accepted before (``fit``). A smaller graph may be accepted after a larger one was not.
        """
        if signature not in self._choices:
            needs = [self.needs[other] for other, is_captured in self._choices.items() if is_captured]
            self._choices[signature] = fit([*needs, self.needs[signature]], max_bytes)
        return self._choices[signature]


class Pool:
    """Device memory that the graphs of one ``GraphRunner`` share.

    The runner drops the pool with its last graph. PyTorch's cache then keeps the memory of the pool. The cache is emptied only
    when the next pool is created, because emptying waits for the device.
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
            # Not memory_snapshot(self.handle): in PyTorch 2.14 and earlier it releases references that it does not own, to the
            # integers of the handle. Integers above 256 are not shared in Python, so a process with more pools is corrupted.
            segments = torch.cuda.memory_snapshot()
        except RuntimeError:  # backend:cudaMallocAsync has no snapshots
            return 0
        return sum(int(segment["total_size"]) for segment in segments if segment["segment_pool_id"] == self.handle)


class PeakAllocation:
    """Peak of the bytes that a call allocates, read from PyTorch's counters after each of its operations.

    PyTorch's own peak counters are not reset. The result is an upper bound: the peak within an operation is taken as the bytes
    in use before the operation, and all bytes that it allocates, workspaces included.
    """

    def __init__(self) -> None:
        self._start, self._total = self._read()
        self._current = self._start
        self.peak_bytes = 0

    def update(self) -> None:
        """Update the peak. Call after each operation."""
        current, total = self._read()
        used_before = self._current - self._start
        allocated = total - self._total
        self.peak_bytes = max(self.peak_bytes, used_before + allocated)
        self._current = current
        self._total = total

    @staticmethod
    def _read() -> tuple[int, int]:
        # (bytes in use, bytes of all allocations so far). Requested bytes, because the sizes of blocks depend on earlier
        # deallocations.
        requested = torch.cuda.memory_stats_as_nested_dict().get("requested_bytes", {}).get("all", {})
        return requested.get("current", 0), requested.get("allocated", 0)


def default_max_bytes(device: torch.device) -> int:
    """Return a quarter of the device's memory, in bytes."""
    return int(torch.cuda.get_device_properties(device).total_memory) // 4
