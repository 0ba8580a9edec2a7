"""Queue between the thread that pulls batches and the training thread."""

import time
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

QUEUED = 2
"""Maximum number of host batches that wait for the training thread, in addition to the batches in the queue of the workers."""

PAUSE = 0.5
"""Fraction of a training step for which the pulling thread pauses, while another batch is ready, before it pulls a batch.

Only one thread executes Python at a time. A training step begins with launches from Python (the forward pass). From about the
middle of the step, the training thread waits in C++ for the backward pass, and is not delayed by Python code of another thread.
"""

MAX_PAUSE_S = 0.05
"""Maximum pause in seconds."""


@dataclass(slots=True)
class Pulled:
    """Result of one ``next`` of the wrapped loader: a batch, an error, or the end."""

    batch: Any = None
    """Host batch; ``None`` for an error or the end."""
    error: BaseException | None = None
    """Error that ``next`` raised, to be raised on the training thread."""
    ended: bool = False
    """Whether no further result follows."""
    stream: Any = None
    """Handle of the CUDA stream that was current when the batch was pulled.

    Tensors of the batch that are on the GPU were written on this stream.
    """
    slot: Any = None
    """``Slot`` (part of shared memory) that holds the batch's tensors, or ``None``.

    Keep a reference to the slot until the tensors have been read.
    """
    state: Any = None
    """State of the wrapped loader after this batch, or at the end; ``None`` if the loader has no state."""
    took_s: tuple[float, float] = (0.0, 0.0)
    """Start and end of the ``next`` call, by ``time.perf_counter``."""


class Mailbox:
    """Bounded queue between the pulling thread and the training thread. Either thread can close it.

    It consists of two queues that wait in C: a queue of items, and a queue of permits to put an item. A ``Condition`` would
    wait in Python, and hold the interpreter's lock.
    """

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._step_s = 0.0
        self._refilled_s = time.perf_counter()
        self._items: SimpleQueue[Pulled] = SimpleQueue()
        self._permits: SimpleQueue[None] = SimpleQueue()
        self._missing_permits = QUEUED
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
        self._missing_permits += 1
        return item

    def refill(self) -> None:
        """Add a permit for each item that was taken. Called when a training step begins."""
        now_s = time.perf_counter()
        step_s = now_s - self._refilled_s
        self._refilled_s = now_s
        # The shorter of the last two steps decides: a pause for one long step would outlast the ready batches of short steps.
        self._pause_s = min(PAUSE * min(step_s, self._step_s), MAX_PAUSE_S)
        self._step_s = step_s
        for _ in range(self._missing_permits):
            self._permits.put(None)
        self._missing_permits = 0

    def close(self) -> None:
        """Drop all items and wake both threads: ``wait_for_permit`` returns ``False``, ``take`` returns the end."""
        self._closed = True
        self._permits.put(None)
        self._drain()

    def _drain(self) -> None:
        """Drop all items, and add the end.

        An error among the items would keep the pulling thread's frame alive by its traceback.
        """
        with suppress(Empty):
            while True:
                self._items.get(block=False)
        self._items.put(Pulled(ended=True))
