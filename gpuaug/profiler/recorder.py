"""A recorder: start and end of each part of each batch, during one window of a profile.

It reads the host's clock, and records timed events on lanes of the device. These are read when the window is over.
"""

import time
from contextlib import AbstractContextManager
from typing import Any

from gpuaug.core.streams import Event, Lane, Lanes, ms_between
from gpuaug.loader.hooks import Hooks
from gpuaug.profiler.timeline import Span

LOADER, THREAD, CONSUMER = "loader", "thread", "consumer"
"""Lanes of a recording besides the loader's own: the background thread, the training thread, the stream that trains."""


class Recorder(Hooks):
    """Records the parts of every batch. For one iterator after another, not for two at once.

    Args:
        lanes: Lanes of the watched loader.

    Cost:
        Waits for the device once, when it is made. Then some microseconds of the training thread a batch.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._on_device = not lanes.in_line
        self._host: list[Span] = []
        self._device: list[tuple[str, str, int, Event, Event, bool]] = []
        self._step: tuple[int, float, Event | None] | None = None
        self._before = 0
        self._last = -1
        self._base: Event = lanes.consumer().record_event(timed=True)
        self._base.synchronize()
        self._began_s = time.perf_counter()

    def span(self, name: str, batch: int, lane: Lane | None = None, *, waits: bool = False) -> AbstractContextManager[Any]:
        """As in ``Hooks``, noted."""
        return _Noted(self, super().span(name, batch), name, self._through(batch), lane, waits)

    def pulled(self, batch: int, began_s: float, ended_s: float) -> None:
        """Note how long the wrapped loader took."""
        self._note(LOADER, "load", self._through(batch), began_s, ended_s)

    def held_back(self, batch: int, waited_s: float) -> None:
        """Note the wait."""
        now_s = time.perf_counter()
        self._note(THREAD, "hold back", self._through(batch), now_s - waited_s, now_s, waits=True)

    def asked(self, consumer: Lane) -> None:
        """Note the training step that has been queued."""
        if self._step is None:
            return
        batch, began_s, event = self._step
        self._step = None
        self._note(THREAD, "step", batch, began_s, time.perf_counter())
        if event is not None:
            self._device.append((CONSUMER, "step", batch, event, consumer.record_event(timed=True), False))

    def handed_over(self, batch: int, consumer: Lane) -> None:
        """Note the beginning of the step."""
        event = consumer.record_event(timed=True) if self._on_device else None
        self._step = self._through(batch), time.perf_counter(), event
        self._last = batch

    def spans(self) -> tuple[Span, ...]:
        """All spans, in milliseconds since the recorder was made. The device must have passed all events."""
        noted = [
            Span(lane, name, batch, ms_between(self._base, first), ms_between(self._base, last), waits)
            for lane, name, batch, first, last, waits in self._device
        ]
        return tuple(sorted([*self._host, *noted], key=lambda each: each.start_ms))

    def _through(self, batch: int) -> int:
        """Number of a batch that goes on counting where the next iterator begins with batch 0."""
        # All spans of a batch precede its step, and an iterator begins after the last batch of the one before.
        if batch <= self._last:
            self._before = self._before + self._last + 1
            self._last = -1
        return self._before + batch

    def _note(self, lane: str, name: str, batch: int, began_s: float, ended_s: float, *, waits: bool = False) -> None:
        start_ms, end_ms = (began_s - self._began_s) * 1e3, (ended_s - self._began_s) * 1e3
        self._host.append(Span(lane, name, batch, start_ms, end_ms, waits))


class _Noted:
    """A block that is recorded as a span."""

    def __init__(self, recorder: Recorder, block: Any, name: str, batch: int, lane: Lane | None, waits: bool) -> None:
        self._recorder, self._range, self._batch, self._lane, self._waits = recorder, block, batch, lane, waits
        self._name = name.removeprefix("gpuaug/")

    def __enter__(self) -> None:
        self._range.__enter__()
        self._event = self._lane.record_event(timed=True) if self._lane is not None and self._recorder._on_device else None
        self._began_s = time.perf_counter()

    def __exit__(self, *exc: Any) -> None:
        recorder = self._recorder
        # A wait on a lane is the device's, not this thread's.
        on_thread = self._waits and self._lane is None
        recorder._note(THREAD, self._name, self._batch, self._began_s, time.perf_counter(), waits=on_thread)
        if self._lane is not None and self._event is not None:
            lane = CONSUMER if self._waits else self._lane.name
            recorder._device.append(
                (lane, self._name, self._batch, self._event, self._lane.record_event(timed=True), self._waits)
            )
        self._range.__exit__(*exc)
