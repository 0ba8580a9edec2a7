"""``Recorder``: records *spans*, start and end of each part of the work on a batch, during one window of a profile.

Spans of the host are times of its clock. Spans of the device are pairs of timed events, which are read after the window.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpuaug.core.streams import Event, Lane, Lanes
from gpuaug.loader.hooks import Hooks
from gpuaug.profiler.timeline import Span

LOADER, THREAD, CONSUMER = "loader", "thread", "consumer"
"""Rows of a timeline besides the loader's lanes: the background thread, the training thread, the stream that trains."""


class Recorder(Hooks):
    """Hooks that record the parts of every batch. At most one iterator may be open at a time.

    Args:
        lanes: Lanes (CUDA streams) of the recorded loader.

    Cost:
        One wait for the device in the constructor, and a few microseconds of the training thread per batch.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._on_device = not lanes.in_line
        self._host: list[Span] = []
        self._device: list[tuple[str, str, int, Event, Event, bool]] = []  # (lane, name, batch, first event, last event, waits)
        self._step: tuple[int, float, Event | None] | None = None  # (batch, start, first event) of the current step
        self._earlier_batches = 0
        """Number of batches of earlier iterators."""
        self._last_batch = -1
        """Index of the last batch that the current iterator returned."""
        self._origin: Event = lanes.consumer().record_event(timed=True)
        self._origin.synchronize()
        self._began_s = time.perf_counter()

    @contextmanager
    def span(self, name: str, batch: int, lane: Lane | None = None, *, waits: bool = False) -> Iterator[None]:
        """Context manager of ``Hooks.span`` that also records a span."""
        index = self._running_index(batch)
        short_name = name.removeprefix("gpuaug/")
        with super().span(name, batch):
            event = lane.record_event(timed=True) if lane is not None and self._on_device else None
            began_s = time.perf_counter()
            try:
                yield
            finally:
                # If a lane is passed, the device waits, not this thread.
                self._record(THREAD, short_name, index, began_s, time.perf_counter(), waits=waits and lane is None)
                if lane is not None and event is not None:
                    row = CONSUMER if waits else lane.name  # only the stream that trains waits
                    self._device.append((row, short_name, index, event, lane.record_event(timed=True), waits))

    def on_pull(self, batch: int, began_s: float, ended_s: float) -> None:
        """Record the time of the wrapped loader's ``next``."""
        self._record(LOADER, "load", self._running_index(batch), began_s, ended_s)

    def on_hold_back(self, batch: int, waited_s: float) -> None:
        """Record the wait of the training thread for the device, on which too many batches were queued."""
        now_s = time.perf_counter()
        self._record(THREAD, "hold back", self._running_index(batch), now_s - waited_s, now_s, waits=True)

    def on_next(self, consumer: Lane) -> None:
        """Record the end of the training step."""
        if self._step is None:
            return
        batch, began_s, event = self._step
        self._step = None
        self._record(THREAD, "step", batch, began_s, time.perf_counter())
        if event is not None:
            self._device.append((CONSUMER, "step", batch, event, consumer.record_event(timed=True), False))

    def on_hand_over(self, batch: int, consumer: Lane) -> None:
        """Record the beginning of the training step."""
        event = consumer.record_event(timed=True) if self._on_device else None
        self._step = self._running_index(batch), time.perf_counter(), event
        self._last_batch = batch

    def spans(self) -> tuple[Span, ...]:
        """Return all spans, in milliseconds since the recorder was created. The device must have passed all events."""
        device_spans = [
            Span(lane, name, batch, self._origin.elapsed_time(first), self._origin.elapsed_time(last), waits)
            for lane, name, batch, first, last, waits in self._device
        ]
        return tuple(sorted([*self._host, *device_spans], key=lambda span: span.start_ms))

    def _running_index(self, batch: int) -> int:
        """Return the index of a batch, counted over all iterators of the recording."""
        # Indices restart at 0 in a new iterator, which begins after the last batch of the previous iterator.
        if batch <= self._last_batch:
            self._earlier_batches = self._earlier_batches + self._last_batch + 1
            self._last_batch = -1
        return self._earlier_batches + batch

    def _record(self, lane: str, name: str, batch: int, began_s: float, ended_s: float, *, waits: bool = False) -> None:
        """Record a span of the host. Times are of ``time.perf_counter``."""
        start_ms, end_ms = (began_s - self._began_s) * 1e3, (ended_s - self._began_s) * 1e3
        self._host.append(Span(lane, name, batch, start_ms, end_ms, waits))
