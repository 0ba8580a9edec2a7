"""Pulling in the background: what the thread may do, what it must not hold, and how it ends."""

import gc
import logging
import threading
import time
import weakref
from contextlib import suppress

import pytest
import torch
from support.waiting import WAIT_S, until
from torch.utils.data import DataLoader, Dataset

from gpuaug import IteratorEndedError, StreamedLoader
from gpuaug.feed import prefetch
from gpuaug.feed.prefetch import QUEUED, open_feed_iterator


def feeding(loader):
    return open_feed_iterator(loader, lambda: None)


def take(source):
    """The next item, as the loader takes it."""
    item = source.get(block=True)
    source.refill()
    return item


def drained(source):
    """Everything that a feed gives, up to and with the end."""
    found = []
    while not found or not found[-1].ended:
        found.append(take(source))
    source.close()
    return found


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "gpuaug-feed"]


class Gate:
    """A loader whose batches arrive when they are let through."""

    def __init__(self, count=100):
        self.count = count
        self.pulled = 0
        self._open = threading.Semaphore(0)

    def let(self, count):
        for _ in range(count):
            self._open.release()

    def __iter__(self):
        for index in range(self.count):
            self._open.acquire(timeout=WAIT_S)
            self.pulled += 1
            yield index


def test_batches_come_in_order_and_then_the_end():
    found = drained(feeding(range(5)))
    assert [item.batch for item in found[:-1]] == [0, 1, 2, 3, 4]
    assert found[-1].error is None


def test_an_empty_loader_has_only_an_end():
    assert len(drained(feeding([]))) == 1


def test_an_error_comes_after_the_batches_before_it_and_is_the_end():
    def failing():
        yield 0
        yield 1
        raise LookupError("third")

    found = drained(feeding(failing()))
    assert [item.batch for item in found[:-1]] == [0, 1]
    assert isinstance(found[-1].error, LookupError)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_errors_that_are_no_exceptions_are_carried_too(kind):
    class Failing:
        def __iter__(self):
            return self

        def __next__(self):
            raise kind

    assert type(drained(feeding(Failing()))[-1].error) is kind


def test_nothing_is_given_while_the_loader_is_at_work():
    gate = Gate()
    source = feeding(gate)
    assert source.get(block=False) is None
    gate.let(1)
    assert take(source).batch == 0
    assert source.get(block=False) is None
    gate.let(1)
    until(lambda: gate.pulled == 2)
    assert take(source).batch == 1
    gate.let(100)
    source.close()


def test_the_thread_runs_ahead_by_a_few_batches_and_no_more():
    gate = Gate()
    gate.let(100)
    source = feeding(gate)
    for taken in range(4):
        until(lambda taken=taken: gate.pulled >= taken + QUEUED)
        time.sleep(0.01)  # long enough to run away in
        assert gate.pulled <= taken + QUEUED + 1
        take(source)
    source.close()


def test_the_thread_does_not_wake_up_before_a_batch_was_handed_over():
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


def test_the_loader_is_opened_on_the_consumers_thread_and_read_on_another():
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


def test_what_opening_the_loader_raises_is_raised_at_once():
    class Loader:
        def __iter__(self):
            raise LookupError("no workers")

    with pytest.raises(LookupError, match="no workers"):
        feeding(Loader())
    assert not threads()


def test_closing_ends_the_thread_and_lets_go_of_the_loaders_iterator():
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
        with pytest.raises(IteratorEndedError) as caught:
            source.get(block=block)
        assert str(caught.value) == (
            "An iterator must be read before its loader is closed or given a state, got next() after that. Begin a new one."
        )


@pytest.mark.parametrize("read", [0, 1, 5])
def test_a_feed_that_is_dropped_ends_its_thread(read):
    source = feeding(iter(lambda: 0, 1))
    for _ in range(read):
        take(source)
    del source
    until(lambda: not threads())


def test_the_thread_does_not_hold_on_to_a_batch():
    class Batch:
        pass

    watched = []

    def loader():
        for _ in range(6):
            batch = Batch()
            watched.append(weakref.ref(batch))
            yield batch
            del batch

    gc.disable()
    try:
        source = feeding(loader())
        for index in range(6):
            item = take(source)
            assert item.batch is watched[index]()
            del item
            until(lambda index=index: watched[index]() is None)
        assert take(source).ended
        source.close()
    finally:
        gc.enable()


