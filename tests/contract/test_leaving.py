"""Leaving early is clean: threads, workers and iterators end with the loop, however it ends."""

import gc
import os
import signal
import sys
import threading
import time
import weakref
from contextlib import suppress

import pytest
import torch
from contract.sources import Numbers, OwnError, failing_at, failure, noise, raises, streamed, values
from support import internals
from support.comparison.values import assert_values
from support.process import processes
from support.process.waiting import WAIT_S, returned, until, waits_for_worker
from torch.utils.data import DataLoader

from gpuaug import IteratorEndedError
from gpuaug.feed import prefetch


def leave_by_break(loader):
    for _ in loader:
        break


def leave_by_error(loader):
    with suppress(OwnError):
        for _ in loader:
            raise OwnError(7, text="")


def leave_by_interrupt(loader):
    with suppress(KeyboardInterrupt):
        for _ in loader:
            raise KeyboardInterrupt


def leave_by_del(loader):
    batches = iter(loader)
    next(batches)
    del batches


def leave_by_closing_the_iterator(loader):
    batches = iter(loader)
    next(batches)
    batches.close()


def leave_by_closing_the_loader(loader):
    batches = iter(loader)
    next(batches)
    loader.close()


def leave_by_a_with_block(loader):
    with loader:
        batches = iter(loader)
        next(batches)


def leave_by_zip(loader):
    for _ in zip(range(1), loader, strict=False):
        pass


def leave_at_the_end(loader):
    list(loader)


WAYS_TO_LEAVE = [
    leave_by_break,
    leave_by_error,
    leave_by_interrupt,
    leave_by_del,
    leave_by_closing_the_iterator,
    leave_by_closing_the_loader,
    leave_by_a_with_block,
    leave_by_zip,
    leave_at_the_end,
]


@pytest.mark.parametrize("leave", WAYS_TO_LEAVE)
@pytest.mark.parametrize("depth", [0, 2])
def test_threads_end_with_the_loop(leave, depth, feeds):
    loader = streamed(torch.arange(20), depth=depth)
    gc.disable()
    try:
        leave(loader)
        assert not feeds()
    finally:
        gc.enable()
    assert values(loader) == list(range(20)), "the loader can be iterated again"


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_error, leave_by_del, leave_by_closing_the_loader])
def test_workers_end_with_the_loop(leave, workers, feeds):
    loader = streamed(DataLoader(Numbers(20), batch_size=2, num_workers=1))
    gc.disable()
    try:
        leave(loader)
        until(lambda: not workers())
    finally:
        gc.enable()
    assert not feeds()


def test_workers_end_where_a_stage_fails(workers):
    loader = streamed(DataLoader(Numbers(20), batch_size=2, num_workers=1), failing_at(4, OwnError(7, text="")))
    gc.disable()
    try:
        arrived, _ = failure(loader)
        assert arrived == [[0, 1], [2, 3]]
        until(lambda: not workers())
    finally:
        gc.enable()


def test_workers_end_although_their_error_is_kept(workers):
    fail = raises(LookupError("its own"))
    _, error = failure(streamed(DataLoader(Numbers(20, 4, fail), batch_size=2, num_workers=2)))
    until(lambda: not workers())
    assert type(error) is LookupError  # its traceback holds DataLoader's iterator


