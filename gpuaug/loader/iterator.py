"""The batches of one iterator between the wrapped loader and the training loop."""

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import IteratorEndedError, add_note
from gpuaug.core.rng import Position
from gpuaug.core.streams import Event, Lane
from gpuaug.feed.prefetch import STOP_S, FeedIterator, Pulled
from gpuaug.loader.checkpoint import Snapshot
from gpuaug.loader.depth import Depth
from gpuaug.loader.queued import Launched, Submitted
from gpuaug.loader.state import LoaderState
from gpuaug.stages.base import BoundStage


class PipelinedIterator:
    """The batches of one iterator.

    Args:
        shared: What it shares with the loader's other iterators.
        feed_iterator: The pass over the wrapped loader.
        bound: The stages on their lanes.
        begun: Where the training loop is as it begins.
        first: What the first batch's draws depend on.
        depth: How many batches are worked on ahead of the one that is handed over.
    """

    def __init__(
        self,
        shared: LoaderState,
        feed_iterator: FeedIterator,
        bound: Sequence[BoundStage],
        begun: Snapshot,
        first: Position,
        depth: Depth,
    ) -> None:
        self._shared = shared
        self._lanes, self._copier = shared.lanes, shared.placement.copier
        self._bound = bound
        self.feed_iterator = feed_iterator
        self._at = first
        self._snapshot = begun
        self._ended = False
        self._state_at_end: Any = None
        self._memory: dict[str, Any] = {}
        self._submitted: deque[Submitted] = deque()
        self._ahead = max((stage.ahead for stage in bound), default=0)
        self.waiting: deque[Launched] = deque()
        self._depth = depth
        self._process = os.getpid()
        # Also runs when the interpreter ends, before it takes the modules away.
        self._end_threads = weakref.finalize(self, _end_threads, self._process, self._submitted, bound, self._memory)

    @property
    def position(self) -> Position:
        """What the draws of the batch that is launched next depend on."""
        return self._at

    @property
    def ended(self) -> bool:
        """Whether the wrapped loader has nothing more to give."""
        return self._ended

    def check_process(self) -> None:
        """To be called before CUDA is, which a forked process cannot use.

        Raises:
            IteratorEndedError: In a process that was forked from the one that began the iterator.
        """
        if os.getpid() != self._process:
            raise IteratorEndedError(
                "An iterator must be read in the process that began it, got next() in one that was forked from that and has "
                "neither its threads nor its workers. Begin an iterator there: iter(loader)."
            )

    def fill(self, consumer: Lane) -> None:
        """Queue work until ``depth`` batches follow the next one, as far as the wrapped loader has batches now.

        Blocks only when there is nothing to hand over.
        """
        stats, hooks = self._shared.stats, self._shared.hooks
        hooks.asked(consumer)
        self._shared.collect()
        done = self._depth.record_event(consumer, self)
        depth = self._depth.now
        stats.depth = 0 if self._lanes.in_line else depth
        waited_s = self._shared.run_ahead_limit.keep(done, ahead=depth + 2)
        if waited_s is not None:
            stats.held_back += 1
            stats.held_back_ms += waited_s * 1e3
            hooks.held_back(self._snapshot.batch, waited_s)
        # In line there is nothing to overlap with: launching ahead would only put off the batch that is wanted.
        most = 1 if self._lanes.in_line else depth + 1
        ahead = min(depth, self._ahead)
        first: Event | None = done
        while (step := self._next_step(most, ahead)) is not None:
            self._shared.launching.run(partial(self._run, step, consumer, first))
            first = None

    def pop(self, consumer: Lane) -> Batch:
        """The next batch, which ``consumer`` waits for on the device; or the error in its place."""
        launched = self.waiting.popleft()
        if launched.error is not None:
            self._ended = True
            try:
                raise launched.error
            finally:
                del launched  # or the error would hold itself through its traceback, and the batch with it
        assert launched.ready is not None
        stats, hooks, number = self._shared.stats, self._shared.hooks, self._snapshot.batch
        with hooks.span("gpuaug/wait", number, consumer, waits=True):
            self._lanes.hand_over(launched.ready, consumer)
        for tensor in launched.resident:
            consumer.reads(tensor)
        if launched.source is not None:
            launched.source.wait(launched.ready)
        stats.batches += 1
        stats.ready = len(self.waiting)
        self._reach(batch=number + 1, source=launched.state)
        self.feed_iterator.refill()
        hooks.handed_over(number, consumer)
        return launched.batch

    def end(self) -> None:
        """All batches have been handed over, and no more is asked for."""
        self._reach(ended=True, source=self._state_at_end)

    def close(self) -> None:
        """Let go of the wrapped loader, and of batches that will not be handed over."""
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
        """End what threads do for batches that are not launched, whose place an error takes. The feed has been closed.

        May be called while another thread is inside ``fill``, and waits for what is being launched there.
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
        """Take a step on the lanes, the first one after ``done``."""
        if done is not None:
            self._lanes.wait_for_consumers(consumer, done)
        block = self._lanes.launching(consumer)
        try:
            with block:
                step()
        except BaseException:  # an interrupt, perhaps at its first line, or between a launch and what keeps its memory
            block.__exit__(None, None, None)
            self._lanes.settle()
            raise

    def _reach(self, **changes: Any) -> None:
        self._snapshot = self._snapshot._replace(**changes)
        self._shared.progress.reach(self._snapshot)

    def _note(self, error: BaseException, where: str, batch: int) -> None:
        raised = f"gpuaug: raised {where}, at batch "
        add_note(error, f"{raised}{batch} of epoch {self._at.epoch}.", replaces=raised)

    def _next_step(self, most: int, ahead: int) -> Callable[[], None] | None:
        """What to do next so that ``most`` batches are launched and ``ahead`` more submitted, if anything can be done."""
        submitted = self._submitted
        if submitted and len(self.waiting) < most and submitted[0].done():
            return self._launch_next
        if not self._ended and len(self.waiting) + len(submitted) < most + ahead:
            pulled = self._pull()
            if pulled is not None and not (pulled.ended and pulled.error is None):
                return partial(self._submit, pulled)
        # Only a batch that is wanted now may hold the training thread up.
        return self._launch_next if submitted and not self.waiting else None

    def _pull(self) -> Pulled | None:
        """The next batch of the wrapped loader, if it has one now or nothing else can be handed over."""
        stats, hooks = self._shared.stats, self._shared.hooks
        pulled = self.feed_iterator.get(block=False)
        if pulled is None:
            if self.waiting or self._submitted:
                return None
            start = time.perf_counter()
            with hooks.span("gpuaug/wait for loader", self._at.batch, waits=True):
                pulled = self.feed_iterator.get(block=True)
            waited_s = time.perf_counter() - start
            stats.starved += 1
            stats.starved_ms += waited_s * 1e3  # no call within: another thread may count, too
            assert pulled is not None
        self._ended, self._state_at_end = pulled.ended, pulled.state
        return pulled

    def _submit(self, pulled: Pulled) -> None:
        number = self._at.batch + len(self._submitted)
        self._submitted.append(submitted := Submitted(pulled, error=pulled.error))
        if pulled.error is not None:
            self._note(pulled.error, "by the wrapped loader", number)
        else:
            self._shared.hooks.pulled(number, *pulled.took_s)
        if not self._ahead:
            self._launch_next()  # there is nothing to wait for
        elif pulled.error is None:
            submitted.error = self.feed_iterator.ended_error() or self._begin_stages(submitted, number)

    def _begin_stages(self, submitted: Submitted, number: int) -> Exception | None:
        """Have stages begin what they do on other threads; what one raised, if one did."""
        self._lanes.reclaim()
        self._lanes.copy.make_current()
        for bound in self._bound:
            try:
                submitted.pulled.batch, pending = bound.submit(submitted.pulled.batch, self._memory)
            except Exception as error:
                self._note(error, f"in stage {bound.name!r}", number)
                return error
            submitted.pending += [(bound.name, pending)] if pending is not None else []
        return None

    def _launch_next(self) -> None:
        submitted = self._submitted.popleft()
        if submitted.error is None:
            self._launch(submitted)
            self._at = self._at.after()
        else:  # it is raised at its own batch, after those before it have been handed over
            submitted.abandon()
            self._fail(submitted.error)

    def _fail(self, error: BaseException) -> None:
        """Have an error raised in place of the next batch, and launch nothing after it."""
        self.waiting.append(Launched(error=error))
        self._ended = True
        _abandon(self._submitted)

    @contextmanager
    def _decode_wait(self, batch: int) -> Iterator[None]:
        """A block in which the training thread waits until other threads have decoded ``batch``: counted, and a span."""
        stats, start = self._shared.stats, time.perf_counter()
        try:
            with self._shared.hooks.span("gpuaug/wait for decoding", batch, waits=True):
                yield
        finally:
            waited_s = time.perf_counter() - start
            stats.decode_waits += 1
            stats.decode_wait_ms += waited_s * 1e3

    def _launch(self, submitted: Submitted) -> None:
        pulled = submitted.pulled
        stats, feed, hooks, number = self._shared.stats, self._shared.feed, self._shared.hooks, self._at.batch
        read_by_stages: list[Any] = []
        lane, doing, source, end = self._lanes.copy, "its copy", None, None
        try:
            self._lanes.reclaim()
            lane.make_current()
            for name, work in submitted.pending:
                doing = f"stage {name!r}"
                pulled.batch = work.collect(pulled.batch, partial(self._decode_wait, number))
                stats.replaced += work.replaced
            doing = "its copy"
            feed.prepare(pulled)
            if pulled.slot is not None:
                stats.slot_batches += 1
            else:
                stats.other_batches += 1
            with hooks.span("gpuaug/copy", number, lane):
                copied = self._copier.copy(pulled.batch)
            if copied.resident or copied.resident_objects:
                followed = self._lanes.follow(pulled.stream)
                source = followed if copied.resident_objects else None
            batch, ready = copied.batch, lane.record_event()
            feed.read_until(pulled, ready)
            for bound in self._bound:
                doing = f"stage {bound.name!r}"
                values = bound.read(batch)
                read_by_stages.extend(batches.kept(values))
                bound.lane.wait(ready)
                lane = bound.lane  # from here on its event covers all that was done for this batch
                with hooks.span(bound.range_name, number, lane):
                    for tensor in copied.resident:
                        lane.reads(tensor)
                    result = bound.run(values, ready, self._at, self._memory)
                    ready = lane.record_event()
                    batch = bound.write(batch, result)
            stats.copied_bytes += copied.num_bytes
            end = ready
            self.waiting.append(Launched(batch, ready, copied.resident, source, state=pulled.state))
        except Exception as error:
            self._note(error, f"in {doing}", number)
            self._fail(error)
        finally:
            if end is None:  # an error or an interrupt, after which the lane may hold work that is not marked
                submitted.abandon()  # or threads may read from the slot when it is free
                end = lane.record_event()
                feed.read_until(pulled, end)
                if source is not None:
                    source.wait(end)
            if read_by_stages:
                self._lanes.retire(read_by_stages, end)


_kept_in_children: list[PipelinedIterator] = []
"""Those of the parent that were closed here: to destroy their events would abort a process that cannot reach the device."""


def _abandon(submitted: deque[Submitted]) -> None:
    while submitted:
        submitted.popleft().abandon()


def _end_threads(process: int, submitted: deque[Submitted], bound: Sequence[BoundStage], memory: dict[str, Any]) -> None:
    if os.getpid() != process:
        return  # the threads are not those of this one, which was forked
    _abandon(submitted)
    for each in bound:
        each.close(memory)
