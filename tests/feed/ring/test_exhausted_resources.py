"""Workers that cannot send a batch, and a process out of file descriptors: an error at its place, and no hang."""

import gc
import itertools
import mmap
import multiprocessing
import os
import resource
import sys
from contextlib import contextmanager, suppress

import pytest
import torch
from support.feed.feed_iterators import take
from support.feed.ring_inputs import Samples, with_workers
from support.feed.unsendable import Unsendable, with_unsendable
from support.process.waiting import returned
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from gpuaug import GpuAugError, GpuAugWarning, StreamedLoader
from gpuaug.feed.feed import Feed

MOST_BYTES = 1 << 16
EVERYTHING = list(range(0, 24, 2))


class Large(Dataset):
    """Samples that are small up to some number, and too large for a file from there on, in workers and while ``limited``."""

    def __init__(self, first_large=24):
        self.first_large = first_large
        self.limited = multiprocessing.Value("b", True)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((10 if index < self.first_large else MOST_BYTES,), index)


class Limited:
    """Leaves a worker no room for large files, of shared memory too."""

    def __init__(self, dataset):
        self.limited = dataset.limited

    def __call__(self, worker_id):
        if self.limited.value:
            resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, resource.RLIM_INFINITY))


def stacked(samples):
    """A collate function that allocates no shared memory itself."""
    return torch.stack([sample + 0 for sample in samples])


def first_values(loader):
    """The first value of each batch that arrives, and the error after them."""
    arrived = []
    try:
        arrived.extend(int(batch.flatten()[0]) for batch in loader)
    except Exception as error:
        return arrived, error
    return arrived, None


on_each_feed = pytest.mark.parametrize("feed", ["plain", "ring"])


