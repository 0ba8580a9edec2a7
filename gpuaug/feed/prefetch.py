"""Iterations over the wrapped loader. A background thread *pulls* batches: calls ``next`` of the loader's iterator.

So a ready batch is handed over while the loader is still loading the next batch. ``iter(loader)`` is called on the training
thread, because it starts workers and draws their seed from the global generator. The pulling thread only calls ``next``, and
makes no CUDA calls, so it does not break the user's graph captures.

The two threads share the interpreter's lock. The training thread releases the lock at every launch of a kernel, and Python code
of the pulling thread then delays the training thread. Therefore the pulling thread executes little Python code, and its queues
wait in C.
"""

import atexit
import contextvars
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from gpuaug.core.errors import IteratorEndedError
from gpuaug.core.settings import default_device
from gpuaug.feed.draws_ahead import DrawsAhead
from gpuaug.feed.mailbox import Mailbox, Pulled
from gpuaug.feed.worker import add_opened_file
from gpuaug.feed.wrapped_loader import (
    BeginFunction,
    StateReader,
    begin_after,
    end_workers,
    has_persistent_workers,
    inner_iterator,
    release_error,
    wake,
)

STOP_S = 7.0
"""Maximum seconds to wait for the end of the wrapped loader's ``next`` when a loop ends early."""

WAKE_S = 0.05
"""Seconds between attempts to make the wrapped loader's ``next`` return."""

_WORKERS_TAKEN_OVER = (
    "This iterator ended, because a newer one took over its persistent workers. "
    "Finish the first loop before starting the next, or pass persistent_workers=False to the DataLoader."
)
_SOURCE_TAKEN_OVER = (
    "This iterator ended, because a newer one reads the same source: iter() of the wrapped loader returns the same iterator "
    "every time. Finish the first loop before starting the next, or give each loop a StreamedLoader of a separate source."
)
_CLOSED = "This iterator ended, because its loader was closed or loaded a state. Begin a new one: iter(loader)."

Receive = Callable[[Any], tuple[Any, Any]]
"""Function that converts an object from the wrapped loader to (batch, slots), see ``Pulled.slot``."""

_log = logging.getLogger("gpuaug")


class FeedIterator:
    """One iteration over a list or tuple, which the training thread reads. Base class of ``ThreadFeedIterator``.

    Args:
        loader: The wrapped loader.
        iterator: Result of ``iter(loader)``.
        pull: Function that calls ``next(iterator)`` and returns the result.
        state_at_start: State of the wrapped loader before the first batch; ``None`` if only its ``state_dict`` returns it.
    """

    def __init__(self, loader: Iterable[Any], iterator: Iterator[Any], pull: Callable[[], Pulled], state_at_start: Any) -> None:
        self.loader = loader
        self.iterator = iterator
        self._pull = pull
        self.state_at_start = state_at_start
        self.end_message: str | None = None
        """Message of the error for the next batch if this iteration was closed or taken over; ``None`` while it is open."""
        self.draws_ahead = DrawsAhead()
        """Draws of the wrapped loader's sampler. No draws if the feed does not read the sampler."""

    def get(self, *, block: bool) -> Pulled | None:
        """Return the next batch, error or end, in order; ``None`` if it is not ready and ``block`` is false.

        Raises:
            IteratorEndedError: If the loader was closed, or a newer iterator has taken over its workers.
        """
        pulled = self._get(block) if self.end_message is None else None
        # After _get(), during which another thread may close the iteration. The error is in no variable: a reference cycle
        # through the traceback would keep the loader's iterator alive.
        if self.end_message is not None:
            raise self.ended_error()  # type: ignore[misc] # not None
        return pulled

    def ended_error(self) -> IteratorEndedError | None:
        """Error to raise for the next batch if this iteration was closed or taken over; else ``None``."""
        return IteratorEndedError(self.end_message) if self.end_message is not None else None

    def refill(self) -> None:
        """Let the background thread, if there is one, pull one batch for each batch that ``get`` has returned.

        Call after the batches have been launched: pulling competes with launches for the interpreter's lock.
        """

    def end_for_newer(self) -> None:
        """End this iteration because a newer one reads the same iterator."""
        self.end_message = _WORKERS_TAKEN_OVER if has_persistent_workers(self.loader) else _SOURCE_TAKEN_OVER

    def close(self) -> None:
        """Drop the wrapped loader's iterator, which ends its workers. Idempotent."""
        self.end_message = self.end_message or _CLOSED
        self.loader = self.iterator = iter(())  # drops the references to the user's objects
        self._pull = partial(Pulled, ended=True)  # the previous function holds the iterator

    def _get(self, block: bool) -> Pulled | None:
        """Return the next batch, error or end; ``None`` if it is not ready and ``block`` is false."""
        return self._pull()


