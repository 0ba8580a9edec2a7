"""Waiting for what another thread or process brings about."""

import sys
import threading
import time
import traceback

WAIT_S = 60.0
"""Seconds until a test that waits fails: many, because the machine may be busy."""


def until(condition):
    """Return as soon as ``condition`` holds; fail if it does not come about."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)


def waits_for_worker(thread):
    """Whether a thread is where a DataLoader waits for its workers."""
    frames = traceback.walk_stack(sys._current_frames()[thread.ident])
    return any(frame.f_code.co_name == "_next_data" for frame, _ in frames)


class Meeting:
    """Called at a place where two threads must not be at once: holds the first one up, and notices a second."""

    def __init__(self):
        self.happened = False
        self._both = threading.Barrier(2)

    def __call__(self):
        try:
            self._both.wait(0.2)  # long enough for the other to come; after the first time it is not waited for
        except threading.BrokenBarrierError:
            return
        self.happened = True


def returned(work, threads=1):
    """What ``work`` returns in each of several threads; fail if it does not return.

    Not a pool's threads: a process that is forked in one of those fails when it ends.
    """
    found = []
    started = [threading.Thread(target=lambda: found.append(work()), daemon=True) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "it hangs"
    assert len(found) == threads
    return found