def test_the_thread_lets_go_of_a_batch_before_it_waits_for_the_next():
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


def test_leaving_while_the_loader_is_at_work_waits_a_little_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(prefetch, "STOP_S", 0.02)
    gate = Gate()
    source = feeding(gate)
    with caplog.at_level(logging.WARNING, "gpuaug"):
        source.close()
    assert [record.getMessage() for record in caplog.records] == [
        "The loader is still inside next() after 0 s. Its thread ends when that returns."
    ]
    assert threads()
    gate.let(1)
    until(lambda: not threads())
    assert gate.pulled == 1, "nothing more is pulled once the loop was left"


def test_leaving_at_rest_says_nothing(caplog):
    source = feeding(iter(lambda: 0, 1))
    take(source)
    source.close()
    assert not caplog.records


def test_a_feed_that_was_taken_over_says_so_whenever_it_is_asked():
    source = feeding(range(10))
    take(source)
    source.take_over()
    for block in (True, False, True):
        with pytest.raises(IteratorEndedError) as caught:
            source.get(block=block)
        assert str(caught.value) == (
            "An iterator must be the only one on workers that persist, got a newer one that took them over. "
            "Finish the first loop before starting the next, or pass persistent_workers=False to the DataLoader."
        )
    source.close()


def test_a_loader_is_taken_over_when_it_has_returned_from_its_next():
    gate = Gate()
    source = feeding(gate)
    threading.Timer(0.05, gate.let, [1]).start()
    source.take_over()
    assert not threads(), "two threads must never be inside one iterator"
    assert gate.pulled == 1


def test_a_reader_that_waits_is_woken_when_the_feed_is_closed():
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
def test_a_list_is_read_without_a_thread(kind):
    source = open_feed_iterator(kind([0, 1]), lambda: "stream")
    items = [source.get(block=block) for block in (True, False, True, False)]
    assert [item.batch for item in items[:2]] == [0, 1]
    assert [item.ended for item in items] == [False, False, True, True]
    assert items[0].stream == "stream"
    assert not threads()
    source.close()
    with pytest.raises(IteratorEndedError, match=r"next\(\) after that"):
        source.get(block=True)


def test_what_may_have_to_be_waited_for_is_read_by_a_thread():
    class Slow(list):
        pass

    for loader in (Slow(range(10)), iter(range(10)), dict.fromkeys(range(10)), torch.arange(10), DataLoader(Ten())):
        source = open_feed_iterator(loader, lambda: None)
        assert len(threads()) == 1
        assert not take(source).ended
        source.close()


# The thread's settings are the consumer's


def settings():
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "default device": torch.get_default_device(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "made": (torch.empty(1).device, torch.ones(1).is_inference()),
    }


SETTINGS = {
    "as they were": lambda: torch.enable_grad(),
    "no grad": lambda: torch.no_grad(),
    "inference": lambda: torch.inference_mode(),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to half": lambda: torch.autocast("cpu", torch.float16),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_loader_in_this_process_sees_the_consumers_settings(setting):
    def loader():
        yield settings()

    with setting():
        expected = settings()
        (item, _) = drained(feeding(loader()))
    assert item.batch == expected


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_stage_sees_the_consumers_settings(setting):
    with setting():
        expected = settings()
        (seen,) = StreamedLoader([0], [lambda _: settings()], device="cpu")
    assert seen == expected


def test_a_default_device_that_was_set_for_good_is_seen_too():
    def loader():
        yield torch.empty(1).device.type

    torch.set_default_device("meta")
    try:
        (item, _) = drained(feeding(loader()))
    finally:
        torch.set_default_device(None)
    assert item.batch == "meta"


def test_the_number_of_threads_is_the_consumers():
    def loader():
        yield torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        (item, _) = drained(feeding(loader()))
    finally:
        torch.set_num_threads(before)
    assert item.batch == before + 1


def test_context_variables_are_the_consumers():
    import decimal

    def loader():
        yield decimal.getcontext().prec

    with decimal.localcontext(prec=7):
        (item, _) = drained(feeding(loader()))
    assert item.batch == 7


def test_settings_of_the_thread_do_not_come_back_to_the_consumer():
    before = settings()

    def loader():
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        yield 0

    drained(feeding(loader()))
    assert settings() == before
