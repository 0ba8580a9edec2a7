"""``PipelinedIterator``: moves each batch from the wrapped loader to the training loop.

::

    workers         feed thread     training thread, in fill()                             in pop()
    ┌──────────┐    ┌──────────┐    ┌──────────┐    ┌───────────┐    ┌──────────────┐    ┌───────────────┐
    │ collate  │    │ pulls    │    │ _pull    │    │ _submit   │    │ _launch      │    │ consumer      │
    │ into     │ ─▶ │ batches  │ ─▶ │          │ ─▶ │ threads   │ ─▶ │ copy lane,   │ ─▶ │ waits on the  │ ─▶ training step
    │ slots    │    │ ahead    │    │          │    │ decode    │    │ stages' lanes│    │ device        │
    └──────────┘    └──────────┘    └──────────┘    └───────────┘    └──────────────┘    └───────────────┘
    feed/worker     feed/prefetch   Pulled          Submitted        Launched            batch

A batch is *pulled* from the wrapped loader, *submitted* to stages that work on other threads (decoding), *launched* (its copy
and stages are queued on *lanes*, the CUDA streams of the loader), and *handed over*: returned by ``next``. The *consumer* is
the stream of the training step. Without CUDA, all work runs *in line*, on the training thread.
"""

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gpuaug.cache.cached_stages import CachedEpoch
from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import IteratorEndedError, add_note
from gpuaug.core.packed_targets import has_pending_targets, settle_targets, unpack_targets
from gpuaug.core.rng import Position
from gpuaug.core.streams import Event, Lane
from gpuaug.feed.mailbox import Pulled
from gpuaug.feed.prefetch import STOP_S, FeedIterator
from gpuaug.feed.wrapped_loader import add_collate_advice
from gpuaug.loader.branches import Branches
from gpuaug.loader.checkpoint import SavedState
from gpuaug.loader.in_flight import Launched, Submitted
from gpuaug.loader.state import LoaderState
from gpuaug.stages.base import BoundStage