class ThreadFeedIterator(FeedIterator):
    """One iteration over a loader that is not a list or tuple, which a background thread reads."""

    def __init__(self, loader: Iterable[Any], iterator: Iterator[Any], pull: Callable[[], Pulled], state_at_start: Any) -> None:
        super().__init__(loader, iterator, pull, state_at_start)
        self._process = os.getpid()
        self._mailbox = Mailbox()
        target = _make_thread_target(self._pull, self._mailbox)
        self.thread = threading.Thread(target=contextvars.copy_context().run, args=(target,), name="gpuaug-feed", daemon=True)
        self._stop = weakref.finalize(self, _stop, self._mailbox, self.thread, iterator)
        _open.add(self)  # before the thread reads, so that iterations_of finds this iteration
        self.thread.start()

    def end_for_newer(self) -> None:
        """End this iteration because a newer one reads the same iterator. Waits until the loader's ``next`` returns."""
        super().end_for_newer()
        self.draws_ahead.stop()
        self._mailbox.close()
        self.thread.join()  # the newer iteration resets the loader's iterator, which must not be read meanwhile
        self.draws_ahead.undo()

    def close(self) -> None:
        """End the thread and drop the wrapped loader's iterator, which ends its workers. Idempotent."""
        if self._process != os.getpid():
            return  # thread and workers belong to the parent process
        loader, iterator = self.loader, self.iterator
        super().close()
        self.draws_ahead.stop()
        self._stop()
        if not self.thread.is_alive():
            self.draws_ahead.undo()
            if not has_persistent_workers(loader):
                end_workers(iterator)

    def refill(self) -> None:
        """Let the thread pull one batch for each batch that ``get`` has returned."""
        self._mailbox.refill()

    def _get(self, block: bool) -> Pulled | None:
        return self._mailbox.take(block=block)


def open_feed_iterator(
    loader: Iterable[Any],
    current_stream: Callable[[], Any],
    receive: Receive | None = None,
    begin: BeginFunction = begin_after,
) -> FeedIterator:
    """Begin an iteration over ``loader``.

    For a generator or a ``DataLoader`` with persistent workers, ``iter`` returns the same iterator every time. Only one
    iteration can read this iterator: as in ``DataLoader`` itself, a newer iteration takes it over, and the older one ends.

    Args:
        loader: Any iterable of host batches.
        current_stream: Function that returns the handle of the calling thread's current stream.
        receive: Function that is called on the pulling thread with each object from the loader, and returns (batch, slots).
        begin: Function that calls ``iter(loader)``, and returns the iterator and a function that reads the loader's state.

    Raises:
        Exception: Any error of ``begin``.
    """
    if has_persistent_workers(loader):
        _end_for_newer(getattr(loader, "_iterator", None))
    iterator, read_state = begin(loader)
    _end_for_newer(iterator)  # a generator returns itself from iter()
    iterator_type = FeedIterator if type(loader) in {list, tuple} else ThreadFeedIterator
    return iterator_type(loader, iterator, make_pull(iterator, read_state, current_stream, receive), read_state(None))


