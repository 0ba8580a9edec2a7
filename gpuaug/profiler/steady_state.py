"""Endless iteration over a loader, restarted at the end of each epoch, so that the profiler can time windows of batches.

Batches are launched ahead (*streamed*), run without overlap (*in line*, ``depth=0``), or come from the wrapped loader alone.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError, add_note
from gpuaug.feed.mailbox import Pulled
from gpuaug.loader.inspection import Inspection, single_pass_error


class EndlessBatches:
    """Endless batches of a loader, streamed or in line, or of the wrapped loader alone."""

    def __init__(self, inspection: Inspection) -> None:
        self._inspection = inspection
        self._iterator = inspection.begin(depth=0)
        self._has_yielded = False
        """Whether ``next`` has returned a batch."""
        self.epoch_start_s = 0.0
        """Total time from the beginning of each epoch to its first batch, in seconds."""

    def close(self) -> None:
        """End the current iterator."""
        self._iterator.close()

    def next(self, depth: int) -> Batch:
        """Return the next batch, with ``depth`` batches launched ahead."""
        consumer = self._inspection.lanes.consumer()
        self._iterator.depth = depth
        self._iterator.fill(consumer)
        if not self._iterator.launched_batches:
            with self._timed_epoch_start():
                self._begin(depth)
                self._iterator.fill(consumer)
            if not self._iterator.launched_batches:
                raise self._no_batches()
        self._has_yielded = True
        return self._iterator.pop(consumer)

    def pull(self) -> Pulled:
        """Return the next batch of the wrapped loader, without copy and stages."""
        # After an error or the end of the epoch, the iterator has no more batches.
        pulled = None if self._iterator.ended else self._pull_or_end()
        if pulled is None:
            with self._timed_epoch_start():
                self._begin()
                pulled = self._pull_or_end()
            if pulled is None:
                raise self._no_batches()
        return pulled

    def _pull_or_end(self) -> Pulled | None:
        """Return the next batch of the wrapped loader, or ``None`` at the end of the epoch."""
        feed_iterator = self._iterator.feed_iterator
        pulled = feed_iterator.get(block=True)
        feed_iterator.refill()
        assert pulled is not None
        if pulled.error is not None:
            add_note(pulled.error, "gpuaug: raised by the wrapped loader, while it was measured alone.")
            raise pulled.error
        pulled.batch = None if pulled.ended else self._iterator.without_rows(pulled.batch)
        return None if pulled.ended else pulled

    @contextmanager
    def _timed_epoch_start(self) -> Iterator[None]:
        """Context manager around the beginning of an epoch, whose time is added to ``epoch_start_s``."""
        start = time.perf_counter()
        yield
        self.epoch_start_s += time.perf_counter() - start

    def _begin(self, depth: int = 0) -> None:
        """Begin the next epoch."""
        self._iterator.close()
        self._iterator = self._inspection.begin(depth)

    def _no_batches(self) -> ArgumentError:
        """Return the error about an epoch without batches."""
        if self._has_yielded:
            return single_pass_error(self._inspection.loader.loader)
        return ArgumentError("loader must have batches to be profiled, got no batch. Check whether its dataset is empty.")
