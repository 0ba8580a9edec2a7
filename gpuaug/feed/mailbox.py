"""The queue between the thread that pulls batches and the training thread."""

import time
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

QUEUED = 2
"""Most host batches that wait for the training thread. Workers of the loader have a queue of their own."""

PAUSE = 0.5
"""Share of a training step that the thread waits before it pulls while another batch is ready.

Python of two threads takes turns. A step begins with launches from Python (the forward pass); from about its middle on the
training thread waits in C++ for the backward pass, and the other thread's Python costs it nothing.
"""

MOST_PAUSE_S = 0.05
"""Most seconds of such a wait."""


@dataclass(slots=True)
class Pulled:
    """Result of one ``next`` of the wrapped loader: a batch, an error, or the end. ``loader/in_flight.py``: what follows."""

    batch: Any = None
    error: BaseException | None = None
    ended: bool = False
    stream: Any = None
    """The CUDA stream that was current when the batch was pulled, where its resident tensors were written."""
    slot: Any = None
    """The ring's slot that holds the batch's tensors. Keep it until they have been read."""
    state: Any = None
    """The loader's state after this batch, or at the end, if it has one."""
    took_s: tuple[float, float] = (0.0, 0.0)
    """Start and end of pulling, by ``time.perf_counter``."""


class Mailbox:
    """A bounded queue between the two threads, which either side can close.

    Two queues that wait in C: one of items, one of free places. A ``Condition`` would wait in Python and hold the interpreter.
    """

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._step_s = 0.0
        self._refilled_s = time.perf_counter()
        self._items: SimpleQueue[Pulled] = SimpleQueue()
        self._places: SimpleQueue[None] = SimpleQueue()
        self._taken = QUEUED
        self._closed = False
        self.refill()

    def wait_for_place(self, pull_s: float) -> bool:
        """Wait until an item may be put, and a pause if one is ready. False when the mailbox was closed meanwhile.

        Args:
            pull_s: Seconds that the last item took to pull.
        """
        self._places.get()
        pause_s = self._pause_s - pull_s
        if pause_s > 0 and not self._items.empty():
            time.sleep(pause_s)
        return not self._closed

    def put(self, item: Pulled) -> None:
        """Add an item. A mailbox that was closed drops it."""
        self._items.put(item)
        if self._closed:
            self._drain()

    def take(self, *, block: bool) -> Pulled | None:
        """The next item; ``None`` if there is none and ``block`` is false."""
        try:
            item = self._items.get(block)
        except Empty:
            return None
        self._taken += 1
        return item

    def refill(self) -> None:
        """Free the places of items that were taken, as a step begins."""
        now_s = time.perf_counter()
        step_s = now_s - self._refilled_s
        self._refilled_s = now_s
        # Of the shorter of two steps: behind a validation, short steps would take what is ready while the thread still waits.
        self._pause_s = min(PAUSE * min(step_s, self._step_s), MOST_PAUSE_S)
        self._step_s = step_s
        for _ in range(self._taken):
            self._places.put(None)
        self._taken = 0

    def close(self) -> None:
        """Drop all items, and let both threads go on: one without a place, one with the end."""
        self._closed = True
        self._places.put(None)
        self._drain()

    def _drain(self) -> None:
        """Drop batches that will not be taken, and an error whose traceback would keep the thread's frame alive."""
        with suppress(Empty):
            while True:
                self._items.get(block=False)
        self._items.put(Pulled(ended=True))
