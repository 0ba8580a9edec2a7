"""Batches for measurements: endless batches of a loader in its steady state, and one batch for repeated calls.

Endless iteration goes on with the next epoch when an epoch ends.

Batches are *streamed* (copy and stages of later batches are queued on the device ahead of the training step), run *in line*
(``depth=0``, without overlap), or come from the wrapped loader alone.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from typing import Any, TypeVar

import torch

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError, add_note
from gpuaug.feed.mailbox import Pulled
from gpuaug.loader.inspection import Inspection, single_pass_error

T = TypeVar("T")


class EndlessBatches:
    """Endless batches of a loader, streamed or in line, or of the wrapped loader alone."""

    def __init__(self, inspection: Inspection) -> None:
        self._inspection = inspection
        self._iterator = inspection.begin(depth=0)
        self._has_yielded = False
        """Whether ``next`` has returned a batch."""
        self.epoch_start_s = 0.0
        """Total time from the end of an epoch to the first batch of the next epoch, in seconds."""

    def close(self) -> None:
        """End the current iterator."""
        self._iterator.close()

    def next(self, depth: int) -> Batch:
        """Return the next batch, after launching (queueing on the device) up to ``depth`` later batches."""
        consumer = self._inspection.lanes.consumer()  # the current stream, on which the training step runs

        def fill() -> bool:
            self._iterator.depth = depth
            self._iterator.fill(consumer)
            return bool(self._iterator.launched_batches)

        self._in_this_or_next_epoch(fill, depth)
        self._has_yielded = True
        return self._iterator.pop(consumer)

    def pull(self) -> Pulled:
        """Return the next batch of the wrapped loader, without copy and stages."""
        # After an error or the end of the epoch, the iterator has no more batches.
        return self._in_this_or_next_epoch(lambda: None if self._iterator.ended else self._pull_or_end())

    def _in_this_or_next_epoch(self, take: Callable[[], T | None], depth: int = 0) -> T:
        """Return the result of ``take``. If it is false, the epoch has ended: begin the next epoch, and call ``take`` again.

        ``depth``: maximum number of batches that are launched ahead in the next epoch.

        Raises:
            ArgumentError: If the next epoch has no batch.
        """
        result = take()
        if not result:
            start = time.perf_counter()
            self._iterator.close()
            self._iterator = self._inspection.begin(depth)
            result = take()
            self.epoch_start_s += time.perf_counter() - start
        if result:
            return result
        if self._has_yielded:
            raise single_pass_error(self._inspection.loader.loader)
        raise ArgumentError("loader must have batches to be profiled, got no batch. Check whether its dataset is empty.")

    def _pull_or_end(self) -> Pulled | None:
        """Return the next batch of the wrapped loader, or ``None`` at the end of the epoch."""
        feed_iterator = self._iterator.feed_iterator
        pulled = feed_iterator.get(block=True)
        feed_iterator.refill()
        assert pulled is not None  # because of block=True
        if pulled.error is not None:
            add_note(pulled.error, "gpuaug: raised by the wrapped loader, while it was measured alone.")
            try:
                raise pulled.error
            finally:
                del pulled  # otherwise a reference cycle through the traceback would keep the error and the batch alive
        # Workers may have read rows of a feature cache in place of encoded images.
        pulled.batch = None if pulled.ended else self._iterator.without_rows(pulled.batch)
        return None if pulled.ended else pulled


class RepeatedBatch:
    """Batch that is returned in new containers at every call, and with copies of its tensors if the caller writes to them.

    A training step may remove labels from a dictionary, or change labels in place. With the same objects, the second step would
    see the changes of the first step.

    Cost:
        A few microseconds of host time per leaf. The tensors are copied on the current stream: for the first call only, or for
        every call if the caller writes to them.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._returned: list[tuple[torch.Tensor, int]] | None = None
        """(tensor, number of writes to it) of the copies that the last call returned; ``None`` if it returned no copies."""
        self._clones_tensors = True
        """Whether the next call copies the tensors. The first call does, to find out whether the caller writes to them."""

    def __call__(self) -> Batch:
        """Return the batch for the next step."""
        if self._returned:
            self._clones_tensors = any(_write_count(tensor) != version for tensor, version in self._returned)
        # ``map_leaves`` creates new containers only if leaves change, so each leaf is put into a box and taken out by ``next``.
        # ``cached_by_id``: a leaf that occurs twice in the batch is one object again.
        batch = batches.map_leaves(next, batches.map_leaves(batches.cached_by_id(self._boxed), self._batch))
        self._returned = [(tensor, _write_count(tensor)) for tensor in batches.tensors(batch)] if self._clones_tensors else None
        return batch

    def _boxed(self, leaf: Any) -> Iterator[Any]:
        """Return an iterator over what the next batch has for a leaf: no container, or a mapping with a method ``to``."""
        if isinstance(leaf, torch.Tensor):
            return repeat(leaf.clone() if self._clones_tensors else leaf)
        return repeat(copy.copy(leaf) if isinstance(leaf, Mapping) else leaf)


def _write_count(tensor: torch.Tensor) -> int:
    """Return the number of writes to a tensor; 0 for an inference tensor, which does not count them."""
    return 0 if tensor.is_inference() else tensor._version
