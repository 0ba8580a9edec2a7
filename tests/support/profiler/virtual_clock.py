"""A clock that only planted work moves, with a time of its own for each thread.

A thread that waits for another goes on at the other's time: a batch carries the time at which it was pulled, and a free place
in the queue the time at which it was given. So two threads overlap as real ones do, and every figure of a profile is exact.
"""

import threading
from collections import deque
from functools import partial

import torch

from gpuaug.core import streams
from gpuaug.feed import mailbox, prefetch
from gpuaug.loader import iterator
from gpuaug.profiler import measure, profile, recorder, steady_state

MODULES = (streams, mailbox, prefetch, iterator, measure, profile, recorder, steady_state)
"""Modules that read the host's time."""


class VirtualClock:
    """Stands for the module ``time``: what it has of that is all that the modules above may use."""

    def __init__(self):
        self._thread = threading.local()

    def perf_counter(self):
        """The calling thread's time, in seconds."""
        return getattr(self._thread, "now_s", 0.0)

    def sleep(self, seconds):
        """Work for so long."""
        self.wait_until(self.perf_counter() + seconds)

    def wait_until(self, at_s):
        """Go on at ``at_s``, or at once if that is over."""
        self._thread.now_s = max(self.perf_counter(), at_s)

    def working(self, ms):
        """A stage or a step that takes so many milliseconds, and gives what it is given."""

        def work(batch):
            self.sleep(ms / 1e3)
            return batch

        return work


def install(patch):
    """Give the loader and its profiler a clock of their own for the length of a test."""
    clock = VirtualClock()
    for module in MODULES:
        patch.setattr(module, "time", clock)
    patch.setattr(prefetch, "Mailbox", partial(Mailbox, clock))
    return clock


class Mailbox(mailbox.Mailbox):
    """A queue between two threads with a time each. What is there is a matter of these, not of who runs first.

    The thread that pulls does not pause.
    """

    def __init__(self, clock):
        self._clock = clock
        self._being_pulled = 0
        self._next = None
        super().__init__()

    def wait_for_permit(self, pull_s):
        given_s = self._permits.get()
        if given_s is not None:  # as it is when the mailbox is closed
            self._clock.wait_until(given_s)
        return not self._closed

    def put(self, item):
        super().put((self._clock.perf_counter(), item))

    def take(self, *, block):
        if self._next is None:
            if not block and not self._being_pulled:
                return None
            self._next = self._items.get()
        put_s, item = self._next
        if not block and put_s > self._clock.perf_counter():
            return None
        self._clock.wait_until(put_s)
        self._next = None
        self._missing_permits += 1
        self._being_pulled -= 1
        return item

    def refill(self):
        self._being_pulled += self._missing_permits
        for _ in range(self._missing_permits):
            self._permits.put(self._clock.perf_counter())
        self._missing_permits = 0


class Workers:
    """Batches as they come from worker processes, which take turns and work side by side.

    Args:
        clock: Whose time they take.
        batch_ms: How long one worker takes for one batch.
        workers: How many there are.
        start_ms: How long they take to start, in every epoch.
        count: Batches of an epoch.
    """

    prefetch_factor = 2

    def __init__(self, clock, batch_ms, workers, start_ms=0.0, count=90):
        self.num_workers = workers
        self._clock, self._batch_s, self._start_s, self._count = clock, batch_ms / 1e3, start_ms / 1e3, count

    def __iter__(self):
        return self._batches(self._clock.perf_counter())

    def _batches(self, began_s):
        free_s = [began_s + self._start_s] * self.num_workers
        asked_s = deque([began_s] * (self.num_workers * self.prefetch_factor))
        for index in range(self._count):
            worker = index % self.num_workers
            free_s[worker] = max(free_s[worker], asked_s.popleft()) + self._batch_s
            self._clock.wait_until(free_s[worker])
            asked_s.append(self._clock.perf_counter())
            yield torch.full((2, 3), float(index))
