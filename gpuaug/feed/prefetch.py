"""A thread that pulls batches from the wrapped loader, so that a batch that is ready never waits for a slow one.

``iter(loader)`` is called on the consumer's thread, because it starts workers and draws their seed from the global generator.
The thread then only calls ``next``; it makes no CUDA calls of its own, so graphs that the user captures survive it.

The two threads share one interpreter. A training thread that launches kernels lets go of it at every launch, so what the other
thread does in Python is time that training loses: it does as little as it can, and its queues wait in C.
"""

import contextvars
import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from gpuaug.core.errors import IteratorEndedError
from gpuaug.core.settings import default_device
from gpuaug.feed.mailbox import Mailbox, Pulled
from gpuaug.feed.wrapped_loader import Begin, StateReader, begin_epoch, end_workers, has_persistent_workers, state_reader, wake

STOP_S = 7.0
"""Seconds that leaving a loop waits for a loader inside ``next``."""

WAKE_S = 0.05
"""Seconds between attempts to wake a loader inside ``next``."""

_TAKEN_OVER = (
    "This iterator ended, because a newer one took over its persistent workers. "
    "Finish the first loop before starting the next, or pass persistent_workers=False to the DataLoader."
)
_CLOSED = "This iterator ended, because its loader was closed or given a state. Begin a new one: iter(loader)."

Receive = Callable[[Any], tuple[Any, Any]]

_log = logging.getLogger("gpuaug")


class FeedIterator(ABC):
    """One iteration over the wrapped loader, a *pass*."""

    def __init__(
        self,
        loader: Iterable[Any],
        iterator: Iterator[Any],
        current_stream: Callable[[], Any],
        state: StateReader | None = None,
    ) -> None:
        self.loader = loader
        self.iterator = iterator
        self._current_stream = current_stream
        self._state = state or state_reader(loader, iterator)
        self._why_ended: str | None = None
        self.state_at_start: Any = self._state(False)
        """The loader's state before the first batch, if it has one."""

    def get(self, *, block: bool) -> Pulled | None:
        """The next batch, error or end, in order; ``None`` if there is none yet and ``block`` is false.

        Raises:
            IteratorEndedError: If the loader was closed, or a newer iterator has taken its workers over.
        """
        pulled = self._get(block) if self._why_ended is None else None
        if (error := self.ended_error()) is not None:  # another thread may have closed it meanwhile
            raise error
        return pulled

    def ended_error(self) -> IteratorEndedError | None:
        """The error of a batch that is asked for after this iteration was ended, or ``None`` while it goes on."""
        return IteratorEndedError(self._why_ended) if self._why_ended is not None else None

    @property
    def is_open(self) -> bool:
        """Whether it can still be read."""
        return self._why_ended is None

    def refill(self) -> None:
        """Let the thread pull as many batches as were taken. Called when a batch is handed over, not before.

        Pulling competes for the interpreter with the launches that the batch needs.
        """

    def take_over(self) -> None:
        """End this iteration because a newer one reads the same iterator."""
        self._why_ended = _TAKEN_OVER

    def close(self) -> None:
        """Drop the loader's iterator, and its workers with it. Idempotent."""
        self._why_ended = self._why_ended or _CLOSED
        self.loader = self.iterator = iter(())

    @abstractmethod
    def _get(self, block: bool) -> Pulled | None: ...


class ListFeedIterator(FeedIterator):
    """One pass over a list or tuple, read on the training thread."""

    def _get(self, block: bool) -> Pulled | None:
        began_s = time.perf_counter()
        for batch in self.iterator:
            took_s = began_s, time.perf_counter()
            return Pulled(batch, stream=self._current_stream(), state=self._state(False), took_s=took_s)
        return Pulled(ended=True, state=self._state(True))


class ThreadFeedIterator(FeedIterator):
    """One pass over any other loader, pulled by a background thread."""

    def __init__(
        self,
        loader: Iterable[Any],
        iterator: Iterator[Any],
        current_stream: Callable[[], Any],
        state: StateReader | None = None,
        receive: Receive | None = None,
    ) -> None:
        super().__init__(loader, iterator, current_stream, state)
        self._process = os.getpid()
        self._box = Mailbox()
        pull = _pulling(iterator, self._state, current_stream, receive or _as_it_is)
        target = _puller(_ThreadState(), pull, self._box)
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(target,), name="gpuaug-feed", daemon=True)
        # Also runs when the interpreter ends, before it takes the modules away from under the thread.
        self._stop = weakref.finalize(self, _stop, self._box, self._thread, iterator)
        self.gone = threading.Event()
        """Set when the thread and the workers have ended."""
        _open.add(self)  # before the thread reads: close_passes must find it
        self._thread.start()

    def take_over(self) -> None:
        """End this iteration because a newer one takes its workers. Waits until the loader returns from ``next``."""
        super().take_over()
        self._box.close()
        self._thread.join()  # a loader must not be reset while it is being read

    def close(self) -> None:
        """End the thread and drop the loader's iterator, and its workers with it. Idempotent."""
        if self._process != os.getpid():
            return  # thread and workers belong to the parent process
        loader = self.loader
        iterator = self.iterator
        super().close()
        self._stop()
        if not self._thread.is_alive():
            if not has_persistent_workers(loader):
                end_workers(iterator)
            self.gone.set()

    def refill(self) -> None:
        """Let the thread pull as many batches as were taken."""
        self._box.refill()

    def _get(self, block: bool) -> Pulled | None:
        return self._box.take(block=block)


