"""Iterators beside one another do not disturb each other."""

import multiprocessing
from dataclasses import replace

import pytest
import torch
from support import internals
from support.feed.ring_cleanup import leave_by_break
from support.feed.ring_equality import assert_same
from support.feed.ring_inputs import Samples, with_workers, without_workers
from support.process.waiting import WAIT_S, until, waits_for_worker
from torch.utils.data import DataLoader

from gpuaug import IteratorEndedError, StreamedLoader
from gpuaug.feed.mailbox import QUEUED

# What a finaliser raises nobody else hears of.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("which", ["one loader", "two loaders"])
def test_two_interleaved_iterators(which):
    wrapped = with_workers(Samples(), num_workers=1)()
    first = StreamedLoader(wrapped, device="cpu", feed="ring")
    second = first if which == "one loader" else StreamedLoader(wrapped, device="cpu", feed="ring")
    want = list(without_workers(with_workers(Samples()))())
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
    loader = StreamedLoader(with_workers(Samples(), num_workers=1)(), device="cpu", feed="ring")
    want = list(without_workers(with_workers(Samples()))())
    list(loader)
    batches = iter(loader)
    got = [next(batches)]
    for turn in range(2):
        assert_same(list(loader) if turn % 2 else [next(iter(loader))], want if turn % 2 else want[:1])
        got.extend(next(batches) for _ in range(2))
    got.extend(batches)
    assert_same(got, want)


class Blocked:
    """A collate function whose batch 1 waits, while ``blocks`` is set, until it is released. What it then makes is + 1000."""

    def __init__(self):
        self.blocks, self.made = multiprocessing.Value("i", 0), multiprocessing.Value("i", 0)
        self.reached, self.released = multiprocessing.Event(), multiprocessing.Event()

    def __call__(self, samples):
        blocks = self.blocks.value
        if blocks and samples[0] == 1:
            self.reached.set()
            self.released.wait(WAIT_S)
        self.made.value += 1 - blocks
        return torch.full((1000,), samples[0] + 1000 * blocks)


def test_late_write_of_previous_epochs_worker_does_not_reach_new_batches(monkeypatch):
    monkeypatch.setattr("gpuaug.feed.prefetch.STOP_S", 0.02)
    monkeypatch.setattr("gpuaug.feed.prefetch.wake", lambda iterator: None)  # or the worker would be ended with its epoch
    collate, before = Blocked(), set(multiprocessing.active_children())
    loader = StreamedLoader(
        DataLoader(range(40), num_workers=1, prefetch_factor=8, collate_fn=collate), device="cpu", feed="ring"
    )
    list(loader)  # carves the slots
    until(lambda: set(multiprocessing.active_children()) <= before)
    collate.blocks.value = 1
    left = loader._begin()
    assert collate.reached.wait(WAIT_S)  # the worker has taken its second slot
    until(lambda: left.feed_iterator._mailbox._items.qsize() == 1)
    until(lambda: waits_for_worker(internals.thread(left.feed_iterator)))
    (old_worker,) = set(multiprocessing.active_children()) - before
    left.close()
    collate.blocks.value = collate.made.value = 0
    before = loader.stats().slot_batches
    batches = iter(loader)
    got = [next(batches) for _ in range(6)]
    # By now the new worker would have filled that slot again, with a batch that waits to be read.
    until(lambda: collate.made.value == 8 + len(got) + QUEUED)
    assert old_worker.is_alive()
    collate.released.set()
    until(lambda: not old_worker.is_alive())
    got.extend(batches)
    assert [batch.unique().tolist() for batch in got] == [[index] for index in range(40)]
    assert loader.stats().slot_batches > before, "the new worker has slots of its own"


def test_new_iterator_takes_over_persistent_workers():
    loader = StreamedLoader(with_workers(Samples(), persistent_workers=True)(), device="cpu", feed="ring")
    want = list(without_workers(with_workers(Samples()))())
    list(loader)
    for taken in (0, 1, 4, 8):
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