class PipelinedIterator:
    """One iteration of the training loop over a ``StreamedLoader``.

    Args:
        shared: State that the loader's iterators share.
        feed_iterator: Iterator over the wrapped loader.
        bound_stages: Stages, each with its lane (CUDA stream).
        start: Position of the training loop (epoch and batch) before the first batch.
        first_position: Random-number position (seed, epoch, rank, batch index) of the first batch.
        depth: Maximum number of launched batches after ``next`` has returned its batch. May be set between two batches.
        cached: Stages whose results a feature cache stores: the first stages of ``bound_stages``. ``None`` without a cache.
    """

    def __init__(
        self,
        shared: LoaderState,
        feed_iterator: FeedIterator,
        bound_stages: Sequence[BoundStage],
        start: SavedState,
        first_position: Position,
        depth: int,
        cached: CachedEpoch | None,
    ) -> None:
        self._shared = shared
        self._lanes = shared.lanes
        self._copier = shared.device_setup.copier
        self._bound_stages = bound_stages
        self.feed_iterator = feed_iterator
        self.position = first_position
        """Random-number position (seed, epoch, rank, batch index) of the next batch to launch."""
        self._loop_position = start
        """Position of the training loop after the batch that was handed over last, with the wrapped loader's state."""
        self.ended = False
        """Whether no further batch will be pulled: the wrapped loader has ended, or an error was raised."""
        self._state_at_end: Any = None
        """State of the wrapped loader after the last pull, which is the state at its end if the loader has ended."""
        self._iterator_state: dict[str, Any] = {}
        """Objects that stages keep for the duration of this iterator, keyed by the name of the stage or encoder."""
        self._submitted: deque[Submitted] = deque()
        self._max_submitted = max([int(cached is not None), *(stage.max_submitted for stage in bound_stages)])
        """Maximum number of batches that are submitted and not yet launched. With a feature cache at least 1, because rows are
        separated from images when a batch is submitted."""
        self._concurrent = sum(stage.reads_only for stage in bound_stages) > 1
        """Whether stages may run concurrently: whether several only read their inputs.

        On the first batch they run in sequence: a module may create and cache tensors in its first call, and two stages may
        share a module.
        """
        self._is_first_batch = True
        self._cached = cached
        self.launched_batches: deque[Launched] = deque()
        """Batches that have been launched and not handed over, in order."""
        self.depth = depth
        self._process = os.getpid()
        # A finalizer also runs when the interpreter ends, before modules are unloaded.
        self._finalizer = weakref.finalize(
            self, _end_threads, self._process, self._submitted, bound_stages, self._iterator_state
        )

    def without_rows(self, host_batch: Batch) -> Batch:
        """Return a batch with encoded images in place of ``Rows``, the rows of a feature cache, which must not be in use."""
        return host_batch if self._cached is None else self._cached.take(host_batch)[0]

    def check_process(self) -> None:
        """Raise in a forked process, which cannot use CUDA. Call before any CUDA call.

        Raises:
            IteratorEndedError: If this process was forked from the process that began the iterator.
        """
        if os.getpid() != self._process:
            raise IteratorEndedError(
                "This iterator cannot be read here, because this process was forked from the one that began it and has neither "
                "its threads nor its workers. Begin an iterator here: iter(loader)."
            )

    def fill(self, consumer: Lane) -> None:
        """Launch batches until ``depth + 1`` batches are launched, or the wrapped loader has no batch ready.

        May wait for the device (see ``RunAheadLimit``), for another thread's launch and for a stage's Python code. Waits for
        the wrapped loader or the decoder only if no batch is launched, or if damaged images have to be replaced.
        """
        stats = self._shared.stats
        hooks = self._shared.hooks
        hooks.on_next(consumer)
        step_event = consumer.record_event()  # after all work of the training step
        depth = self.depth
        stats.depth = 0 if self._lanes.in_line else depth
        waited_s = self._shared.run_ahead_limit.add(step_event, ahead=depth + 2)
        if waited_s is not None:
            stats.held_back += 1
            stats.held_back_ms += waited_s * 1e3
            hooks.on_hold_back(self._loop_position.batch, waited_s)
        # In line nothing overlaps: launching more than one batch would only delay the next batch.
        max_launched = 1 if self._lanes.in_line else depth + 1
        max_submitted = min(depth, self._max_submitted)
        event_to_wait_for: Event | None = step_event  # only the first action waits
        while (action := self._next_action(max_launched, max_submitted)) is not None:
            self._shared.launch_lock.run(partial(self._run, action, consumer, event_to_wait_for))
            event_to_wait_for = None

    def pop(self, consumer: Lane) -> Batch:
        """Make ``consumer`` wait on the device for the next batch, and return the batch.

        Raises:
            BaseException: The error that occurred in place of the batch.
            DecodeError: If too many samples have been replaced.
        """
        launched = self.launched_batches[0]
        replaced = self._shared.progress.replaced.after(launched.decoded)
        batch_index = self._loop_position.batch
        batch = launched.batch
        if launched.packed:
            if has_pending_targets(batch):  # waits for the device, because the host needs the number of boxes
                assert launched.ready is not None
                batch = self._without_removed_boxes(batch, launched.ready, batch_index)
            batch = unpack_targets(batch)
        self.launched_batches.popleft()
        self.feed_iterator.draws_ahead.num_returned += 1
        if launched.error is not None:
            self.ended = True
            try:
                raise launched.error
            finally:
                del launched  # otherwise a reference cycle through the traceback would keep the error and the batch alive
        assert launched.ready is not None
        stats = self._shared.stats
        hooks = self._shared.hooks
        with hooks.span("gpuaug/wait", batch_index, consumer, waits=True):
            self._lanes.hand_over(launched.ready, consumer)
        # The wrapped loader allocated these tensors on its stream, which must not reuse their memory before they are read.
        for tensor in launched.resident:
            consumer.reads(tensor)
        if launched.source_lane is not None:
            # The batch has objects whose tensors cannot be listed: the stream that wrote them waits for all stages instead.
            launched.source_lane.wait(launched.ready)
        stats.batches += 1
        stats.ready = len(self.launched_batches)
        self._set_position(self._loop_position._replace(batch=batch_index + 1, ended=False, source=launched.state))
        self._shared.progress.replaced = replaced
        self.feed_iterator.refill()
        hooks.on_hand_over(batch_index, consumer)
        return batch

    def _without_removed_boxes(self, batch: Batch, event: Event, batch_index: int) -> Batch:
        """Wait on the host for ``event``, and return the batch without the boxes that stages have removed."""
        with self._shared.hooks.span("gpuaug/wait for boxes", batch_index, waits=True):
            event.synchronize()
        return settle_targets(batch)

    def end(self) -> None:
        """Record that all batches have been handed over and the epoch has ended."""
        self.feed_iterator.draws_ahead.num_returned += 1
        self._set_position(self._loop_position._replace(ended=True, source=self._state_at_end))

    def close(self) -> None:
        """End the iteration over the wrapped loader, and drop batches that were not handed over.

        Raises:
            GpuAugError: If rows of a feature cache could not be written.
        """
        if not self._finalizer.alive:
            return  # closed earlier, or the interpreter is ending: threads have ended, and modules may be unloaded
        if os.getpid() != self._process:
            _iterators_of_parent.append(self)
            return
        self.feed_iterator.close()
        self._finalizer()
        for launched in self.launched_batches:  # lanes may still be reading these batches
            if launched.source_lane is not None and launched.ready is not None:
                launched.source_lane.wait(launched.ready)
        self.launched_batches.clear()
        self._shared.progress.record_close()
        self._shared.reclaim()
        if self._cached is not None:
            self._cached.end(is_complete=self._loop_position.ended)

    def abandon_submitted(self) -> None:
        """End the work of other threads on submitted batches. For these batches, ``next`` raises an error.

        The feed must have been closed. If another thread is launching, waits at most ``STOP_S`` for the end of its launch.
        """

        def abandon() -> None:
            for submitted in self._submitted:
                submitted.error = submitted.error or self.feed_iterator.ended_error()
                submitted.abandon()
            for stage in self._bound_stages:
                stage.close(self._iterator_state)

        if self._max_submitted and self._process == os.getpid():
            self._shared.launch_lock.try_run(abandon, STOP_S)

    def _run(self, action: Callable[[], None], consumer: Lane, step_event: Event | None) -> None:
        """Call ``action``, which makes lanes current, and make ``consumer`` current again.

        Args:
            action: Result of ``_next_action``.
            consumer: The stream that trains.
            step_event: Event after the last training step, for which the copy lane has to wait before the first action of
                ``fill``; ``None`` for later actions.
        """
        if step_event is not None:
            self._shared.feed.free_read_slots()
            self._lanes.wait_for_consumers(consumer, step_event)
        launch_context = self._lanes.launching(consumer)
        try:
            with launch_context:
                action()
        except BaseException:  # after an interrupt, __exit__ may not have run, and a launch may have recorded no event
            launch_context.__exit__(None, None, None)
            self._lanes.wait_for_all_lanes()
            raise

    def _set_position(self, position: SavedState) -> None:
        """Set the position of the training loop, here and in the state of the loader."""
        self._loop_position = position
        self._shared.progress.set_position(position)

    def _add_note(self, error: BaseException, where: str, batch_index: int) -> None:
        """Add the position of the batch to an error, and advice to an error about memory."""
        prefix = f"gpuaug: raised {where}, at batch "
        add_note(error, f"{prefix}{batch_index} of epoch {self.position.epoch}.", replaces=prefix)
        if isinstance(error, torch.OutOfMemoryError):
            depth = 0 if self._lanes.in_line else self.depth
            way_out = "Lower depth, or batch_size of the DataLoader." if depth else "Lower batch_size of the DataLoader."
            at_once = f"{depth + 2} batches are on {self._lanes.device} at once (depth={depth})"
            add_note(error, f"gpuaug: up to {at_once}. {way_out}", replaces="gpuaug: up to ")

    def _next_action(self, max_launched: int, max_submitted: int) -> Callable[[], None] | None:
        """Return the next action, or ``None`` if every remaining action would wait.

        The actions, of which the first possible one is returned:

        1. Launch the oldest submitted batch, if its decoding is done.
        2. Pull and submit a batch, if fewer than ``max_launched + max_submitted`` are launched or submitted.
        3. If no batch is launched, wait for the decoding of the oldest submitted batch and launch it.
        """
        submitted = self._submitted
        if submitted and len(self.launched_batches) < max_launched and submitted[0].done():
            return self._launch_next
        if not self.ended and len(self.launched_batches) + len(submitted) < max_launched + max_submitted:
            pulled = self._pull()
            if pulled is not None and not (pulled.ended and pulled.error is None):  # an error takes the place of a batch
                return partial(self._submit, pulled)
        # The training thread may wait only for the batch that is handed over next.
        return self._launch_next if submitted and not self.launched_batches else None

    def _pull(self) -> Pulled | None:
        """Pull the next batch of the wrapped loader. Return ``None`` if none is ready and a batch is launched or submitted."""
        stats = self._shared.stats
        hooks = self._shared.hooks
        pulled = self.feed_iterator.get(block=False)
        if pulled is None:
            if self.launched_batches or self._submitted:
                return None
            start = time.perf_counter()
            with hooks.span("gpuaug/wait for loader", self.position.batch, waits=True):
                pulled = self.feed_iterator.get(block=True)
            waited_s = time.perf_counter() - start
            stats.starved += 1
            stats.starved_ms += waited_s * 1e3  # no call in this line: during a call another thread could change the counter
            assert pulled is not None
        self.ended = pulled.ended
        self._state_at_end = pulled.state
        return pulled

    def _submit(self, pulled: Pulled) -> None:
        """Add a pulled batch to ``_submitted``, and begin the stages' work on other threads. Without such work, launch it."""
        batch_index = self.position.batch + len(self._submitted)
        self._submitted.append(submitted := Submitted(pulled, error=pulled.error))
        if pulled.error is not None:
            add_collate_advice(pulled.error)
            self._add_note(pulled.error, "by the wrapped loader", batch_index)
        else:
            self._shared.hooks.on_pull(batch_index, *pulled.start_and_end_s)
        if not self._max_submitted:
            self._launch_next()  # no stage works on other threads
        elif pulled.error is None:
            submitted.error = self.feed_iterator.ended_error() or self._begin_stages(submitted, batch_index)

    def _begin_stages(self, submitted: Submitted, batch_index: int) -> Exception | None:
        """Begin the stages' work on other threads, such as decoding. Return the error that a stage raised, or ``None``."""
        self._lanes.reclaim()
        self._lanes.copy.make_current()
        position = self.position._replace(batch=batch_index)
        where = "by the feature cache"
        try:
            if self._cached is not None:
                batch, submitted.cached_batch, submitted.skipped_stages = self._cached.take(submitted.pulled.batch)
                submitted.pulled.batch = batch
            for stage in self._bound_stages[submitted.skipped_stages :]:
                where = f"in stage {stage.name!r}"
                batch, work = stage.submit(submitted.pulled.batch, self._iterator_state, position, self._bound_stages)
                submitted.pulled.batch = batch
                submitted.work += [(stage.name, work)] if work is not None else []
        except Exception as error:
            self._add_note(error, where, batch_index)
            return error
        return None

    def _launch_next(self) -> None:
        """Launch the oldest submitted batch, or store its error."""
        submitted = self._submitted.popleft()
        if submitted.error is None:
            self._launch(submitted)
            self.position = self.position.after()
        else:  # raised by next() in place of this batch, after earlier batches have been handed over
            submitted.abandon()
            self._fail(submitted.error)

    def _fail(self, error: BaseException) -> None:
        """Store ``error``, to be raised by ``pop`` in place of the next batch. Launch no batch after it."""
        self.launched_batches.append(Launched(error=error))
        self.ended = True
        _abandon(self._submitted)

    @contextmanager
    def _decode_wait(self, batch_index: int) -> Iterator[None]:
        """Context manager around a wait of the training thread for the decoding of a batch: counts and traces the wait."""
        stats = self._shared.stats
        start = time.perf_counter()
        try:
            with self._shared.hooks.span("gpuaug/wait for decoding", batch_index, waits=True):
                yield
        finally:
            waited_s = time.perf_counter() - start
            stats.decode_waits += 1
            stats.decode_wait_ms += waited_s * 1e3

    def _launch(self, submitted: Submitted) -> None:
        """Queue the copy and the stages of a batch, and add it to ``launched_batches``. Store an error for ``pop``."""
        pulled = submitted.pulled
        stats = self._shared.stats
        feed = self._shared.feed
        hooks = self._shared.hooks
        batch_index = self.position.batch
        read_by_stages: list[Any] = []
        lane = self._lanes.copy
        current_work = "its copy"  # for the note on an error
        source_lane = None
        end_event = None
        branches = None
        cached_batch = submitted.cached_batch
        try:
            self._lanes.reclaim()
            lane.make_current()
            for name, work in submitted.work:
                current_work = f"stage {name!r}"
                pulled.batch = work.collect(pulled.batch, partial(self._decode_wait, batch_index))
                stats.replaced += len(work.replaced_samples)
                stats.undecoded_pixels += work.undecoded
            current_work = "its copy"
            if cached_batch is not None:
                cached_batch.replaced_samples = [index for _, work in submitted.work for index in work.replaced_samples]
                pulled.batch = cached_batch.with_columns(pulled.batch)
            feed.prepare(pulled)
            if pulled.slot:
                stats.slot_batches += 1
            else:
                stats.other_batches += 1
            with hooks.span("gpuaug/copy", batch_index, lane):
                copied = self._copier.copy(pulled.batch)
            # The wrapped loader wrote resident members, which were on the device before the copy, on its own stream. The
            # tensors of resident objects cannot be listed.
            if copied.resident or copied.has_resident_objects:
                loader_lane = self._lanes.follow(pulled.stream)
                source_lane = loader_lane if copied.has_resident_objects else None
            batch = copied.batch if cached_batch is None else cached_batch.begin(copied.batch)
            ready = lane.record_event()
            feed.free_after(pulled, ready)
            concurrent = self._concurrent and not self._is_first_batch and self._cached is None
            branches = Branches(ready, concurrent=concurrent)
            for stage in self._bound_stages[submitted.skipped_stages :]:
                current_work = f"stage {stage.name!r}"
                # After the encoder of a feature cache, the cache reads the whole batch. Other stages read some members only.
                recorded = cached_batch if cached_batch is not None and stage is cached_batch.encoder else None
                if copied.packed and (has_pending_targets(batch) if recorded is not None else stage.reads_pending(batch)):
                    # An earlier stage has removed boxes, but their rows are still there (*pending*), and this stage reads them.
                    batch = self._without_removed_boxes(batch, lane.record_event(), batch_index)
                values = stage.read(batch)
                read_by_stages.extend(batches.objects_to_keep(values))
                ready = branches.wait(stage, batch, values)
                lane = stage.lane
                with hooks.span(stage.range_name, batch_index, lane):
                    for tensor in copied.resident:
                        lane.reads(tensor)
                    result = stage.run(values, ready, self.position, self._iterator_state)
                    batch = stage.write(batch, result)
                    if recorded is not None:
                        batch = recorded.finish(batch, read_by_stages, lane)
                    branches.record_stage(lane)
                stats.captured += stage.encoder_runs["captured"]
                stats.replayed += stage.encoder_runs["replayed"]
                stats.eager += stage.encoder_runs["eager"]
                stage.encoder_runs.clear()
            ready = branches.join(lane)
            self._is_first_batch = False
            stats.copied_bytes += copied.num_bytes
            end_event = ready
            decoded = [work.decoded for _, work in submitted.work]
            self.launched_batches.append(
                Launched(batch, ready, copied.packed, copied.resident, source_lane, state=pulled.state, decoded=decoded)
            )
        except Exception as error:
            self._add_note(error, f"in {current_work}", batch_index)
            self._fail(error)
        finally:
            if end_event is None:  # after an error or an interrupt, the lane may have work with no event after it
                submitted.abandon()  # otherwise threads could read from the slot after it was freed
                end_event = lane.record_event() if branches is None else branches.join(lane, new_event=True)
                feed.free_after(pulled, end_event)
                if source_lane is not None:
                    source_lane.wait(end_event)
            if read_by_stages:
                self._lanes.retire(read_by_stages, end_event)


_iterators_of_parent: list[PipelinedIterator] = []
"""Iterators of the parent process. Referenced forever, because destroying their events would abort this forked process."""


def _abandon(submitted: deque[Submitted]) -> None:
    """End the work of other threads on the submitted batches, and remove the batches."""
    while submitted:
        submitted.popleft().abandon()


def _end_threads(
    process: int, submitted: deque[Submitted], bound_stages: Sequence[BoundStage], iterator_state: dict[str, Any]
) -> None:
    """End the stages' work on other threads, then end these threads. Not a method: a finalizer must not refer to its object."""
    if os.getpid() != process:
        return  # the threads do not exist in a forked process
    _abandon(submitted)
    for stage in bound_stages:
        stage.close(iterator_state)
