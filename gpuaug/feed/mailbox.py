"""Queue between the *pulling* thread, which reads the wrapped loader, and the training thread."""

import time
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

QUEUED = 2
"""Capacity of the queue: number of batches that may wait for the training thread. The workers' queue holds further batches."""

PAUSE = 0.5
"""Pause of the pulling thread before it pulls a batch, as a fraction of a training step. Only if another batch is ready.

Only one thread executes Python at a time. A training step begins with launches from Python (the forward pass). From about the
middle of the step, the training thread waits in C++ for the backward pass. Python code of another thread then causes no delay.
With 7 ms of small operations and 6 ms of such a wait per step, a loop over batches of one worker took 26 ms per step without
pauses and 20 ms with pauses (measured once, on two busy cores without a GPU, 2026-11-29).
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
    """Whether the iteration ends with this result."""
    stream: Any = None
    """Handle of the CUDA stream on which the loader has written tensors of the batch that are on the GPU."""
    slot: Any = None
    """``Slots`` of the ring (shared, page-locked memory) to keep in use until the batch was copied. Deleting the object frees
    the slots. ``None`` without a ring; false if no tensor of the batch is known to be in a slot."""
    state: Any = None
    """State of the wrapped loader after this batch, or at the end; ``None`` if the loader has no state."""
    start_and_end_s: tuple[float, float] = (0.0, 0.0)
    """Start and end of the ``next`` call, by ``time.perf_counter``."""


class Mailbox:
    """Bounded queue between the pulling thread and the training thread. Either thread can close it.

    A mailbox has a queue of items, and a queue of permits to put an item. Both are a ``SimpleQueue``, which waits in C. A
    ``Condition`` would run Python code before and after each wait, for which it needs the interpreter's lock.
    """

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._step_s = 0.0
        """Duration of the last training step: time between the last two calls of ``refill``."""
        self._refilled_s = time.perf_counter()
        self._items: SimpleQueue[Pulled] = SimpleQueue()
        self._permits: SimpleQueue[None] = SimpleQueue()
        self._missing_permits = QUEUED
        """Number of permits that the next ``refill`` adds: at first ``QUEUED``, later one per item that was taken."""
        self._closed = False
        self.refill()

    def wait_for_permit(self, pull_s: float) -> bool:
        """Wait until an item may be put, and pause if another item is ready.

        Args:
            pull_s: Seconds that pulling the last item took. The pause is shorter by this time, because pulling the next item is
                expected to take as long.

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
        """Add a permit per item that was taken since the last call. Called when a training step begins."""
        now_s = time.perf_counter()
        step_s = now_s - self._refilled_s
        self._refilled_s = now_s
        # From the shorter of the last two steps: after one long step, a long pause would let short steps run out of batches.
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

        Errors are dropped, too: through its traceback, an error would keep the frame of the pulling thread alive.
        """
        with suppress(Empty):
            while True:
                self._items.get(block=False)
        self._items.put(Pulled(ended=True))
