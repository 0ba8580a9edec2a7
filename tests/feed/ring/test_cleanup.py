"""Nothing is left behind, wherever a loop was left."""

import gc
import mmap
import multiprocessing
import os
import random
import threading
import time

import pytest
import torch
from support.feed.ring_cleanup import (
    grown,
    leave_by_break,
    leave_by_close,
    leave_by_del,
    leave_by_error,
    leave_unread,
    ring_bytes,
    taken,
)
from support.feed.ring_inputs import COUNT, Samples, values, with_workers
from support.process.waiting import until
from torch.utils.data import DataLoader, TensorDataset

from gpuaug import StreamedLoader

# What a finaliser raises nobody else hears of.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("epochs", [8, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=["one epoch", "persistent"])
def test_epochs_left_anywhere_leak_no_files_memory_or_processes(options, epochs, held):
    workers, chosen = set(), random.Random(0)
    wrapped = DataLoader(TensorDataset(torch.arange(80)), batch_size=2, num_workers=1, **options)
    loader = StreamedLoader(wrapped, device="cpu", feed="ring")
    before = None
    for epoch in range(epochs):
        stop = chosen.randrange(42)
        for index, (batch,) in enumerate(loader):
            workers |= {child.pid for child in multiprocessing.active_children()}
            assert batch.tolist() == [2 * index, 2 * index + 1]
            if index == stop:
                break
        if epoch in {3, epochs // 4, epochs // 2, epochs - 1}:
            gc.collect()
            if before is None:
                time.sleep(0.2)  # torch's queues end their threads and close their files in their own time
                before = taken()
                assert held()
            until(lambda before=before: not grown(before))
            assert 0 < ring_bytes() <= 16 * mmap.PAGESIZE, "whose the slots are, and a page for each of them"
    assert loader.stats().slot_batches > loader.stats().batches * 0.9
    loader.close()
    del loader
    gc.collect()
    until(lambda: not [child for child in multiprocessing.active_children() if child.pid in workers])
    assert not held()
    assert not [name for name in os.listdir("/dev/shm") if any(f"torch_{pid}_" in name for pid in workers)]


@pytest.mark.parametrize(
    ("leave", "persistent"),
    [
        *[(list, True), (leave_by_break, False), (leave_by_error, True), (leave_by_del, False), (leave_by_close, True)],
        (leave_unread, False),
        *(pytest.param(leave, False, marks=pytest.mark.slow) for leave in (list, leave_by_error, leave_by_close)),
        *(pytest.param(leave, True, marks=pytest.mark.slow) for leave in (leave_by_break, leave_by_del, leave_unread)),
    ],
)
def test_ring_is_freed_when_loader_is_closed_or_dropped(leave, persistent, held):
    children, threads = set(multiprocessing.active_children()), set(threading.enumerate())
    wrapped = with_workers(Samples(), num_workers=1, persistent_workers=persistent)()
    loader = StreamedLoader(wrapped, device="cpu", feed="ring")
    assert not held(), "nothing is taken before it is needed"
    gc.disable()
    try:
        leave(loader)
        if not persistent:
            until(lambda: set(multiprocessing.active_children()) <= children)
        assert [batch["label"][0].item() for batch in loader] == list(range(0, 2 * COUNT + 1, 2)), "it can be read again"
        assert held()
        loader.close()
        until(lambda: set(multiprocessing.active_children()) <= children)
        until(lambda: set(threading.enumerate()) <= threads)  # those of torch's queues take a moment
        until(lambda: not held())
        leave(loader)
        del loader
    finally:
        gc.enable()
    gc.collect()
    until(lambda: not held())
    until(lambda: set(multiprocessing.active_children()) <= children)
    until(lambda: set(threading.enumerate()) <= threads)


def test_batches_outlive_closed_loader(held):
    loader = StreamedLoader(with_workers(Samples(), num_workers=1)(), device="cpu", feed="ring")
    list(loader)
    batches = [batch["image"] for batch in loader]
    loader.close()
    del loader
    gc.collect()
    assert not held()
    want = torch.stack([values(index, 3, 4, 4) for index in range(2 * COUNT + 1)])
    assert torch.equal(torch.cat(batches), want)
