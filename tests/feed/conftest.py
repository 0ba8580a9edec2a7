"""What the rings of these tests have in common: how they are used, and how one sees that they are gone."""

import gc
import time
from multiprocessing import queues

import pytest
from support.feed.poison import overwrite_freed_slots
from support.feed.ring_cleanup import rings_here
from support.process.waiting import WAIT_S

from gpuaug.feed.ring_memory import reads_for_feed


@pytest.fixture(autouse=True)
def _slots_are_overwritten_when_they_are_given_back(monkeypatch):
    overwrite_freed_slots(monkeypatch)


@pytest.fixture(autouse=True)
def _queues_are_as_they_were(monkeypatch):
    """What a worker does to the queues of its process, in tests that are one themselves."""
    monkeypatch.setattr(queues.Queue, "_on_queue_feeder_error", staticmethod(queues.Queue._on_queue_feeder_error))


@pytest.fixture
def _reads_for_feed():
    """Tensors that this thread unpickles share the memory of their slot, as on the thread of a feed."""
    token = reads_for_feed.set(True)
    yield
    reads_for_feed.reset(token)


RINGS_THAT_STAY = [0]
"""Numbers of rings of earlier tests that have not been freed within ``WAIT_S``, the last one now."""


@pytest.fixture
def held():
    """How much of rings there is that the test has made; a failed one's traceback may still hold others."""
    end = time.monotonic() + WAIT_S  # a worker that was slow in the test before takes its time to end
    while rings_here() > RINGS_THAT_STAY[-1] and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    RINGS_THAT_STAY.append(rings_here())
    before = rings_here()
    return lambda: rings_here() - before
