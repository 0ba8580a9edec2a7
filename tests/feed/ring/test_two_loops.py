"""Iterators beside one another do not disturb each other."""

import multiprocessing
from dataclasses import replace

import pytest
import torch
from support.ring_comparing import assert_same
from support.ring_leaving import leave_by_break
from support.ring_sources import Samples, with_workers
from support.waiting import WAIT_S, until
from torch.utils.data import DataLoader

from gpuaug import IteratorEndedError, StreamedLoader

# What a finaliser raises nobody else hears of.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("which", ["one loader", "two loaders"])
def test_two_iterators_that_take_turns(which):
    wrapped = with_workers(Samples())()
    first = StreamedLoader(wrapped, device="cpu", feed="ring")
    second = first if which == "one loader" else StreamedLoader(wrapped, device="cpu", feed="ring")
    want = list(wrapped)
    for _ in range(2):
        found = list(zip(first, second, strict=True))
        assert_same([a for a, _ in found], want)
        assert_same([b for _, b in found], want)
    assert first.stats().slot_batches > 0
    leave_by_break(first)
    before = first.stats().slot_batches
    assert_same(list(first), want)
    assert first.stats().slot_batches > before


def test_an_iterator_that_goes_on_while_others_come_and_go():
    wrapped = with_workers(Samples())()
    loader = StreamedLoader(wrapped, device="cpu", feed="ring")
    want = list(wrapped)
    list(loader)
    batches = iter(loader)
    got = [next(batches)]
    for turn in range(4):
        assert_same(list(loader) if turn % 2 else [next(iter(loader))], want if turn % 2 else want[:1])
        got.extend(next(batches) for _ in range(2))
    got.extend(batches)
    assert_same(got, want)


class Blocked:
    """A collate function that waits at batch ``at`` of the first epoch until it is released. That epoch's batches are + 1000."""

    def __init__(self, at):
        self.at = at
        self.first_epoch = multiprocessing.Value("i", 1)
        self.released = multiprocessing.Event()

    def __call__(self, samples):
        first_epoch = self.first_epoch.value
        if first_epoch and samples[0] == self.at:
            self.released.wait(WAIT_S)
        return torch.full((1000,), samples[0] + 1000 * first_epoch)


def test_a_worker_that_is_still_busy_with_the_pass_before_writes_nothing_into_this_one(monkeypatch):
    monkeypatch.setattr("gpuaug.feed.prefetch.STOP_S", 0.02)
    collate, before = Blocked(16), set(multiprocessing.active_children())
    loader = StreamedLoader(
        DataLoader(range(40), num_workers=1, prefetch_factor=8, collate_fn=collate), device="cpu", feed="ring"
    )
    batches = iter(loader)
    for _ in range(16):
        next(batches)
    (old_worker,) = set(multiprocessing.active_children()) - before
    batches.close()
    collate.first_epoch.value = 0
    batches = iter(loader)
    got = [next(batches)]
    assert old_worker.is_alive()
    collate.released.set()  # the old worker writes its batch now, while batches of the new one wait
    until(lambda: not old_worker.is_alive())
    got.extend(batches)
    assert [batch.unique().tolist() for batch in got] == [[index] for index in range(40)]


def test_persistent_workers_have_one_reader():
    loader = StreamedLoader(with_workers(Samples(), persistent_workers=True)(), device="cpu", feed="ring")
    want = list(with_workers(Samples())())
    list(loader)
    for taken in range(9):
        first, second = iter(loader), iter(loader)
        for index in range(taken):
            assert_same(next(first), want[index])
        assert_same(next(second), want[0])
        if taken:
            with pytest.raises(IteratorEndedError, match="persistent_workers=False"):
                next(first)
        leave_by_break(second)
    before = replace(loader.stats())
    assert_same(list(loader), want)
    assert loader.stats().slot_batches - before.slot_batches == len(want), "no slot went with batches that nobody read"
    loader.close()
