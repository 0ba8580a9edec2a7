"""State that the iterators of one loader share, in one thread or in several."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from gpuaug.core import rng
from gpuaug.core.batch import Batch
from gpuaug.core.errors import GpuAugError
from gpuaug.core.streams import Event, Lanes
from gpuaug.feed.feed import Feed
from gpuaug.loader.checkpoint import Progress
from gpuaug.loader.hooks import Hooks
from gpuaug.loader.placement import Placement
from gpuaug.loader.stats import Stats


class LaunchLock:
    """Held by the thread that launches a batch. Not re-entrant."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder: int | None = None

    def run(self, work: Callable[[], object]) -> None:
        """Call ``work`` when no other thread launches.

        Raises:
            GpuAugError: Within this thread's own launch, whose stage has called what leads here.
        """
        if not self.try_run(work, -1):
            raise GpuAugError(
                "A stage cannot read this loader, because it is the loader that runs the stage. "
                "Make a second StreamedLoader for the stage."
            )

    def try_run(self, work: Callable[[], object], timeout_s: float) -> bool:
        """Call ``work`` unless this thread launches, or another does for over ``timeout_s``. Returns whether it was called."""
        # Not a block of ``with``: an interrupt may arrive at the first line of __exit__, which then does not release.
        this = threading.get_ident()
        if self._holder == this:
            return False
        try:
            if not self._lock.acquire(timeout=timeout_s):
                return False
            self._holder = this
            work()
            return True
        finally:
            if self._holder == this:
                self._holder = None
            try:  # noqa: SIM105 - suppress() has an __exit__ in Python, too
                self._lock.release()
            except RuntimeError:  # it was not acquired
                pass


class RunAheadLimit:
    """Holds the host back when it runs too many batches ahead of the consumer's work on the device.

    Without a bound, a host that queues faster than the device works piles up launches and page-locked batches without end.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()

    def keep(self, event: Event, ahead: int) -> float | None:
        """Append the consumer's event. If more than ``ahead`` are stored, wait on the host for the newest one removed.

        Returns:
            Seconds waited, or ``None`` without a wait. The caller counts it: ``torch.cuda.set_sync_debug_mode`` cannot.
        """
        self._events.append(event)
        oldest = None
        while len(self._events) > ahead:  # several, if ``ahead`` has become smaller
            oldest = self._events.popleft()
        if oldest is None or oldest.query():
            return None
        start = time.perf_counter()
        oldest.synchronize()
        return time.perf_counter() - start


@dataclass(slots=True)
class LoaderState:
    """State that the iterators of one loader share."""

    placement: Placement
    feed: Feed
    progress: Progress
    stats: Stats = field(default_factory=Stats)
    run_ahead_limit: RunAheadLimit = field(default_factory=RunAheadLimit)
    hooks: Hooks = field(default_factory=Hooks)
    launching: LaunchLock = field(default_factory=LaunchLock)

    @property
    def lanes(self) -> Lanes:
        """The lanes on the loader's device."""
        return self.placement.lanes

    def reclaim(self) -> None:
        """Drop what batches have left, unless a launch is under way: intermediate tensors, and slots that have been read."""

        def reclaim() -> None:
            self.lanes.reclaim(keep=0)
            self.feed.free_read_slots()

        # An abandoned iterator is closed wherever the garbage collector runs, in the middle of a launch too. The lane of that
        # launch has not waited for the readers of the tensors that would be dropped here.
        self.launching.try_run(reclaim, 0)


class OneThreadIterator(Iterator[Batch]):
    """The batches of a generator, for one thread at a time."""

    def __init__(self, batches: Generator[Batch, None, None]) -> None:
        self._batches = batches
        self.throw = batches.throw

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            GpuAugError: If another call of it has not returned.
        """
        nested = rng.generator_lock.in_a_block
        try:
            return next(self._batches)
        except ValueError as error:
            if _is_of_a_stage(error):
                raise
        except BaseException:
            if not nested:
                rng.generator_lock.recover()
            raise
        raise GpuAugError(
            "next() cannot run, because another call of next() of this iterator has not returned. "
            "Begin an iterator in each thread, iter(loader), or hold a lock around next()."
        )

    def close(self) -> None:
        """End the iteration over the wrapped loader, and drop batches that were not handed over.

        Raises:
            GpuAugError: If a call of ``next`` has not returned.
        """
        try:
            self._batches.close()
            return
        except ValueError as error:
            if _is_of_a_stage(error):
                raise
        raise GpuAugError(
            "close() cannot run, because a call of next() of this iterator has not returned. "
            "Call loader.close(), which any thread may."
        )


def _is_of_a_stage(error: ValueError) -> bool:
    """Whether a stage raised the error, and not the generator because another call of it is running."""
    return error.__traceback__ is None or error.__traceback__.tb_next is not None
