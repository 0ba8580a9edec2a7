"""Pulling in the background: what the thread may do, what it must not hold, and how it ends."""

import gc
import logging
import queue
import threading
import time
import weakref
from contextlib import suppress
from functools import partial

import pytest
import torch
from support import internals
from support.feed.feed_iterators import drained, feeding, take
from support.process.waiting import WAIT_S, until, waits_for_worker
from torch.utils.data import DataLoader, Dataset
from torchdata import nodes

from gpuaug import IteratorEndedError
from gpuaug.feed import prefetch
from gpuaug.feed.mailbox import QUEUED
from gpuaug.feed.prefetch import open_feed_iterator
from gpuaug.feed.wrapped_loader import begin_after, end_workers


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "gpuaug-feed"]


class Gate:
    """A loader whose batches arrive when they are let through."""

    def __init__(self, count=100):
        self.count = count
        self.pulled = 0
        self.entered = threading.Event()
        self._open = threading.Semaphore(0)

    def let(self, count):
        for _ in range(count):
            self._open.release()

    def __iter__(self):
        for index in range(self.count):
            self.entered.set()
            self._open.acquire(timeout=WAIT_S)
            self.pulled += 1
            yield index


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_keyboard_interrupt_and_system_exit_reach_the_consumer(kind):
    class Failing:
        def __iter__(self):
            return self

        def __next__(self):
            raise kind

    assert type(drained(feeding(Failing()))[-1].error) is kind


def test_thread_pulls_again_only_after_refill():
    gate = Gate()
    gate.let(100)
    source = feeding(gate)
    for _ in range(QUEUED):
        source.get(block=True)
    assert source.get(block=False) is None
    time.sleep(0.01)  # long enough to run away in
    assert gate.pulled == QUEUED
    source.refill()
    until(lambda: gate.pulled == 2 * QUEUED)
    source.close()


def test_iter_on_consumer_thread_and_next_on_feed_thread():
    where = {}

    class Loader:
        def __iter__(self):
            where["iter"] = threading.current_thread()
            return self

        def __next__(self):
            where["next"] = threading.current_thread()
            raise StopIteration

    drained(feeding(Loader()))
    assert where["iter"] is threading.current_thread()
    assert where["next"].name == "gpuaug-feed"
    assert where["next"].daemon, "a loader that hangs must not keep the process alive"


def test_close_ends_thread_and_drops_iterator():
    class Numbers:
        def __iter__(self):
            return self

        def __next__(self):
            return 0

    source = feeding(Numbers())
    watched = weakref.ref(source.iterator)
    take(source)
    source.close()
    assert not threads()
    assert watched() is None
    source.close()
    for block in (True, False, True):
        with pytest.raises(IteratorEndedError, match="its loader was closed or loaded a state"):
            source.get(block=block)


def test_thread_drops_batch_before_waiting_for_next():
    class Batch:
        pass

    dropped = threading.Event()

    def loader():
        yield Batch()
        dropped.wait(2 * WAIT_S)
        yield Batch()

    gc.disable()
    try:
        source = feeding(loader())
        batch = take(source).batch
        watched = weakref.ref(batch)
        del batch
        until(lambda: watched() is None)
    finally:
        gc.enable()
        dropped.set()
        source.close()


def test_close_warns_when_loader_is_still_inside_next(monkeypatch, caplog):
    monkeypatch.setattr(prefetch, "STOP_S", 0.02)
    gate = Gate()
    source = feeding(gate)
    until(gate.entered.is_set)
    with caplog.at_level(logging.WARNING, "gpuaug"):
        source.close()
    assert [record.getMessage() for record in caplog.records] == [
        "The wrapped loader is still inside next() after 0 s. Its thread ends when next() returns."
    ]
    assert threads()
    gate.let(1)
    until(lambda: not threads())
    assert gate.pulled == 1, "nothing more is pulled once the loop was left"