def test_a_loader_that_is_dropped_with_its_iterator_leaves_nothing(feeds):
    loader = streamed(torch.arange(20), lambda x: x + 1)
    watched = weakref.ref(loader)
    batches = iter(loader)
    next(batches)
    del loader, batches
    gc.collect()
    assert watched() is None
    assert not feeds()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_within_a_stage_or_the_dataset_ends_the_loop(kind, depth, feeds):
    broken = True

    def interrupt(x):
        if broken and x == 2:
            raise kind
        return x

    in_a_stage = streamed(torch.arange(5), interrupt, depth=depth)
    in_the_dataset = streamed(DataLoader(Numbers(5), batch_size=None, collate_fn=interrupt), depth=depth)
    for loader in (in_a_stage, in_the_dataset):
        arrived, error = failure(loader)
        assert arrived == [0, 1][: len(arrived)]
        assert type(error) is kind
        assert not feeds()
    broken = False
    assert values(in_a_stage) == values(in_the_dataset) == list(range(5))


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_is_heard_while_the_loader_is_slow(feeds):
    wanted = threading.Event()

    def slow():
        yield torch.tensor(0)
        assert wanted.wait(WAIT_S)
        time.sleep(0.05)  # long enough for the loop to be waiting
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)  # long enough for it to hear
        yield torch.tensor(1)

    def wait_for_the_second():
        wanted.set()
        next(batches)

    batches = iter(streamed(slow()))
    next(batches)
    with pytest.raises(KeyboardInterrupt):
        wait_for_the_second()
    assert not feeds()
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.timeout(100)  # a loader that hangs ends the test
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # within what the interpreter calls itself
def test_an_interrupt_at_any_point_of_next_leaves_the_loader_usable():
    """A signal's exception comes after any call; here after each in turn, of one ``next`` and of the end of the loop."""

    def interrupted(frame, event, argument):
        # Once a call has begun or ended: where Python looks whether a signal has come. Not in the lock of torch's generators:
        # this thread would keep it.
        nonlocal left
        if event in ("call", "c_return") and frame.f_globals.get("__name__", "").startswith("gpuaug.loader"):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    points, finished = 0, False
    while not finished:
        points += 1
        left, loader = points, streamed([torch.tensor(number) for number in range(3)], lambda x: x + 1)
        sys.setprofile(interrupted)
        try:
            for _ in loader:
                break
            finished = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        finished = finished and left > 0
        assert values(loader) == [1, 2, 3], f"interrupted at point {points}"
    assert points > 30


def test_two_iterators_do_not_disturb_one_another():
    loader = streamed(torch.arange(5.0), noise, seed=0)
    expected = [list(loader), list(loader)]
    loader = streamed(torch.arange(5.0), noise, seed=0)
    for first, second in zip(zip(loader, expected[0], strict=True), zip(loader, expected[1], strict=True), strict=True):
        assert_values(*first)
        assert_values(*second)


def test_leaving_one_of_two_iterators_leaves_the_other():
    loader = streamed(torch.arange(5))
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    first.close()
    assert [batch.item() for batch in second] == [1, 2, 3, 4]


def test_persistent_workers_have_one_reader_and_end_with_close(workers):
    loader = streamed(DataLoader(Numbers(12), batch_size=2, num_workers=2, persistent_workers=True))
    everything = [[2 * index, 2 * index + 1] for index in range(6)]
    first = iter(loader)
    assert next(first).tolist() == [0, 1]
    started = workers()
    second = iter(loader)
    assert next(second).tolist() == [0, 1]
    with pytest.raises(IteratorEndedError, match="persistent_workers=False"):
        next(first)
    assert [batch.tolist() for batch in second] == everything[1:]
    leave_by_break(loader)
    assert values(loader) == everything
    assert workers() == started, "they are kept from epoch to epoch"
    loader.close()
    until(lambda: not workers())
    assert values(loader) == everything, "they are started anew"
    del loader
    gc.collect()
    until(lambda: not workers())


def test_two_loaders_over_one_dataloader_with_persistent_workers_do_not_hang():
    wrapped = DataLoader(Numbers(40), batch_size=2, num_workers=1, persistent_workers=True)
    first, second = iter(streamed(wrapped)), iter(streamed(wrapped))
    assert next(first).tolist() == [0, 1]
    assert next(second).tolist() == [0, 1]
    found = []

    def read():
        try:
            found.extend(batch.tolist() for batch in second)
        except Exception as error:
            found.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(WAIT_S)
    assert not reader.is_alive(), "the newer iterator waits for batches that the older one took"
    assert found == [[index, index + 1] for index in range(2, 40, 2)]
    with pytest.raises(IteratorEndedError):
        list(first)


def stopped(workers):
    """Stop processes, and give the function that has them go on."""
    for worker in workers:
        os.kill(worker.pid, signal.SIGSTOP)

    def go_on():
        for worker in workers:
            os.kill(worker.pid, signal.SIGCONT)

    return go_on


