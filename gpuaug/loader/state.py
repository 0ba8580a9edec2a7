"""State that the iterators of one loader share, on one thread or several."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

import torch

from gpuaug.core import rng
from gpuaug.core.batch import Batch
from gpuaug.core.errors import GpuAugError
from gpuaug.core.streams import Event, Lanes
from gpuaug.feed.feed import Feed
from gpuaug.loader.checkpoint import Progress
from gpuaug.loader.device_setup import DeviceSetup
from gpuaug.loader.hooks import Hooks
from gpuaug.loader.stats import Stats


class LaunchLock:
    """Lock that a thread holds while it launches a batch. Not re-entrant."""

    def __init__(self) -> None:
        # Not a Lock: ``release`` of an RLock raises an error, and does nothing, if this thread does not hold it.
        self._lock = threading.RLock()
        self._holder: int | None = None

    def run(self, work: Callable[[], object]) -> None:
        """Call ``work`` when no other thread launches.

        Raises:
            GpuAugError: If this thread is launching: a stage iterates the loader to which the stage belongs.
        """
        if not self.try_run(work, -1):
            raise GpuAugError(
                "A stage cannot read this loader, because it is the loader that runs the stage. "
                "Make a second StreamedLoader for the stage."
            )

    def try_run(self, work: Callable[[], object], timeout_s: float) -> bool:
        """Call ``work``, unless this thread is launching, or another thread's launch does not end within ``timeout_s``.

        ``timeout_s``: seconds; 0 to return at once, -1 to wait without a limit.

        Returns:
            Whether ``work`` was called.
        """
        # Not ``with self._lock``: an interrupt at the first line of its __exit__ would leave the lock held.
        this_thread = threading.get_ident()
        if self._holder == this_thread:
            return False
        try:
            if not self._lock.acquire(timeout=timeout_s):
                return False
            self._holder = this_thread
            work()
            return True
        finally:
            if self._holder == this_thread:
                self._holder = None
            try:  # noqa: SIM105 - an interrupt could arrive in the __exit__ of suppress(), too
                self._lock.release()
            except RuntimeError:  # the lock was not acquired
                pass


class RunAheadLimit:
    """Limit of the number of training steps that are queued on the device and not finished.

    Without the limit, a host that is faster than the device would queue launches and fill page-locked memory without bound.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()

    def add(self, event: Event, ahead: int) -> float | None:
        """Append an event that was recorded after a training step, and wait if more than ``ahead`` events are then stored.

        The oldest events are removed until ``ahead`` remain. The wait is for the last event that was removed.

        Returns:
            Seconds waited, or ``None`` without a wait. The caller counts the waits, because
            ``torch.cuda.set_sync_debug_mode`` does not detect them.
        """
        self._events.append(event)
        oldest = None  # last event that was removed
        while len(self._events) > ahead:  # more than once if ``ahead`` has become smaller
            oldest = self._events.popleft()
        if oldest is None or oldest.query():
            return None
        start = time.perf_counter()
        oldest.synchronize()
        return time.perf_counter() - start


@dataclass(slots=True)
class LoaderState:
    """State that the iterators of one loader share."""

    device_setup: DeviceSetup
    feed: Feed
    progress: Progress
    stats: Stats = field(default_factory=Stats)
    run_ahead_limit: RunAheadLimit = field(default_factory=RunAheadLimit)
    hooks: Hooks = field(default_factory=Hooks)
    launch_lock: LaunchLock = field(default_factory=LaunchLock)

    @property
    def lanes(self) -> Lanes:
        """Lanes on the loader's device."""
        return self.device_setup.lanes

    def reclaim(self) -> None:
        """Drop intermediate tensors of stages, and free slots (page-locked memory) that have been read.

        Does nothing while a thread is launching: when the garbage collector closes an abandoned iterator in the middle of a
        launch, the lane of the launch may not have waited yet for the last readers of the tensors.
        """

        def free() -> None:
            self.lanes.reclaim(keep=0)
            self.feed.free_read_slots()

        self.launch_lock.try_run(free, 0)


class OneThreadIterator(Iterator[Batch]):
    """Iterator over the batches of a generator. ``next`` raises an error while another call of ``next`` is running."""

    def __init__(self, batches: Generator[Batch, None, None]) -> None:
        self._batches = batches
        # Generators have this method, too: it raises an error inside the iteration.
        self.throw = batches.throw

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            GpuAugError: If another call of ``next`` has not returned.
        """
        is_in_stage = rng.generator_lock.in_context
        computes_gradients = torch.is_grad_enabled()
        try:
            return next(self._batches)
        except BaseException as error:
            if _is_running(error):
                raise GpuAugError(
                    "next() cannot run, because another call of next() of this iterator has not returned. "
                    "Begin an iterator in each thread, iter(loader), or hold a lock around next()."
                ) from None
            # An interrupt may have left contexts of the generators of random numbers open. A thread within a stage still uses
            # the context of the stage, which the iterator that runs the stage exits.
            if not is_in_stage:
                rng.generator_lock.recover()
            # After an interrupt within torch.no_grad(), its __exit__ may not have run.
            torch.set_grad_enabled(computes_gradients)
            raise

    def close(self) -> None:
        """End the iteration over the wrapped loader, and drop batches that were not handed over.

        Raises:
            GpuAugError: If a call of ``next`` has not returned.
        """
        try:
            self._batches.close()
        except ValueError as error:
            if _is_running(error):
                raise GpuAugError(
                    "close() cannot run, because a call of next() of this iterator has not returned. "
                    "Call loader.close(), which any thread may."
                ) from None
            raise


def _is_running(error: BaseException) -> bool:
    """Return whether Python, not a stage, raised the error, because another call of the generator is running.

    Python raises this error before the generator runs, so the traceback has the caller's frame only.
    """
    return isinstance(error, ValueError) and error.__traceback__ is not None and error.__traceback__.tb_next is None