class Held(Dataset):
    """Samples of which the first is not made before a file is there."""

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 4

    def __getitem__(self, index):
        while index == 0 and not self.path.exists():
            time.sleep(0.005)
        return torch.tensor(index)


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=["one epoch", "persistent"])
def test_close_does_not_wait_for_workers(options, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.01)  # what DataLoader gives them to end
    loader = DataLoader(Held(tmp_path / "made"), num_workers=2, **options)
    for _ in range(2):
        source = feeding(loader)
        workers = source.iterator._workers
        until(lambda source=source: waits_for_worker(internals.thread(source)))
        source.close()
        assert not threads()
        assert not caplog.records
        until(lambda workers=workers: [worker.is_alive() for worker in workers] == [bool(options)] * 2)
        loader.dataset.path.touch()
        assert [item.batch.item() for item in drained(feeding(loader))[:-1]] == [0, 1, 2, 3]
        loader.dataset.path.unlink()


def test_close_does_not_wait_for_thread_that_page_locks():
    class OnCuda:
        """Waits as a DataLoader's iterator with ``pin_memory=True`` does."""

        def __init__(self):
            self._data_queue = queue.Queue()

        def __iter__(self):
            return self

        def __next__(self):
            index, data = self._data_queue.get()
            return {0: data}[index]

    feeding(OnCuda()).close()
    assert not threads()


def counted():
    yield from range(9)


def graph():
    return nodes.Loader(nodes.IterableWrapper(range(9)))


def persistent():
    return DataLoader(range(9), batch_size=None, num_workers=1, persistent_workers=True)


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (counted, "a newer one reads the same source"),
        (graph, "a newer one reads the same source"),
        (persistent, "a newer one took over its persistent workers"),
    ],
)
@pytest.mark.parametrize("skipped", [0, 1])
def test_error_of_an_iteration_that_was_taken_over_has_its_cause(make, cause, skipped):
    loader = make()
    begin = partial(begin_after, skip=skipped)
    older = open_feed_iterator(loader, lambda: None, begin=begin)
    take(older)
    newer = open_feed_iterator(loader, lambda: None, begin=begin)
    take(newer)
    with pytest.raises(IteratorEndedError, match=f"^This iterator ended, because {cause}"):
        older.get(block=True)
    older.close()
    newer.close()
    end_workers(getattr(loader, "_iterator", None))


def test_take_over_waits_for_pending_next():
    gate = Gate()
    source = feeding(gate)
    until(gate.entered.is_set)
    threading.Timer(0.05, gate.let, [1]).start()
    source.end_for_newer()
    assert not threads(), "two threads must never be inside one iterator"
    assert gate.pulled == 1


def test_close_wakes_waiting_reader():
    gate = Gate()
    source = feeding(gate)
    found = []

    def read():
        with suppress(IteratorEndedError):
            take(source)
        found.append("woken")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    threading.Timer(0.05, gate.let, [1]).start()  # lets the feed's own thread out of next()
    source.close()
    reader.join(WAIT_S)
    assert found == ["woken"]


# Who pulls depends on what the loader is


class Ten(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor(index)


@pytest.mark.parametrize("kind", [list, tuple])
def test_list_and_tuple_are_read_without_thread(kind):
    source = open_feed_iterator(kind([0, 1]), lambda: "stream")
    items = [source.get(block=block) for block in (True, False, True, False)]
    assert [item.batch for item in items[:2]] == [0, 1]
    assert [item.ended for item in items] == [False, False, True, True]
    assert items[0].stream == "stream"
    assert not threads()
    source.close()
    with pytest.raises(IteratorEndedError, match="its loader was closed"):
        source.get(block=True)


def test_other_iterables_are_read_by_thread():
    class Slow(list):
        pass

    for loader in (Slow(range(10)), iter(range(10)), dict.fromkeys(range(10)), torch.arange(10), DataLoader(Ten())):
        source = open_feed_iterator(loader, lambda: None)
        assert len(threads()) == 1
        assert not take(source).ended
        source.close()
