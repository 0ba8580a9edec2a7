"""Memory of an encoder's CUDA graphs: the pool that they share, and the choice of shapes that it has room for.

A batch takes the same form, captured or eager, at every depth. So the choice depends on the sequence of batches of one iterator
alone: not on graphs that earlier iterators left, nor on what the pool has grown to. Each shape's need is measured when it runs
eager, as it first does. The pool's bytes are measured as well, and decide when graphs of earlier iterators go.
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

Signature = tuple[Any, ...]
"""Shapes, dtypes, strides, switches of arithmetic and weight addresses."""

MOST_GRAPHS = 64
"""Graphs kept for each encoder and lane. Each takes some memory of the driver's, which no counter of PyTorch's shows."""
MOST_SIGNATURES = 4096
"""Signatures that an iterator remembers. Later ones run eager."""


class Need(NamedTuple):
    """Device memory of one graph."""

    peak_bytes: int
    """Most bytes allocated at once while it runs. Graphs that run one after another share them."""
    kept_bytes: int
    """Bytes of its inputs and outputs, which are its own."""


def total_bytes(needs: Iterable[Need]) -> int:
    """Bytes of graphs that share a pool."""
    peak = 0
    kept = 0
    for need in needs:
        peak = max(peak, need.peak_bytes)
        kept += need.kept_bytes
    return peak + kept


def held_bytes(leaves: Iterable[Any]) -> int:
    """Bytes of the memory that the tensors among ``leaves`` lie in: a view holds all of its base's."""
    held: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            with suppress(NotImplementedError):  # a sparse tensor has no storage
                storage = leaf.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


class Occurred:
    """Signatures that have occurred in one iterator, and the choice of those to capture."""

    def __init__(self) -> None:
        self.needs: dict[Signature, Need] = {}
        self._captured: dict[Signature, bool] = {}

    def has_room(self, signature: Signature, most_bytes: int) -> bool:
        """Whether to capture a signature that has occurred: in the order in which they repeat, as long as there is room."""
        if signature not in self._captured:
            needs = [self.needs[other] for other, captured in self._captured.items() if captured]
            fits = len(needs) < MOST_GRAPHS and total_bytes([*needs, self.needs[signature]]) <= most_bytes
            self._captured[signature] = fits
        return self._captured[signature]


class Pool:
    """Device memory of one runner's graphs.

    PyTorch keeps a pool reserved after its last graph, and uses it for nothing else, until the cache is emptied. That waits for
    the device, so it is put off until the next pool is made.
    """

    left_any = False
    """Whether a pool was deleted since the cache was emptied."""

    def __init__(self) -> None:
        if Pool.left_any:
            Pool.left_any = False
            with suppress(RuntimeError):  # another thread may be capturing a graph of its own
                torch.cuda.synchronize()  # expandable segments wait for the stream that allocated, not for readers on others
                torch.cuda.empty_cache()
        self.handle = torch.cuda.graph_pool_handle()

    def __del__(self) -> None:
        Pool.left_any = True

    @property
    def num_bytes(self) -> int:
        """Bytes that the pool has reserved, by a walk over its segments; 0 where the allocator cannot tell."""
        try:
            segments = torch.cuda.memory_snapshot(self.handle)
        except RuntimeError:  # backend:cudaMallocAsync has no snapshots
            return 0
        return sum(int(segment["total_size"]) for segment in segments)


class Allocated:
    """Most bytes that a call allocates at once, read from PyTorch's counters after each of its operations.

    The counters of peaks are the user's, and are not reset. What an operation allocates, with its workspaces, counts as if it
    were held at its end.
    """

    def __init__(self) -> None:
        self._start, self._ever = self._read()
        self._now = self._start
        self.peak_bytes = 0

    def note(self) -> None:
        """Call after each operation."""
        now, ever = self._read()
        self.peak_bytes = max(self.peak_bytes, self._now - self._start + ever - self._ever)
        self._now = now
        self._ever = ever

    @staticmethod
    def _read() -> tuple[int, int]:
        # Not the bytes of blocks, whose sizes depend on what was freed before.
        counted = torch.cuda.memory_stats_as_nested_dict().get("requested_bytes", {}).get("all", {})
        return counted.get("current", 0), counted.get("allocated", 0)


def default_bytes(device: torch.device) -> int:
    """A quarter of the device's memory."""
    return int(torch.cuda.get_device_properties(device).total_memory) // 4
