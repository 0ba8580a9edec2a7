"""Endless iteration over a loader, restarted at the end of each epoch, so that the profiler can time windows of batches.

Batches come streamed, in line (``depth=0``), or from the wrapped loader alone.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError, add_note
from gpuaug.feed.mailbox import Pulled
from gpuaug.loader.inspection import Inspection, read_once
from gpuaug.loader.iterator import PipelinedIterator
from gpuaug.loader.streamed_loader import StreamedLoader


class EndlessBatches:
    """Endless batches of a loader, streamed or in line, or of the wrapped loader alone."""

    def __init__(self, loader: StreamedLoader) -> None:
        self._inspection = Inspection(loader)
        self._iterator: PipelinedIterator | None = None
        self._had_any = False
        self.starting_s = 0.0
        """Seconds spent on beginning epochs, until the first batch was ready."""

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
        if not self._current().waiting:
            with self._starting():
                self._begin(depth)
                self._current().fill(consumer)
            if not self._current().waiting:
                raise self._no_batches()
        self._had_any = True
        return self._current().pop(consumer)

    def pull(self) -> Pulled:
        """Return the next batch of the wrapped loader, without copy and stages."""
        # If the end of the epoch was read ahead, there are no more batches.
        pulled = None if self._current().ended else self._pulled()
        if pulled is None:
            with self._starting():
                self._begin()
                pulled = self._pulled()
            if pulled is None:
                raise self._no_batches()
        return pulled

    def _pulled(self) -> Pulled | None:
        feed = self._current().feed_iterator
        pulled = feed.get(block=True)
        feed.refill()
        assert pulled is not None
        if pulled.error is not None:
            add_note(pulled.error, "gpuaug: raised by the wrapped loader, while it was measured by itself.")
            raise pulled.error
        return None if pulled.ended else pulled

    @contextmanager
    def _starting(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.starting_s += time.perf_counter() - start

    def _current(self) -> PipelinedIterator:
        assert self._iterator is not None
        return self._iterator

    def _begin(self, depth: int = 0) -> None:
        if self._iterator is not None:
            self._iterator.close()
        self._iterator = self._inspection.begin(depth)

    def _no_batches(self) -> ArgumentError:
        if self._had_any:
            return read_once(self._inspection.loader.loader)
        return ArgumentError("loader must have batches to be profiled, got one without any. See whether its dataset is empty.")