@pytest.mark.parametrize(
    ("options", "first_large", "feed"),
    [({"collate_fn": stacked}, 0, "plain"), ({"collate_fn": stacked}, 10, "ring"), ({}, 0, "ring"), ({}, 10, "plain")],
    ids=["own collate, first, plain", "own collate, ring", "default collate, first, ring", "default collate, plain"],
)
def test_worker_out_of_shared_memory_is_an_error_at_its_batch(options, first_large, feed):
    dataset = Large(first_large)
    wrapped = with_workers(dataset, num_workers=1, worker_init_fn=Limited(dataset), **options)()
    loader = StreamedLoader(wrapped, device="cpu", feed=feed)
    ((arrived, error),) = returned(lambda: first_values(loader))
    assert arrived == EVERYTHING[: first_large // 2]
    assert type(error) is GpuAugError
    assert "File too large" in str(error)
    assert "batch_size" in str(error)
    assert error.__notes__ == [f"gpuaug: raised by the wrapped loader, at batch {first_large // 2} of epoch 0."]
    dataset.limited.value = False
    assert returned(lambda: first_values(loader)) == [(EVERYTHING, None)]


@pytest.mark.parametrize(
    ("kind", "feed", "start"),
    [
        *itertools.product([DataLoader, StatefulDataLoader], ["plain", "ring"], ["fork"]),
        (StatefulDataLoader, "plain", "forkserver"),
    ],
)
def test_batch_that_worker_cannot_send_is_an_error_at_its_place(kind, feed, start):
    options = {"num_workers": 1, "collate_fn": with_unsendable, "multiprocessing_context": start}
    wrapped = kind(range(24), batch_size=2, **options)
    with StreamedLoader(wrapped, device="cpu", feed=feed) as loader:
        for _ in range(2 if start == "fork" else 1):
            ((arrived, error),) = returned(lambda: first_values(numbers for numbers, _ in loader))
            assert arrived == EVERYTHING[:5]
            assert type(error) is TypeError
            assert "number 10 cannot be sent" in str(error)
            assert "batch 5 of epoch" in error.__notes__[-1]
    assert wrapped.worker_init_fn is None


@on_each_feed
def test_state_that_worker_cannot_send_is_an_error_at_its_batch(feed):
    class Counted(IterableDataset):
        sent = 0

        def __iter__(self):
            for self.sent in range(24):
                yield self.sent

        def state_dict(self):
            return Unsendable(self.sent) if self.sent >= 10 else self.sent

        def load_state_dict(self, state):
            pass

    wrapped = StatefulDataLoader(Counted(), batch_size=2, num_workers=1)
    with StreamedLoader(wrapped, device="cpu", feed=feed) as loader:
        ((arrived, error),) = returned(lambda: first_values(loader))
    assert arrived == EVERYTHING[:5]
    assert "number 11 cannot be sent" in str(error)


def test_slots_of_batches_that_worker_cannot_send_are_free_again():
    order = [*range(10), *range(20, 24), *range(10, 20)]
    options = {"num_workers": 1, "persistent_workers": True, "collate_fn": with_unsendable, "sampler": order}
    with StreamedLoader(DataLoader(range(24), batch_size=2, **options), device="cpu", feed="ring") as loader:
        for _ in range(12):
            assert len(first_values(numbers for numbers, _ in loader)[0]) == 7
        before = loader.stats().slot_batches
        first_values(numbers for numbers, _ in loader)
        assert loader.stats().slot_batches - before == 7


@contextmanager
def descriptors(spare):
    """Leave this process room for ``spare`` more file descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit is one of their numbers, not of how many are open, and earlier tests have left gaps.
    free = (number for number in itertools.count() if not os.path.lexists(f"/proc/self/fd/{number}"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, spare, None)), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def many_descriptors(worker_id):
    """Leave a worker what its process is short of: what it sends goes through threads that nobody hears of."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@pytest.mark.parametrize(("feed", "spares"), [("plain", (0, 7, 10)), ("ring", (3, 7, 13))], ids=["plain", "ring"])
def test_process_out_of_descriptors_is_an_error_and_loader_works_again(feed, spares, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # a DataLoader that is half made fails in its finaliser
    wrapped = with_workers(Large(), num_workers=1, collate_fn=stacked, worker_init_fn=many_descriptors)()
    loader = StreamedLoader(wrapped, device="cpu", feed=feed)
    assert first_values(loader) == (EVERYTHING, None)
    failed = 0
    for spare in spares:
        with descriptors(spare):
            ((arrived, error),) = returned(lambda: first_values(loader))
        assert arrived == EVERYTHING[: len(arrived)]
        if error is None:
            assert arrived == EVERYTHING
        else:
            assert "Too many open files" in str(error)
            failed += 1
        del error
        gc.collect()
        assert first_values(loader) == (EVERYTHING, None)
    assert failed


RING_BYTES = 1 << 28


@contextmanager
def limited(which, spare):
    """Leave this process ``spare`` more bytes of address space, or files of that size."""
    with open("/proc/self/statm") as found:
        used = int(found.read().split()[0]) * mmap.PAGESIZE if which == resource.RLIMIT_AS else 0
    before = resource.getrlimit(which)
    resource.setrlimit(which, (used + spare, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


on_each_limit = pytest.mark.parametrize(
    "which", [resource.RLIMIT_AS, resource.RLIMIT_FSIZE], ids=["address space", "file size"]
)


@on_each_limit
def test_ring_without_memory_is_an_error_and_less_feed_bytes_work(which):
    wrapped = with_workers(Large())()
    with limited(which, 4 * RING_BYTES):
        loader = StreamedLoader(wrapped, device="cpu", feed="ring", feed_bytes=RING_BYTES)
        arrived, error = first_values(loader)
        assert (arrived, type(error)) == ([], GpuAugError)
        assert str(error).startswith(
            "The ring cannot be created, because 2147.5 MB, 8 times feed_bytes, cannot be mapped ([Errno "
        )
        assert str(error).endswith("). Lower feed_bytes, or raise the limits of the process: ulimit -v and ulimit -f.")
        with StreamedLoader(wrapped, device="cpu", feed="ring", feed_bytes=1 << 20) as lower:
            assert first_values(lower) == (EVERYTHING, None)
            assert lower.stats().slot_batches
    assert first_values(loader) == (EVERYTHING, None)
    loader.close()


@on_each_limit
def test_feed_auto_goes_on_without_a_ring_and_warns_once(which):
    feed = Feed(with_workers(Samples())(), "auto", RING_BYTES, torch.device("cuda", 0))
    with limited(which, 4 * RING_BYTES):
        with pytest.warns(GpuAugWarning) as caught:
            sources = [feed.open(lambda: None, 2) for _ in range(2)]
        for source in sources:
            assert not take(source).slot
            source.close()
    (text,) = (str(warning.message) for warning in caught if warning.category is GpuAugWarning)
    assert text.startswith("Batches travel without page-locked slots, which is slower, because 2147.5 MB, 8 times feed_bytes, ")
    assert text.endswith("). Lower feed_bytes, or raise the limits of the process: ulimit -v and ulimit -f.")
    assert repr(feed).startswith("plain (the memory of the ring cannot be allocated: [Errno ")
    assert feed.size_text == ""
    feed.close()


def test_ring_without_a_descriptor_names_that_limit():
    loader = StreamedLoader(with_workers(Large())(), device="cpu", feed="ring")
    taken = []
    with descriptors(0):
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        arrived, error = first_values(loader)
        for descriptor in taken:
            os.close(descriptor)
    assert (arrived, type(error)) == ([], GpuAugError)
    assert "Too many open files" in str(error)
    assert str(error).endswith("Raise the limit of open files: ulimit -n.")
    assert first_values(loader) == (EVERYTHING, None)
    loader.close()
