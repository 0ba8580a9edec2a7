"""``profile``: measures real training steps to find the *bound* of the loop: the part of the work that limits its speed.

All measurements are made in one run. First, *windows* (timed runs of consecutive batches) alternate between loops: the wrapped
loader alone, the loop with batches launched ahead (*streamed*), the streamed loop inside ``step_first`` if stages and step may
compete, the loop with ``depth=0`` (*in line*), and the step on a batch that is on the device (*cached*). Then each part of the
work is measured alone. Nothing is synchronised inside a window.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.devices import plain_torch_reason, synchronize
from gpuaug.core.errors import ArgumentTypeError, add_note, flag, whole_number
from gpuaug.core.streams import step_first
from gpuaug.feed.mailbox import QUEUED
from gpuaug.feed.ring_memory import can_be_stored
from gpuaug.loader.inspection import Inspection, checked_loader, restored_at_end
from gpuaug.loader.sharding import count_ranks
from gpuaug.loader.streamed_loader import DEFAULT_DEPTH, StreamedLoader
from gpuaug.profiler.isolated import measure_parts
from gpuaug.profiler.measure import Spread, link_gb_per_s
from gpuaug.profiler.recorder import THREAD, Recorder
from gpuaug.profiler.report import LOAD, PLAIN_BESIDE_ITERATOR, STEP, Part, Report
from gpuaug.profiler.steady_state import EndlessBatches, RepeatedBatch
from gpuaug.profiler.timeline import Span, Timeline
from gpuaug.profiler.verdict import verdict
from gpuaug.stages.copy import PAGEABLE_WARN_BYTES

_log = logging.getLogger("gpuaug")

Step = Callable[[Batch], Any]
"""One training step, called with a batch of the loader."""

TIMELINE_BATCHES = 10
"""Number of batches in the timeline."""

MIN_WINDOW_BATCHES = 8
"""Smallest number of batches in a window."""

WINDOW_S = 5.0
"""Seconds after which a window ends if it has ``MIN_WINDOW_BATCHES``."""


def profile(
    loader: StreamedLoader, step: Callable[[Batch], Any], *, batches: int = 40, rounds: int = 3, show: bool = True
) -> Report:
    """Measure the parts of a training step, and find the bound of the loop and the gain from overlap.

    Runs up to about ``(4 * batches + 18) * rounds + 45`` real training steps, so pass a model that may be thrown
    away, or a copy. The epoch and the state of the loader, and torch's generators, are restored. Open iterators can be
    continued, except if the wrapped loader has a state and is not a ``DataLoader``.

    Args:
        loader: The loader that the training loop iterates over.
        step: One training step, called with a batch of the loader: ``lambda batch: train_step(*batch)``.
        batches: Number of batches per window. A window is one timed run of a loop.
        rounds: Number of windows per measured loop. The report shows the median and the range of the windows.
        show: Whether to print the report.

    Returns:
        The report. ``print`` it, look at ``report.timeline``, or read its attributes.

    Raises:
        ArgumentError, ArgumentTypeError: If an argument has an invalid value, or if the loader has no batches or can be
            iterated only once.
        Exception: Any error of the wrapped loader, a stage or the step.

    Cost:
        ``rounds`` windows of each of up to five loops, and some calls of each part. The timeline and the times of the training
        thread come from an additional window, because recording them slows down the loop.

    Examples:
        >>> loader = StreamedLoader([torch.ones(4)] * 10, device="cpu")
        >>> report = profile(loader, lambda batch: batch.square().sum(), batches=8, rounds=1, show=False)
        >>> [part.name for part in report.parts]
        ['load', 'copy', 'step']
    """
    checked_loader(loader, "profiled", "The loader is the first argument, the step the second.")
    if not callable(step):
        raise ArgumentTypeError(f"step must be callable, got {type(step).__name__}. Pass a function of one batch.")
    way_out = "Leave it out for 40: fewer batches do not represent a steady loop."
    batches = whole_number("batches", batches, way_out, least=MIN_WINDOW_BATCHES)
    rounds = whole_number("rounds", rounds, "Leave it out for 3 windows, which show how much windows differ.", least=1)
    show = flag("show", show, "False returns the report without printing it.")
    with restored_at_end(loader):
        report = _Profile(loader, _with_note(step), batches, rounds).run()
    if show:
        sys.stdout.write(f"{report}\n")
    return report


class _Profile:
    """Measurements of one call of ``profile``."""

    def __init__(self, loader: StreamedLoader, step: Step, count: int, rounds: int) -> None:
        self._loader = loader
        self._step = step
        self._max_window_batches = count
        self._rounds = rounds
        self._inspection = Inspection(loader)
        self._lanes = self._inspection.lanes
        self._device = loader.device
        depth = loader.depth
        self._ahead = depth or DEFAULT_DEPTH
        """Number of batches launched ahead in the streamed loop."""
        self._depth_text = self._ahead if depth == self._ahead else f"{self._ahead} (loader: {depth})"
        self._window_batches = 1
        """Number of batches in the last window."""
        self._epoch_start_ms: list[float] = []
        """Time of beginning epochs in milliseconds per batch, for each streamed window."""
        self._waits_ms: list[float] = []
        """Wait of the training thread for the loader in milliseconds, for each batch of the streamed windows."""
        self._batches = EndlessBatches(self._inspection)
        workers = getattr(loader.loader, "num_workers", 0)
        self._queued = workers * (getattr(loader.loader, "prefetch_factor", None) or 2) + QUEUED + self._ahead
        """Maximum number of batches that were loaded and not yet trained on."""

    def run(self) -> Report:
        """Measure the loops and the parts, and return the report."""
        _log.info("gpuaug.profile: warm-up")
        with closing(self._batches):
            self._warm_up(self._ahead, self._queued + 4)
            repeated = RepeatedBatch(self._batches.next(self._ahead))
            self._step(repeated())
            loops: dict[str, Callable[[], float]] = {"load": self._time_loader, "streamed": self._time_streamed}
            if not self._lanes.in_line and self._loader.stages:
                loops["step first"] = step_first(self._device)(self._time_streamed)  # a decorator: the loop has priority
            loops |= {"in line": self._time_in_line, "cached": lambda: self._time_on_device(lambda: self._step(repeated()))}
            windows: dict[str, list[float]] = {name: [] for name in loops}
            for round_ in range(self._rounds):
                _log.info("gpuaug.profile: round %d of %d", round_ + 1, self._rounds)
                for name, measure in loops.items():
                    windows[name].append(measure())
            _log.info("gpuaug.profile: parts of the step")
            host_batch, pageable_bytes = self._cloned_host_batch()
            spans = self._record_spans()
        synchronize(self._device)
        isolated = measure_parts(self._inspection, host_batch, lambda: self._step(repeated()))
        parts = [Part(LOAD, Spread.of(windows["load"])), *isolated]
        # The step, the last part, was also measured in whole windows, which are more accurate than a few calls.
        step = Spread.of(windows["cached"])
        parts[-1] = replace(parts[-1], wall=step, host=step if self._lanes.in_line else parts[-1].host)
        first_shown = (spans[0].batch if spans else 0) + self._ahead + 2  # without the batches that fill the pipeline
        shown_spans = tuple(span for span in spans if first_shown <= span.batch < first_shown + TIMELINE_BATCHES)
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else self._device.type.upper()
        report = Report(
            parts=tuple(parts),
            in_line=Spread.of(windows["in line"]),
            streamed=Spread.of(windows["streamed"]),
            cached=step,
            step_first=Spread.of(windows["step first"]) if "step first" in windows else None,
            epoch_ms=fmean(self._epoch_start_ms),
            thread_ms=_thread_ms_by_part(spans),
            waits_for_loader_ms=tuple(self._waits_ms),
            batch_bytes=sum(tensor.nbytes for tensor in _tensors(host_batch) if tensor.is_cpu and can_be_stored(tensor)),
            pageable_bytes=pageable_bytes,
            link_gb_per_s=link_gb_per_s(self._lanes),
            lanes=not self._lanes.in_line,
            settings={
                "device": name,
                "depth": "in line" if self._lanes.in_line else self._depth_text,
                "feed": self._feed_text(),
                "workers": getattr(self._loader.loader, "num_workers", 0),
                "batches": self._max_window_batches,
                "rounds": self._rounds,
            },
            timeline=Timeline(shown_spans, name, 0 if self._lanes.in_line else self._ahead),
            plain_torch=plain_torch_reason(self._device),
        )
        return replace(report, verdict=tuple(verdict(report)))

    def _warm_up(self, depth: int, count: int = 4) -> None:
        """Train on the batches that the previous window has launched, at most ``_ahead``, and then on ``count`` batches."""
        for _ in range(self._ahead + count):
            self._step(self._batches.next(depth))

    def _time_streamed(self) -> float:
        """Return the time of the loop with batches launched ahead, in milliseconds per batch."""
        self._warm_up(self._ahead)
        before_s = self._batches.epoch_start_s
        batch_ms = self._time_on_device(self._streamed_step)
        self._epoch_start_ms.append((self._batches.epoch_start_s - before_s) * 1e3 / self._window_batches)
        return batch_ms

    def _time_in_line(self) -> float:
        """Return the time of the loop with ``depth=0``, in milliseconds per batch."""
        self._warm_up(0)
        return self._time_on_device(lambda: self._step(self._batches.next(0)))

    def _streamed_step(self) -> None:
        """Run a step of the streamed loop. Store the wait for the batch, except for the first batch of an epoch."""
        stats = self._loader.stats()
        starved_ms = stats.starved_ms
        epoch_start_s = self._batches.epoch_start_s
        batch = self._batches.next(self._ahead)
        if self._batches.epoch_start_s == epoch_start_s:
            self._waits_ms.append(stats.starved_ms - starved_ms)
        self._step(batch)

    def _time_loader(self) -> float:
        """Return the time of the wrapped loader alone, without queued batches and starts of epochs, in ms per batch."""
        for _ in range(self._queued):
            self._batches.pull()
        before_s = self._batches.epoch_start_s
        batch_ms = self._time_on_host(self._batches.pull)
        return batch_ms - (self._batches.epoch_start_s - before_s) * 1e3 / self._window_batches

    def _time_on_device(self, run_batch: Callable[[], Any]) -> float:
        """Return the time of a window on the stream that trains, in milliseconds per batch.

        Measured between events, without synchronisation, so that the number of batches ahead is the same at both ends of the
        window. After a synchronisation no batches are ahead, and the time would include launching them.
        """
        if self._lanes.in_line:
            return self._time_on_host(run_batch)
        consumer = self._lanes.consumer()  # the current stream, on which the step runs
        first = consumer.record_event(timed=True)
        self._repeat(run_batch)
        last = consumer.record_event(timed=True)
        synchronize(self._device)
        return first.elapsed_time(last) / self._window_batches

    def _time_on_host(self, run_batch: Callable[[], Any]) -> float:
        """Return the time of a window by the host's clock, synchronised at both ends, in milliseconds per batch."""
        synchronize(self._device)
        start = time.perf_counter()
        self._repeat(run_batch)
        synchronize(self._device)
        return (time.perf_counter() - start) * 1e3 / self._window_batches

    def _repeat(self, run_batch: Callable[[], Any]) -> None:
        """Call ``run_batch`` for each batch of a window. The window ends early after ``WINDOW_S``."""
        # With several ranks there is no time limit: ranks wait for each other in every step, so they must run equally many.
        limit_s = WINDOW_S if count_ranks() == 1 else float("inf")
        start = time.perf_counter()
        self._window_batches = 0
        while self._window_batches < self._max_window_batches and (
            self._window_batches < MIN_WINDOW_BATCHES or time.perf_counter() - start < limit_s
        ):
            run_batch()
            self._window_batches += 1

    def _cloned_host_batch(self) -> tuple[Batch, int]:
        """Return (clone of a host batch, its pageable bytes, or 0 if they are few). Clones are page-locked as their sources."""
        pulled = self._batches.pull()
        on_gpu = self._device.type == "cuda"
        is_in_slot = bool(pulled.slot)  # in page-locked memory

        def cloned(leaf: Any) -> Any:
            if not can_be_stored(leaf):
                return leaf
            is_pinned = on_gpu and (is_in_slot or leaf.is_pinned())
            return leaf.clone().pin_memory() if is_pinned else leaf.clone()

        clone = batches.map_leaves(batches.cached_by_id(cloned), pulled.batch)
        stored = [tensor for tensor in batches.tensors(clone) if on_gpu and can_be_stored(tensor)]
        pageable_bytes = sum(tensor.nbytes for tensor in stored if not tensor.is_pinned())
        return clone, pageable_bytes if pageable_bytes > PAGEABLE_WARN_BYTES else 0

    def _feed_text(self) -> str:
        """Return the feed's ``repr``, or another text if an iterator of the user has the page-locked slots."""
        feed = self._inspection.feed
        stats = self._loader.stats()
        if not feed.reason and feed.workers and not stats.slot_batches:  # slots are possible, and no batch came in one
            return PLAIN_BESIDE_ITERATOR
        return repr(feed)

    def _record_spans(self) -> tuple[Span, ...]:
        """Return the spans of an additional streamed window. Its time is not reported, because recording slows it down."""
        self._warm_up(self._ahead)
        recorder = Recorder(self._lanes)
        with self._inspection.with_hooks(recorder):
            # ``_ahead + 2`` batches run before the batches that the timeline shows, and as many after them.
            for _ in range(2 * (self._ahead + 2) + TIMELINE_BATCHES):
                self._step(self._batches.next(self._ahead))
        synchronize(self._device)
        return recorder.spans()


def _thread_ms_by_part(spans: tuple[Span, ...]) -> dict[str, float]:
    """Return name of a part → time of the training thread, in milliseconds per batch."""
    complete = {span.batch for span in spans if span.lane == THREAD and span.name == STEP}  # batches whose step was recorded
    thread_ms: dict[str, float] = {}
    for span in spans:
        if span.lane == THREAD and span.batch in complete:
            thread_ms[span.name] = thread_ms.get(span.name, 0.0) + (span.end_ms - span.start_ms) / len(complete)
    return thread_ms


def _tensors(batch: Batch) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch, including attributes and items of objects with a ``to`` method."""
    for leaf in batches.leaves(batch):
        yield from batches.tensors([leaf] if isinstance(leaf, torch.Tensor) else batches.inner_values(leaf))


def _with_note(step: Step) -> Step:
    """Wrap ``step`` so that a note about its argument is added to its errors."""

    def run(batch: Batch) -> Any:
        try:
            return step(batch)
        except Exception as error:
            add_note(
                error,
                "gpuaug: raised by the step, which is called with one argument: a batch as the loader yields it. "
                "For a step of two arguments, pass lambda batch: step(*batch).",
            )
            raise

    return run
