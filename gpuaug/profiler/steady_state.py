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
from gpuaug.loader.iterator import PipelinedIterator


class EndlessBatches:
    """Endless batches of a loader, streamed or in line, or of the wrapped loader alone."""

    def __init__(self, inspection: Inspection) -> None:
        self._inspection = inspection
        self._iterator: PipelinedIterator | None = None
        self._has_yielded = False
        self.epoch_start_s = 0.0
        """Total time from the beginning of each epoch to its first batch, in seconds."""

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, *exc: object) -> None:
        if self._iterator is not None:
            self._iterator.close()

    def next(self, depth: int) -> Batch:
        """Return the next batch, with ``depth`` batches launched ahead."""
        consumer = self._inspection.lanes.consumer()
        self._current().depth = depth
        self._current().fill(consumer)
        if not self._current().launched_batches:
            with self._timed_epoch_start():
                self._begin(depth)
                self._current().fill(consumer)
            if not self._current().launched_batches:
                raise self._no_batches()
        self._has_yielded = True
        return self._current().pop(consumer)

    def pull(self) -> Pulled:
        """Return the next batch of the wrapped loader, without copy and stages."""
        # After an error or the end of the epoch, the iterator has no more batches.
        pulled = None if self._current().ended else self._pull_or_end()
        if pulled is None:
            with self._timed_epoch_start():
                self._begin()
                pulled = self._pull_or_end()
            if pulled is None:
                raise self._no_batches()
        return pulled

    def _pull_or_end(self) -> Pulled | None:
        feed_iterator = self._current().feed_iterator
        pulled = feed_iterator.get(block=True)
        feed_iterator.refill()
        assert pulled is not None
        if pulled.error is not None:
            add_note(pulled.error, "gpuaug: raised by the wrapped loader, while it was measured alone.")
            raise pulled.error
        pulled.batch = None if pulled.ended else self._current().without_rows(pulled.batch)
        return None if pulled.ended else pulled

    @contextmanager
    def _timed_epoch_start(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.epoch_start_s += time.perf_counter() - start

    def _current(self) -> PipelinedIterator:
        assert self._iterator is not None
        return self._iterator

    def _begin(self, depth: int = 0) -> None:
        if self._iterator is not None:
            self._iterator.close()
        self._iterator = self._inspection.begin(depth)

    def _no_batches(self) -> ArgumentError:
        if self._has_yielded:
            return single_pass_error(self._inspection.loader.loader)
        return ArgumentError("loader must have batches to be profiled, got no batch. Check whether its dataset is empty.")
