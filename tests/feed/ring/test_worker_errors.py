"""Errors of datasets and collate functions are those that the plain feed raises."""

import gc
import mmap
import multiprocessing
import os
import random
import threading
import time

import pytest
import torch
from support.feed.overridden_loaders import AsTheyAre
from support.feed.ring_cleanup import (
    failure,
    grown,
    leave_by_break,
    leave_by_close,
    leave_by_del,
    leave_by_error,
    leave_unread,
    ring_bytes,
    taken,
)
from support.feed.ring_equality import assert_same
from support.feed.ring_inputs import COUNT, Samples, values, with_workers
from support.process.waiting import until
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from gpuaug import StreamedLoader

# What a finaliser raises nobody else hears of.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


class OwnError(Exception):
    def __init__(self, number, *, text):
        super().__init__(f"{number}: {text}")


class Failing(Dataset):
    """Fails at some sample."""

    def __init__(self, error, at=14):
        self.error, self.at = error, at

    def __len__(self):
        return 2 * COUNT

    def __getitem__(self, index):
        if index == self.at:
            raise self.error
        return values(index, 3)


class FailingStream(IterableDataset):
    def __iter__(self):
        for index in range(2 * COUNT):
            if index == 14:
                raise LookupError("fourteen")
            yield values(index, 3)


def failing_collate(samples):
    if any(sample["label"] == 14 for sample in samples):
        raise ZeroDivisionError("of the collate function")
    return default_collate(samples)


def fail_to_prepare(worker_id):
    raise OSError("no worker")


class Ragged(Dataset):
    def __len__(self):
        return 2 * COUNT

    def __getitem__(self, index):
        return torch.zeros(3 if index != 15 else 4)


def alone(dataset, **options):
    return with_workers(dataset, num_workers=1, **options)


FAILURES = {
    "dataset": with_workers(Failing(LookupError("fourteen"))),
    "key": alone(Failing(KeyError("a\nb"))),
    "no message": alone(Failing(ValueError())),
    "cannot be made again": alone(Failing(OwnError(7, text="x"))),
    "stop": alone(Failing(StopIteration("odd"))),
    "first sample": alone(Failing(LookupError("first"), at=0)),
    "stream": alone(FailingStream()),
    "collate": with_workers(Samples(), collate_fn=failing_collate),
    "default collate": alone(Ragged()),
    "preparing": alone(Samples(), worker_init_fn=fail_to_prepare),
    "persistent": alone(Failing(LookupError("fourteen")), persistent_workers=True),
    "persistent collate": alone(Samples(), collate_fn=failing_collate, persistent_workers=True),
}


SLOW = ("no message", "stop", "first sample", "persistent collate")
CASES = [pytest.param(make, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, make in FAILURES.items()]


@pytest.mark.parametrize("make", CASES)
def test_worker_error_is_the_same_as_with_plain_feed(make):
    found = {}
    for feed in ("plain", "ring"):
        torch.manual_seed(7)
        with StreamedLoader(make(), device="cpu", feed=feed) as loader:
            found[feed] = [failure(loader) for _ in range(2 if loader.loader.persistent_workers else 1)]
            if feed == "ring" and len(found[feed][0][0]) > 6:
                assert loader.stats().slot_batches > 0
    for (got, error), (want, plain_error) in zip(found["ring"], found["plain"], strict=True):
        assert_same(got, want)
        assert error == plain_error


def every_third_fails(samples):
    if samples[0] % 3 == 0:
        raise LookupError("every third")
    return torch.tensor(samples)


def test_collate_fn_errors_leak_no_slots():
    order = {"sampler": [1, 2, 4, 5, 1, 2, 4, 5, 3], "batch_size": 1}
    wrapped = with_workers(range(7), collate_fn=every_third_fails, num_workers=1, persistent_workers=True, **order)()
    with StreamedLoader(wrapped, device="cpu", feed="ring") as loader:
        for _ in range(20):
            assert failure(loader)[1][0] is LookupError
        before = loader.stats().slot_batches
        assert failure(loader)[1][0] is LookupError
        assert loader.stats().slot_batches - before == 8


# What a finaliser raises nobody else hears of.


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


LEAVE = [list, leave_by_break, leave_by_error, leave_by_del, leave_by_close, leave_unread]


@pytest.mark.parametrize("kind", [DataLoader, AsTheyAre])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.every(3)
def test_ring_is_freed_when_loader_is_closed_or_dropped(leave, persistent, kind, held):
    children, threads = set(multiprocessing.active_children()), set(threading.enumerate())
    wrapped = with_workers(Samples(), kind, num_workers=1, persistent_workers=persistent)()
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
        until(lambda: set(threading.enumerate()) <= threads)  # the feeder threads of torch's queues end a moment later
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
