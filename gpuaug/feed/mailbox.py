"""Queue between the thread that pulls batches and the training thread."""

import time
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

QUEUED = 2
"""Largest number of host batches that wait for the training thread, in addition to those in the queue of the workers."""

PAUSE = 0.5
"""Fraction of a training step that the thread pauses before it pulls another batch while one is ready.

Two threads take turns in executing Python. A training step begins with launches from Python (the forward pass). From about its
middle on the training thread waits in C++ for the backward pass, and Python code of the other thread does not delay it.
"""

MAX_PAUSE_S = 0.05
"""Largest pause, in seconds."""


@dataclass(slots=True)
class Pulled:
    """Result of one ``next`` of the wrapped loader: a batch, an error, or the end. See ``loader/in_flight.py``."""

    batch: Any = None
    error: BaseException | None = None
    ended: bool = False
    stream: Any = None
    """Handle of the CUDA stream that was current when the batch was pulled, on which its resident tensors were written."""
    slot: Any = None
    """Slot of the ring that holds the batch's tensors. Keep a reference until they have been read."""
    state: Any = None
    """State of the wrapped loader after this batch, or at the end, if the loader has a state."""
    took_s: tuple[float, float] = (0.0, 0.0)
    """Start and end of the ``next`` call, by ``time.perf_counter``."""


class Mailbox:
    """Bounded queue between the two threads, which either thread can close.

    It consists of two queues that wait in C: one of items, one of permits to put an item. A ``Condition`` would wait in Python
    and hold the interpreter lock.
    """

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._step_s = 0.0
        self._refilled_s = time.perf_counter()
        self._items: SimpleQueue[Pulled] = SimpleQueue()
        self._permits: SimpleQueue[None] = SimpleQueue()
        self._taken = QUEUED
        self._closed = False
        self.refill()

    def wait_for_permit(self, pull_s: float) -> bool:
        """Wait until an item may be put, and pause if another item is ready.

        Args:
            pull_s: Seconds that the last item took to pull.

        Returns:
            ``False`` if the mailbox was closed.
        """
        self._permits.get()
        pause_s = self._pause_s - pull_s
        if pause_s > 0 and not self._items.empty():
            time.sleep(pause_s)
        return not self._closed

    def put(self, item: Pulled) -> None:
        """Add an item. A closed mailbox drops it."""
        self._items.put(item)
        if self._closed:
            self._drain()

    def take(self, *, block: bool) -> Pulled | None:
        """Remove and return the next item; ``None`` if there is none and ``block`` is false."""
        try:
            item = self._items.get(block)
        except Empty:
            return None
        self._taken += 1
        return item

    def refill(self) -> None:
        """Give a permit for each item that was taken. Called when a training step begins."""
        now_s = time.perf_counter()
        step_s = now_s - self._refilled_s
        self._refilled_s = now_s
        # The shorter of two steps counts: after one long step, short steps would use up ready batches during the pause.
        self._pause_s = min(PAUSE * min(step_s, self._step_s), MAX_PAUSE_S)
        self._step_s = step_s
        for _ in range(self._taken):
            self._permits.put(None)
        self._taken = 0

    def close(self) -> None:
        """Drop all items and wake both threads: ``wait_for_permit`` returns ``False``, ``take`` returns the end."""
        self._closed = True
        self._permits.put(None)
        self._drain()

    def _drain(self) -> None:
        """Drop all items. The traceback of an error among them would keep the frame of the thread alive."""
        with suppress(Empty):
            while True:
                self._items.get(block=False)
        self._items.put(Pulled(ended=True))