def iterations_of(iterator: Any) -> list["FeedIterator"]:
    """Return the open iterations that read ``iterator``."""
    return [iteration for iteration in list(_open) if inner_iterator(iteration.iterator) is inner_iterator(iterator)]


_open: weakref.WeakSet[ThreadFeedIterator] = weakref.WeakSet()
"""Iterations with a thread, of all loaders in this process: two loaders may wrap the same ``DataLoader``."""


@atexit.register
def _stop_threads() -> None:
    """Stop the threads of all iterations when the interpreter ends, before ``weakref.finalize`` runs its finalisers.

    A thread creates a finaliser per batch that it receives from a ring. If the number of finalisers changed while ``finalize``
    lists them, it would raise an error and run none of them.
    """
    for iteration in list(_open):
        iteration._stop()


def _end_for_newer(iterator: Any) -> None:
    """End the iterations that read ``iterator``, because a newer iteration takes it over."""
    for iteration in iterations_of(iterator):
        iteration.end_for_newer()


def make_pull(
    iterator: Iterator[Any], read_state: StateReader, current_stream: Callable[[], Any], receive: Receive | None = None
) -> Callable[[], Pulled]:
    """Return a function that calls ``next(iterator)`` and returns the result. For ``receive`` see ``open_feed_iterator``."""

    def pull() -> Pulled:
        began_s = time.perf_counter()
        try:
            loader_output = next(iterator)
        except StopIteration:
            return Pulled(ended=True, state=read_state(True))
        except RuntimeError as error:
            add_opened_file(error, iterator)
            raise
        state = read_state(False)
        batch, slot = (loader_output, None) if receive is None else receive(loader_output)
        return Pulled(batch, stream=current_stream(), slot=slot, state=state, start_and_end_s=(began_s, time.perf_counter()))

    return pull


def _make_thread_target(pull: Callable[[], Pulled], mailbox: Mailbox) -> Callable[[], None]:
    """Return the function that the thread runs: it pulls batches into ``mailbox`` until the end, or until ``close``.

    The thread gets the per-thread settings of PyTorch that the calling thread has.
    """
    grad = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()
    autocasts = [(name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in ("cpu", "cuda")]
    device = default_device()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else 0

    def run() -> None:
        with torch.inference_mode(inference):
            torch.set_grad_enabled(grad)  # after entering inference mode, which changes the grad mode
            for name, is_enabled, dtype in autocasts:
                torch.set_autocast_enabled(name, is_enabled)
                torch.set_autocast_dtype(name, dtype)
            if device != default_device():
                torch.set_default_device(device)
            if gpu:
                torch.cuda.set_device(gpu)  # loaders that use CUDA expect the device of the training thread
            ended = False
            pull_s = 0.0
            while not ended and mailbox.wait_for_permit(pull_s):
                try:
                    item = pull()
                except BaseException as error:  # raised on the training thread, by next()
                    release_error(error)
                    item = Pulled(error=error, ended=True)
                ended = item.ended
                pull_s = item.start_and_end_s[1] - item.start_and_end_s[0]
                mailbox.put(item)
                del item  # otherwise the variable would keep a batch alive during the wait for the next permit

    return run


def _stop(mailbox: Mailbox, thread: threading.Thread, iterator: Iterator[Any]) -> None:
    """End the pulling thread. Waits at most ``STOP_S`` for the end of the wrapped loader's ``next``."""
    mailbox.close()
    # The garbage collector may call this function on the pulling thread, which cannot join itself.
    attempts = 0 if thread is threading.current_thread() else int(STOP_S / WAKE_S) + 1
    for _ in range(attempts):
        if thread.is_alive():
            wake(iterator)  # lets a waiting next() of a DataLoader return
            thread.join(WAKE_S)
    if attempts and thread.is_alive():
        _log.warning("The wrapped loader is still inside next() after %.0f s. Its thread ends when next() returns.", STOP_S)
