"""``profile``: measures real training steps to find their bound.

Everything is measured in one run on one pass over the loader: the wrapped loader by itself, the loop streamed and in line, and
the step on a batch that is there, in windows that take turns; then each part alone. Nothing is synchronised inside a window.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.devices import plain_torch_reason
from gpuaug.core.errors import ArgumentTypeError, add_note, flag, whole_number
from gpuaug.core.streams import ms_between
from gpuaug.feed.mailbox import QUEUED
from gpuaug.feed.ring_memory import can_be_placed
from gpuaug.loader.inspection import Inspection, check, restored_at_end
from gpuaug.loader.sharding import count_ranks
from gpuaug.loader.streamed_loader import DEFAULT_DEPTH, StreamedLoader
from gpuaug.profiler.isolated import measured
from gpuaug.profiler.measure import Spread, link_gb_per_s, synchronize
from gpuaug.profiler.recorder import THREAD, Recorder
from gpuaug.profiler.repeated_batch import RepeatedBatch
from gpuaug.profiler.report import ANOTHER_ITERATOR, LOAD, STEP, Part, Report
from gpuaug.profiler.steady_state import EndlessBatches
from gpuaug.profiler.timeline import Span, Timeline
from gpuaug.profiler.verdict import verdict
from gpuaug.stages.copy import PAGEABLE_WARN_BYTES

Step = Callable[[Batch], Any]
"""One step of training on a batch as the loader yields it."""

SHOWN, FEWEST = 10, 8
"""Batches that the timeline shows, and that a window needs."""

WINDOW_S = 5.0
"""Seconds after which a window ends, if it has the fewest batches by then."""


def profile(loader: StreamedLoader, step: Step, *, batches: int = 40, rounds: int = 3, show: bool = True) -> Report:
    """Find out where a step's time goes, what bounds it, and whether overlap pays here.

    Runs real training steps: about ``10 * batches``, and about 40 more. Pass a model that may be thrown away, or a copy. The
    loader is left as it was found: its epoch, its state and torch's generators. An iterator that is open goes on, but for one
    on a source that is no ``DataLoader`` and has a state.

    Args:
        loader: What the training loop iterates over.
        step: One step of training, called with a batch as the loader yields it: ``lambda batch: train_step(*batch)``.
        batches: How many a window counts.
        rounds: How many windows there are of each kind. Their median is shown, and their range.
        show: Whether to print the report too, with rich if that is installed.

    Returns:
        The report. ``print`` it, look at ``report.timeline``, or read its figures.

    Raises:
        ArgumentError, ArgumentTypeError: For arguments that cannot work, and a loader without batches or that is read once.
        Exception: What the wrapped loader, a stage or the step raises.

    Cost:
        ``rounds`` windows of the loader alone, of three loops, and some calls of each part. The streamed windows are not
        instrumented: the timeline and the training thread's times come from one that is not counted.

    Examples:
        >>> loader = StreamedLoader([torch.ones(4)] * 10, device="cpu")
        >>> report = profile(loader, lambda batch: batch.square().sum(), batches=8, rounds=1, show=False)
        >>> [part.name for part in report.parts]
        ['load', 'copy', 'step']
    """
    check(loader, "profiled", "Pass the loader first, then the step.")
    if not callable(step):
        raise ArgumentTypeError(f"step must be callable, got {type(step).__name__}. Pass a function of one batch.")
    way_out = "Leave it out for 40: fewer say little about a steady loop."
    batches = whole_number("batches", batches, way_out, least=FEWEST)
    rounds = whole_number("rounds", rounds, "Leave it out for 3, which show how much windows differ.", least=1)
    show = flag("show", show, "False returns the report alone.")
    with restored_at_end(loader):
        report = _Profile(loader, _noted(step), batches, rounds).run()
    if show:
        _print(report)
    return report


class _Profile:
    """The measurements of one profile."""

    def __init__(self, loader: StreamedLoader, step: Step, count: int, rounds: int) -> None:
        self._loader, self._step, self._count, self._rounds = loader, step, count, rounds
        self._inspection = Inspection(loader)
        self._lanes = self._inspection.lanes
        self._device = loader.device
        depth = loader.depth
        self._ahead = depth or DEFAULT_DEPTH
        self._said_depth = self._ahead if depth == self._ahead else f"{self._ahead} (set: {depth})"
        self._done = 1
        """Number of batches of the last window."""
        self._starting_ms: list[float] = []
        """Milliseconds a batch of beginning epochs, for each streamed window."""
        self._waits_ms: list[float] = []
        self._passes = EndlessBatches(loader)
        workers = getattr(loader.loader, "num_workers", 0)
        self._queued = workers * (getattr(loader.loader, "prefetch_factor", None) or 2) + QUEUED + self._ahead

    def run(self) -> Report:
        with self._passes:
            self._settle(self._ahead, self._queued + 4)
            given = self._one()
            windows: dict[str, list[float]] = {name: [] for name in ("load", "streamed", "in line", "cached")}
            for _ in range(self._rounds):
                windows["load"].append(self._loading())
                windows["streamed"].append(self._loop(self._ahead))
                windows["in line"].append(self._loop(0))
                windows["cached"].append(self._timed(lambda: self._step(given())))
            host_batch, pageable = self._kept()
            spans = self._recorded()
        synchronize(self._device)
        parts = [Part(LOAD, Spread.of(windows["load"])), *measured(self._loader, host_batch, lambda: self._step(given()))]
        # Of the step there are whole windows, which say more than some calls.
        step = Spread.of(windows["cached"])
        parts[-1] = replace(parts[-1], wall=step, host=step if self._lanes.in_line else parts[-1].host)
        first = spans[0].batch if spans else 0
        shown = tuple(span for span in spans if first + self._ahead + 2 <= span.batch < first + self._ahead + 2 + SHOWN)
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else self._device.type.upper()
        report = Report(
            parts=tuple(parts),
            in_line=Spread.of(windows["in line"]),
            streamed=Spread.of(windows["streamed"]),
            cached=step,
            epoch_ms=fmean(self._starting_ms),
            thread_ms=_by_part(spans),
            waits_for_loader_ms=tuple(self._waits_ms),
            batch_bytes=sum(tensor.nbytes for tensor in _tensors(host_batch) if tensor.is_cpu and can_be_placed(tensor)),
            pageable_bytes=pageable,
            link_gb_per_s=link_gb_per_s(self._lanes),
            lanes=not self._lanes.in_line,
            settings={
                "device": name,
                "depth": "in line" if self._lanes.in_line else self._said_depth,
                "feed": self._feed(),
                "workers": getattr(self._loader.loader, "num_workers", 0),
                "batches": self._count,
                "rounds": self._rounds,
            },
            timeline=Timeline(shown, name, 0 if self._lanes.in_line else self._ahead),
            plain_torch=plain_torch_reason(self._device),
        )
        return replace(report, verdict=tuple(verdict(report)))

    def _one(self) -> RepeatedBatch:
        """A batch on the device, as the step is given it."""
        again = RepeatedBatch(self._passes.next(self._ahead))
        self._step(again())
        return again

    def _settle(self, depth: int, count: int = 4) -> None:
        """Train on batches until none is left that an earlier form of the loop launched."""
        for _ in range(self._ahead + count):
            self._step(self._passes.next(depth))

    def _loop(self, depth: int) -> float:
        """Milliseconds a batch of the loop."""
        self._settle(depth)
        before_s = self._passes.starting_s
        took_ms = self._timed(self._streamed_step if depth else lambda: self._step(self._passes.next(0)))
        if depth:
            self._starting_ms.append((self._passes.starting_s - before_s) * 1e3 / self._done)
        return took_ms

    def _streamed_step(self) -> None:
        """A step of the streamed loop. Keeps how long its batch was waited for, unless it began an epoch."""
        stats = self._loader.stats()
        passes = self._passes
        starved_ms, starting_s = stats.starved_ms, passes.starting_s
        batch = passes.next(self._ahead)
        if passes.starting_s == starting_s:
            self._waits_ms.append(stats.starved_ms - starved_ms)
        self._step(batch)

    def _loading(self) -> float:
        """Milliseconds a batch of the wrapped loader by itself, within an epoch, after its queue has been emptied."""
        for _ in range(self._queued):
            self._passes.pull()
        before_s = self._passes.starting_s
        took_ms = self._waited_for(self._passes.pull)
        return took_ms - (self._passes.starting_s - before_s) * 1e3 / self._done

    def _timed(self, once: Callable[[], Any]) -> float:
        """Milliseconds a batch of the stream that trains.

        From event to event, so that a steady loop is timed: as many batches are ahead when the window begins as when it ends.
        Synchronising at the edges would drain the pipeline and time its refill.
        """
        if self._lanes.in_line:
            return self._waited_for(once)
        consumer = self._lanes.consumer()
        first = consumer.record_event(timed=True)
        self._repeat(once)
        last = consumer.record_event(timed=True)
        synchronize(self._device)
        return ms_between(first, last) / self._done

    def _waited_for(self, once: Callable[[], Any]) -> float:
        """Milliseconds a batch by the host's clock, between two waits for the device."""
        synchronize(self._device)
        start = time.perf_counter()
        self._repeat(once)
        synchronize(self._device)
        return (time.perf_counter() - start) * 1e3 / self._done

    def _repeat(self, once: Callable[[], Any]) -> None:
        """Call ``once`` for each batch of a window, or until its time is over."""
        # Processes that train together wait for one another in every step, so all of them have to make as many.
        most_s = WINDOW_S if count_ranks() == 1 else float("inf")
        start = time.perf_counter()
        self._done = 0
        while self._done < self._count and (self._done < FEWEST or time.perf_counter() - start < most_s):
            once()
            self._done += 1

    def _kept(self) -> tuple[Batch, int]:
        """(host batch to copy repeatedly, in memory like the loader's; its pageable bytes)."""
        pulled = self._passes.pull()
        on_gpu = self._device.type == "cuda"
        slot = pulled.slot
        locked = 0

        def own(leaf: Any) -> Any:
            nonlocal locked
            if not can_be_placed(leaf):
                return leaf
            if on_gpu and (slot is not None or leaf.is_pinned()):
                locked += leaf.nbytes
                return leaf.clone().pin_memory()
            return leaf.clone()

        kept = batches.map_leaves(batches.cached_by_id(own), pulled.batch)
        whole = sum(tensor.nbytes for tensor in batches.tensors(kept) if can_be_placed(tensor)) if on_gpu else 0
        pageable = whole - locked
        return kept, pageable if pageable > PAGEABLE_WARN_BYTES else 0

    def _feed(self) -> str:
        """The feed by name. Differs from the loader's usual one while another iterator has the slots."""
        feed = self._inspection.feed
        stats = self._loader.stats()
        if not feed.reason and feed.workers and not stats.slot_batches:
            return ANOTHER_ITERATOR
        return repr(feed)

    def _recorded(self) -> tuple[Span, ...]:
        """Spans of a streamed window whose time is not counted."""
        self._settle(self._ahead)
        recorder = Recorder(self._lanes)
        with self._inspection.watched_by(recorder):
            for _ in range(2 * (self._ahead + 2) + SHOWN):
                self._step(self._passes.next(self._ahead))
        synchronize(self._device)
        return recorder.spans()