@pytest.mark.parametrize("stopped_s", [0.1, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("feed", ["plain", "ring"])
def test_workers_that_are_stopped_for_a_while_lose_nothing(feed, stopped_s, workers):
    batches = iter(streamed(DataLoader(Numbers(40), batch_size=2, num_workers=2), feed=feed))
    arrived = [next(batches).tolist()]
    going_on = threading.Timer(stopped_s, stopped(workers()))
    going_on.start()
    arrived.extend(batch.tolist() for batch in batches)
    going_on.join()
    assert arrived == [[index, index + 1] for index in range(0, 40, 2)]


@pytest.mark.parametrize("feed", ["plain", "ring"])
def test_leaving_while_a_worker_is_stopped(feed, workers, feeds, monkeypatch):
    monkeypatch.setattr(prefetch, "STOP_S", 0.02)
    monkeypatch.setattr(prefetch, "wake", lambda iterator: None)
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)  # DataLoader's wait for its workers to end
    loader = streamed(DataLoader(Numbers(40), batch_size=2, num_workers=1), feed=feed)
    batches = iter(loader)
    next(batches)
    (feed_iterator,) = internals.feed_iterators(loader)

    def waits():
        while feed_iterator.get(block=False) is not None:
            feed_iterator.refill()
        return waits_for_worker(internals.thread(feed_iterator))

    go_on = stopped(workers())
    try:
        until(waits)
        batches.close()
        assert values(loader) == [[index, index + 1] for index in range(0, 40, 2)]
    finally:
        go_on()
    until(lambda: not workers() and not feeds())


@pytest.mark.parametrize("feed", ["plain", "ring"])
def test_closing_one_of_two_loaders_over_one_dataloader_does_not_hang_the_other(feed):
    wrapped = DataLoader(Numbers(40), batch_size=2, num_workers=1, persistent_workers=True)
    first, second = streamed(wrapped, feed=feed), streamed(wrapped, feed=feed)
    assert next(iter(first)).tolist() == [0, 1]
    batches = iter(second)
    arrived = [next(batches).tolist()]
    first.close()

    def read():
        try:
            arrived.extend(batch.tolist() for batch in batches)
        except IteratorEndedError as error:
            return error
        return None

    (error,) = returned(read)
    everything = [[index, index + 1] for index in range(0, 40, 2)]
    assert arrived == (everything if error is None else everything[: len(arrived)])
    assert (error is None) == (feed == "ring"), "each ring has workers of its own"
    assert values(second) == values(first) == everything
    first.close()
    second.close()


class Reads:
    """An iterator that notices two threads within it."""

    def __init__(self):
        self.count = 0
        self.clashes = 0
        self._within = threading.Lock()

    def __iter__(self):
        return self

    def __next__(self):
        if not self._within.acquire(blocking=False):
            self.clashes += 1
            raise RuntimeError("two threads at once")
        time.sleep(0.01)
        self._within.release()
        self.count += 1
        if self.count > 12:
            raise StopIteration
        return torch.tensor(self.count)


def test_an_iterator_that_two_loops_share_has_one_reader():
    source = Reads()
    loader = streamed(source)
    first = iter(loader)
    assert next(first).item() == 1
    second = iter(loader)
    taken = next(second).item()
    assert taken > 1
    with pytest.raises(IteratorEndedError):
        next(first)
    assert [batch.item() for batch in second] == list(range(taken + 1, 13))
    assert source.clashes == 0


STALLS = [
    ("time.sleep(0.3)", 7, ""),
    (
        "os.read(os.pipe()[0], 1)",
        0.1,
        "The wrapped loader is still inside next() after 0 s. Its thread ends when next() returns.\n",
    ),
]


@pytest.mark.parametrize(("stall", "stop_s", "said"), STALLS, ids=["for a while", "for ever"])
def test_a_process_ends_although_an_iterator_is_open(stall, stop_s, said):
    script = f"""
import os, time, torch, gpuaug
from gpuaug.feed import prefetch  # a name of the program's, with which some modules go before the iterator

prefetch.STOP_S = {stop_s}

def slow():
    yield torch.tensor(0)
    {stall}
    yield torch.tensor(1)

batches = iter(gpuaug.StreamedLoader(slow(), device="cpu"))
print(next(batches).item())
"""
    done = processes.run_script(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", said)


def test_an_iterator_does_not_pass_for_complete_when_its_loader_was_closed():
    loader = streamed(torch.arange(20))
    batches = iter(loader)
    next(batches)
    loader.close()
    with pytest.raises(IteratorEndedError, match="its loader was closed or loaded a state"):
        list(batches)
    assert list(batches) == []


def test_close_may_be_called_at_any_time_and_often():
    loader = streamed(torch.arange(3))
    loader.close()
    assert values(loader) == [0, 1, 2]
    loader.close()
    loader.close()
    with loader as same:
        assert same is loader
        assert values(loader) == [0, 1, 2]