def open_feed_iterator(
    loader: Iterable[Any],
    current_stream: Callable[[], Any],
    receive: Receive | None = None,
    begin: Begin = begin_epoch,
) -> FeedIterator:
    """Begin a pass over ``loader``.

    Where ``iter`` gives the same object again, only one pass can read it: a generator, or a ``DataLoader`` whose workers
    persist. The newer one does, as in ``DataLoader`` itself, and the older is ended before it could read beside it.

    Args:
        loader: Any iterable of host batches.
        current_stream: Says which stream is current on the thread that calls it.
        receive: What is done to each batch as it arrives, on the thread that pulls: the batch to go on with, and its slot.
        begin: Calls ``iter(loader)``, and gives what reads the state besides.

    Raises:
        Exception: Whatever ``begin`` raises.
    """
    if has_persistent_workers(loader):
        _take_over(feed for feed in _open if feed.loader is loader)
    iterator, state = begin(loader)
    _take_over(feed for feed in _open if feed.iterator is iterator)
    if type(loader) in {list, tuple}:
        return ListFeedIterator(loader, iterator, current_stream, state)
    return ThreadFeedIterator(loader, iterator, current_stream, state, receive)


def close_passes(loader: Any) -> None:
    """End all passes over ``loader``, whose workers are about to end: its ``next`` would not return any more."""
    for feed in list(_open):
        if feed.loader is loader:
            feed.close()


_open: weakref.WeakSet[FeedIterator] = weakref.WeakSet()
"""Passes with a thread, of all loaders in this process: two of them may wrap one ``DataLoader``."""


def _take_over(feeds: Iterable[FeedIterator]) -> None:
    for feed in list(feeds):
        feed.take_over()


class _ThreadState:
    """PyTorch's per-thread settings, copied from the thread that makes this object."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")}
        self._default_device = default_device()
        self._cuda_device = torch.cuda.current_device() if torch.cuda.is_initialized() else 0

    def adopt(self) -> None:
        """Apply the settings to the calling thread, permanently."""
        torch.set_grad_enabled(self._grad)
        for kind, (enabled, dtype) in self._autocast.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        if self._default_device != default_device():
            torch.set_default_device(self._default_device)
        if self._cuda_device:
            torch.cuda.set_device(self._cuda_device)  # sources that use CUDA themselves expect the consumer's device

    def inference_mode(self) -> Any:
        return torch.inference_mode(self._inference)


def _as_it_is(batch: Any) -> tuple[Any, None]:
    return batch, None


# Closures over the parts, not methods: a thread that held the feed would keep it from ever being collected.


def _pulling(
    iterator: Iterator[Any], state: StateReader, current_stream: Callable[[], Any], receive: Receive
) -> Callable[[], Pulled]:
    def pull() -> Pulled:
        began_s = time.perf_counter()
        try:
            given = next(iterator)
        except StopIteration:
            return Pulled(ended=True, state=state(True))
        reached = state(False)
        batch, slot = receive(given)
        took_s = began_s, time.perf_counter()
        return Pulled(batch, stream=current_stream(), slot=slot, state=reached, took_s=took_s)

    return pull


def _puller(settings: _ThreadState, pull: Callable[[], Pulled], box: Mailbox) -> Callable[[], None]:
    def run() -> None:
        with settings.inference_mode():
            settings.adopt()  # within, because entering a block of inference mode sets the grad mode too
            ended = False
            pull_s = 0.0
            while not ended and box.wait_for_place(pull_s):
                try:
                    item = pull()
                except BaseException as error:  # raised on the training thread, by next()
                    item = Pulled(error=error, ended=True)
                ended = item.ended
                pull_s = item.took_s[1] - item.took_s[0]
                box.put(item)
                del item  # or the thread would hold a batch while it waits for the next place

    return run


def _stop(box: Mailbox, thread: threading.Thread, iterator: Iterator[Any]) -> None:
    box.close()
    tries = 0 if thread is threading.current_thread() else int(STOP_S / WAKE_S) + 1  # it may collect itself
    for _ in range(tries):
        if thread.is_alive():
            wake(iterator)
            thread.join(WAKE_S)
    if tries and thread.is_alive():
        _log.warning("The loader is still inside next() after %.0f s. Its thread ends when that returns.", STOP_S)