def _by_part(spans: tuple[Span, ...]) -> dict[str, float]:
    """Milliseconds a batch of the training thread, by part."""
    counted = {span.batch for span in spans if span.lane == THREAD and span.name == STEP}
    found: dict[str, float] = {}
    for span in spans:
        if span.lane == THREAD and span.batch in counted:
            found[span.name] = found.get(span.name, 0.0) + (span.end_ms - span.start_ms) / len(counted)
    return found


def _tensors(batch: Batch) -> Iterator[torch.Tensor]:
    """Tensors of a batch, and tensors visible in objects with their own ``to``."""
    for leaf in batches.leaves(batch):
        yield from batches.tensors([leaf] if isinstance(leaf, torch.Tensor) else batches.members(leaf))


def _noted(step: Step) -> Step:
    def run(batch: Batch) -> Any:
        try:
            return step(batch)
        except Exception as error:
            add_note(
                error,
                "gpuaug: raised by the step, which is called with one batch as the loader yields it. "
                "One of two arguments is lambda batch: step(*batch).",
            )
            raise

    return run


def _print(report: Report) -> None:
    try:
        from rich.console import Console
    except ImportError:
        sys.stdout.write(f"{report}\n")
    else:
        # A pipe or file has no width of its own.
        Console(width=None if sys.stdout.isatty() else 140).print(report)
