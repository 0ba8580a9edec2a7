"""The batches of one iterator between the wrapped loader and the training loop."""

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import IteratorEndedError, add_note
from gpuaug.core.rng import Position
from gpuaug.core.streams import Event, Lane
from gpuaug.feed.mailbox import Pulled
from gpuaug.feed.prefetch import STOP_S, FeedIterator
from gpuaug.feed.wrapped_loader import explain
from gpuaug.loader.checkpoint import Snapshot
from gpuaug.loader.in_flight import Launched, Submitted
from gpuaug.loader.state import LoaderState
from gpuaug.stages.base import BoundStage


class PipelinedIterator:
    """The batches of one iterator.

    Args:
        shared: State that the loader's iterators share.
        feed_iterator: The iteration over the wrapped loader.
        bound: The stages on their lanes.
        begun: Epoch and batch at which the training loop begins.
        first_position: Random-number key of the first batch.
        depth: Number of batches launched ahead of the one that is handed over. May be set between two batches.
    """

    def __init__(
        self,
        shared: LoaderState,
        feed_iterator: FeedIterator,
        bound: Sequence[BoundStage],
        begun: Snapshot,
        first_position: Position,
        depth: int,
    ) -> None:
        self._shared = shared
        self._lanes = shared.lanes
        self._copier = shared.placement.copier
        self._bound = bound
        self.feed_iterator = feed_iterator
        self._launch_position = first_position
        self._handed_over = begun
        self._ended = False
        self._state_at_end: Any = None
        self._memory: dict[str, Any] = {}
        self._submitted: deque[Submitted] = deque()
        self._ahead = max((stage.ahead for stage in bound), default=0)
        self.waiting: deque[Launched] = deque()
        self.depth = depth
        self._process = os.getpid()
        # Also runs when the interpreter ends, before it takes the modules away.
        self._end_threads = weakref.finalize(self, _end_threads, self._process, self._submitted, bound, self._memory)

    @property
    def position(self) -> Position:
        """Random-number key (seed, epoch, rank, batch index) of the next batch to launch."""
        return self._launch_position

    @property
    def ended(self) -> bool:
        """Whether the wrapped loader has ended, or an error has."""
        return self._ended

    def check_process(self) -> None:
        """Refuse a forked process, which cannot use CUDA. Call before any CUDA call.

        Raises:
            IteratorEndedError: In a process that was forked from the one that began the iterator.
        """
        if os.getpid() != self._process:
            raise IteratorEndedError(
                "This iterator cannot be read here, because this process was forked from the one that began it and has neither "
                "its threads nor its workers. Begin an iterator here: iter(loader)."
            )

    def fill(self, consumer: Lane) -> None:
        """Launch batches until ``depth + 1`` are launched, or the wrapped loader has none ready.

        May wait for the run-ahead limit, for another thread's launch and for a stage's Python; for the loader or the decoder
        only if no batch is launched, or if images have to be decoded again.
        """
        stats = self._shared.stats
        hooks = self._shared.hooks
        hooks.asked(consumer)
        done = consumer.record_event()
        depth = self.depth
        stats.depth = 0 if self._lanes.in_line else depth
        waited_s = self._shared.run_ahead_limit.keep(done, ahead=depth + 2)
        if waited_s is not None:
            stats.held_back += 1
            stats.held_back_ms += waited_s * 1e3
            hooks.held_back(self._handed_over.batch, waited_s)
        # In line nothing overlaps: launching ahead would only delay the batch that is wanted.
        most = 1 if self._lanes.in_line else depth + 1
        ahead = min(depth, self._ahead)
        consumer_event: Event | None = done
        while (step := self._next_step(most, ahead)) is not None:
            self._shared.launching.run(partial(self._run, step, consumer, consumer_event))
            consumer_event = None

    def pop(self, consumer: Lane) -> Batch:
        """The next batch, for which ``consumer`` waits on the device. Raises the error that takes its place, if one does."""
        launched = self.waiting.popleft()
        if launched.error is not None:
            self._ended = True
            try:
                raise launched.error
            finally:
                del launched  # or the error would hold itself through its traceback, and the batch with it
        assert launched.ready is not None
        stats = self._shared.stats
        hooks = self._shared.hooks
        batch_index = self._handed_over.batch
        with hooks.span("gpuaug/wait", batch_index, consumer, waits=True):
            self._lanes.hand_over(launched.ready, consumer)
        for tensor in launched.resident:
            consumer.reads(tensor)
        if launched.source is not None:
            launched.source.wait(launched.ready)
        stats.batches += 1
        stats.ready = len(self.waiting)
        self._reach(Snapshot(self._handed_over.epoch, batch_index + 1, False, self._handed_over.chosen, launched.state))
        self.feed_iterator.refill()
        hooks.handed_over(batch_index, consumer)
        return launched.batch

    def end(self) -> None:
        """Note that all batches have been handed over and the epoch has ended."""
        self._reach(self._handed_over._replace(ended=True, source=self._state_at_end))

    def close(self) -> None:
        """End the iteration over the wrapped loader, and drop batches that were not handed over."""
        if not self._end_threads.alive:
            return  # closed before, or the interpreter ends: threads have ended, and modules may be gone
        if os.getpid() != self._process:
            _kept_in_children.append(self)
            return
        self.feed_iterator.close()
        self._end_threads()
        for launched in self.waiting:  # they are dropped while lanes may still be reading them
            if launched.source is not None and launched.ready is not None:
                launched.source.wait(launched.ready)
        self.waiting.clear()
        self._shared.progress.leave()
        self._shared.reclaim()

    def release(self) -> None:
        """End the work of other threads on submitted batches. Each becomes an error at its place. The feed has been closed.

        May be called while another thread is inside ``fill``: waits for its launch.
        """

        def abandon() -> None:
            for submitted in self._submitted:
                submitted.error = submitted.error or self.feed_iterator.ended_error()
                submitted.abandon()
            for bound in self._bound:
                bound.close(self._memory)

        if self._ahead and self._process == os.getpid():
            self._shared.launching.try_run(abandon, STOP_S)

    def _run(self, step: Callable[[], None], consumer: Lane, done: Event | None) -> None:
        """Run one step with the lanes current. With ``done``, free read slots, and have the copy lane wait for that event."""
        if done is not None:
            self._shared.feed.free_read_slots()
            self._lanes.wait_for_consumers(consumer, done)
        block = self._lanes.launching(consumer)
        try:
            with block:
                step()
        except BaseException:  # an interrupt, perhaps at its first line, or before an event keeps a launch's memory
            block.__exit__(None, None, None)
            self._lanes.settle()
            raise

    def _reach(self, reached: Snapshot) -> None:
        self._handed_over = reached
        self._shared.progress.reach(reached)

    def _note(self, error: BaseException, where: str, batch: int) -> None:
        raised = f"gpuaug: raised {where}, at batch "
        add_note(error, f"{raised}{batch} of epoch {self._launch_position.epoch}.", replaces=raised)
        if isinstance(error, torch.OutOfMemoryError):
            depth = 0 if self._lanes.in_line else self.depth
            way_out = "Lower depth, or batch_size of the DataLoader." if depth else "Lower batch_size of the DataLoader."
            at_once = f"{depth + 2} batches are on {self._lanes.device} at once (depth={depth})"
            add_note(error, f"gpuaug: up to {at_once}. {way_out}", replaces="gpuaug: up to ")

    def _next_step(self, most: int, ahead: int) -> Callable[[], None] | None:
        """The next action, or ``None`` where there is none without waiting.

        Launch the oldest submitted batch if its decoding is done; else pull one, while fewer than ``most + ahead`` are
        launched or submitted; else, if none is launched, launch the oldest submitted batch and wait for its decoding.
        """
        submitted = self._submitted
        if submitted and len(self.waiting) < most and submitted[0].done():
            return self._launch_next
        if not self._ended and len(self.waiting) + len(submitted) < most + ahead:
            pulled = self._pull()
            if pulled is not None and not (pulled.ended and pulled.error is None):
                return partial(self._submit, pulled)
        # Only the batch that is wanted now may make the training thread wait.
        return self._launch_next if submitted and not self.waiting else None

    def _pull(self) -> Pulled | None:
        """The next batch of the wrapped loader. ``None`` if it has none yet while others are launched or submitted."""
        stats = self._shared.stats
        hooks = self._shared.hooks
        pulled = self.feed_iterator.get(block=False)
        if pulled is None:
            if self.waiting or self._submitted:
                return None
            start = time.perf_counter()
            with hooks.span("gpuaug/wait for loader", self._launch_position.batch, waits=True):
                pulled = self.feed_iterator.get(block=True)
            waited_s = time.perf_counter() - start
            stats.starved += 1
            stats.starved_ms += waited_s * 1e3  # no call within: another thread may count, too
            assert pulled is not None
        self._ended = pulled.ended
        self._state_at_end = pulled.state
        return pulled

    def _submit(self, pulled: Pulled) -> None:
        batch_index = self._launch_position.batch + len(self._submitted)
        self._submitted.append(submitted := Submitted(pulled, error=pulled.error))
        if pulled.error is not None:
            explain(pulled.error)
            self._note(pulled.error, "by the wrapped loader", batch_index)
        else:
            self._shared.hooks.pulled(batch_index, *pulled.took_s)
        if not self._ahead:
            self._launch_next()  # no stage works on other threads
        elif pulled.error is None:
            submitted.error = self.feed_iterator.ended_error() or self._begin_stages(submitted, batch_index)

    def _begin_stages(self, submitted: Submitted, batch_index: int) -> Exception | None:
        """Begin the stages' work on other threads. Returns the error that a stage raised, or ``None``."""
        self._lanes.reclaim()
        self._lanes.copy.make_current()
        position = self._launch_position._replace(batch=batch_index)
        for bound in self._bound:
            try:
                submitted.pulled.batch, pending = bound.submit(submitted.pulled.batch, self._memory, position, self._bound)
            except Exception as error:
                self._note(error, f"in stage {bound.name!r}", batch_index)
                return error
            submitted.pending += [(bound.name, pending)] if pending is not None else []
        return None

    def _launch_next(self) -> None:
        submitted = self._submitted.popleft()
        if submitted.error is None:
            self._launch(submitted)
            self._launch_position = self._launch_position.after()
        else:  # raised at its own batch, after earlier batches have been handed over
            submitted.abandon()
            self._fail(submitted.error)

    def _fail(self, error: BaseException) -> None:
        """Raise ``error`` in place of the next batch, and launch no batch after it."""
        self.waiting.append(Launched(error=error))
        self._ended = True
        _abandon(self._submitted)

    @contextmanager
    def _decode_wait(self, batch: int) -> Iterator[None]:
        """A block in which the training thread waits until other threads have decoded ``batch``: counted, and a span."""
        stats = self._shared.stats
        start = time.perf_counter()
        try:
            with self._shared.hooks.span("gpuaug/wait for decoding", batch, waits=True):
                yield
        finally:
            waited_s = time.perf_counter() - start
            stats.decode_waits += 1
            stats.decode_wait_ms += waited_s * 1e3

    def _launch(self, submitted: Submitted) -> None:
        pulled = submitted.pulled
        stats = self._shared.stats
        feed = self._shared.feed
        hooks = self._shared.hooks
        batch_index = self._launch_position.batch
        read_by_stages: list[Any] = []
        lane = self._lanes.copy
        doing = "its copy"
        source = None
        end = None
        try:
            self._lanes.reclaim()
            lane.make_current()
            for name, work in submitted.pending:
                doing = f"stage {name!r}"
                pulled.batch = work.collect(pulled.batch, partial(self._decode_wait, batch_index))
                stats.replaced += work.replaced
                stats.undecoded_pixels += work.undecoded
            doing = "its copy"
            feed.prepare(pulled)
            if pulled.slot is not None:
                stats.slot_batches += 1
            else:
                stats.other_batches += 1
            with hooks.span("gpuaug/copy", batch_index, lane):
                copied = self._copier.copy(pulled.batch)
            if copied.resident or copied.resident_objects:
                followed = self._lanes.follow(pulled.stream)
                source = followed if copied.resident_objects else None
            batch = copied.batch
            ready = lane.record_event()
            feed.read_until(pulled, ready)
            for bound in self._bound:
                doing = f"stage {bound.name!r}"
                values = bound.read(batch)
                read_by_stages.extend(batches.objects_to_keep(values))
                bound.lane.wait(ready)
                lane = bound.lane  # from here on its event covers all earlier work on this batch
                with hooks.span(bound.range_name, batch_index, lane):
                    for tensor in copied.resident:
                        lane.reads(tensor)
                    result = bound.run(values, ready, self._launch_position, self._memory)
                    ready = lane.record_event()
                    batch = bound.write(batch, result)
            stats.copied_bytes += copied.num_bytes
            end = ready
            self.waiting.append(Launched(batch, ready, copied.resident, source, state=pulled.state))
        except Exception as error:
            self._note(error, f"in {doing}", batch_index)
            self._fail(error)
        finally:
            if end is None:  # an error or an interrupt, after which the lane may hold work without an event
                submitted.abandon()  # or threads may read from the slot when it is free
                end = lane.record_event()
                feed.read_until(pulled, end)
                if source is not None:
                    source.wait(end)
            if read_by_stages:
                self._lanes.retire(read_by_stages, end)


_kept_in_children: list[PipelinedIterator] = []
"""Iterators of the parent process, kept alive: destroying their events would abort a process that cannot reach the device."""


def _abandon(submitted: deque[Submitted]) -> None:
    while submitted:
        submitted.popleft().abandon()


def _end_threads(process: int, submitted: deque[Submitted], bound: Sequence[BoundStage], memory: dict[str, Any]) -> None:
    if os.getpid() != process:
        return  # a forked process does not have the threads
    _abandon(submitted)
    for each in bound:
        each.close(memory)
