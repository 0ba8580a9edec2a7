"""Iterators beside one another do not disturb each other."""

import multiprocessing
from dataclasses import replace

import pytest
import torch
from support.ring_cleanup import leave_by_break
from support.ring_equality import assert_same
from support.ring_inputs import Samples, with_workers
from support.waiting import WAIT_S, until
from torch.utils.data import DataLoader

from gpuaug import IteratorEndedError, StreamedLoader

# What a finaliser raises nobody else hears of.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("which", ["one loader", "two loaders"])
def test_two_interleaved_iterators(which):
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


def test_iterator_continues_while_others_begin_and_end():
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
    """Collates 1000 + n in the first epoch, n later. The first epoch's batch ``at`` waits until it is released."""

    def __init__(self, at):
        self.at = at
        self.first_epoch = multiprocessing.Value("i", 1)
        self.released = multiprocessing.Event()

    def __call__(self, samples):
        first_epoch = self.first_epoch.value
        if first_epoch and samples[0] == self.at:
            self.released.wait(WAIT_S)
        return torch.full((1000,), samples[0] + 1000 * first_epoch)


def test_late_write_of_previous_epochs_worker_does_not_reach_new_batches(monkeypatch):
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


def test_new_iterator_takes_over_persistent_workers():
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
