"""The ring has slots for the depth that the loader has as a pass begins."""

import os
from functools import cache

import pytest
import torch
from support import internals
from support.feed.ring_equality import assert_same
from support.feed.ring_inputs import COUNT, Samples, Source, generator, with_workers, without_workers
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from gpuaug import StreamedLoader, TransformStage
from gpuaug.feed import ring_memory

# What a finaliser raises nobody else hears of.
pytestmark = [
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]

SOURCES = {
    "workers": with_workers(Samples()),
    "three workers": with_workers(Samples(), num_workers=3, prefetch_factor=1),
    "persistent workers": with_workers(Samples(), persistent_workers=True),
    "one persistent worker": with_workers(Samples(), num_workers=1, persistent_workers=True),
    "no workers": lambda: DataLoader(Samples(), batch_size=2),
    "another iterable": lambda: Source(lambda index: torch.full((5,), index)),
    "a loader with a state": lambda: StatefulDataLoader(Samples(), batch_size=2, num_workers=2),
}


def slots(loader):
    """Number of slots of a worker."""
    return internals.ring(loader).memory.newest_generation()[3]


@cache
def slots_at(name, depth, **options):
    """The same of a loader over a source that was made with this depth."""
    with StreamedLoader(SOURCES[name](), device="cpu", feed="ring", depth=depth, **options) as loader:
        list(loader)
        return slots(loader)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "three workers" else ())
        for name in SOURCES
        if name != "one persistent worker"
    ],
)
def test_a_larger_depth_has_as_many_slots_as_if_it_had_been_given_at_first(name):
    make = SOURCES[name]
    want = list(without_workers(make)())
    with StreamedLoader(make(), device="cpu", feed="ring", depth=0) as loader:
        assert_same(list(loader), want)
        assert slots(loader) < slots_at(name, 6)
        loader.depth = 6
        before = loader.stats().slot_batches
        for _ in range(2):
            assert_same(list(loader), want)
        assert slots(loader) == slots_at(name, 6)
        assert loader.stats().slot_batches > before


@pytest.mark.parametrize("name", ["persistent workers", "no workers"])
def test_a_smaller_depth_keeps_its_ring(name):
    make = SOURCES[name]
    with StreamedLoader(make(), device="cpu", feed="ring", depth=6) as loader:
        list(loader)
        ring = internals.ring(loader)
        loader.depth = 1
        assert_same(list(loader), list(without_workers(make)()))
        assert internals.ring(loader) is ring
        assert slots(loader) == slots_at(name, 6)


def workers(loader):
    return [worker.pid for worker in internals.shared(loader).feed._ring_iterator._workers]


def test_persistent_workers_go_on_and_the_memory_of_fewer_slots_is_given_back():
    def make():
        return with_workers(Samples(), persistent_workers=True, shuffle=True, generator=generator())()

    plain = make()
    want = [list(plain) for _ in range(3)]
    with StreamedLoader(make(), device="cpu", feed="ring", depth=0) as loader:
        got, running = [list(loader)], workers(loader)
        for depth in (3, 9):
            loader.depth = depth
            got.append(list(loader))
        assert_same(got, want)
        assert workers(loader) == running
        memory = internals.ring(loader).memory
        number, _, slot_bytes, each = memory.newest_generation()
        assert number == 3
        assert [memory.generation(generation)[2] for generation in (1, 2)] == [0, 0]
        taken_bytes = os.stat(memory.fd).st_blocks * 512
        # What lies before the slots, and the slots of two workers.
        assert taken_bytes <= ring_memory.DATA_OFFSET + 2 * each * slot_bytes


def test_an_iterator_that_is_open_on_persistent_workers_is_taken_over_by_one_of_another_depth():
    make = with_workers(Samples(), persistent_workers=True)
    want = list(without_workers(make)())
    with StreamedLoader(make(), device="cpu", feed="ring", depth=0) as loader:
        list(loader)
        for depth in (2, 8):
            older = iter(loader)
            next(older)
            loader.depth = depth
            assert_same(list(loader), want)


@pytest.mark.parametrize("name", ["workers", "no workers"])
def test_an_iterator_that_is_open_keeps_its_slots(name):
    make = SOURCES[name]
    want = list(without_workers(make)())
    with StreamedLoader(make(), device="cpu", feed="ring", depth=1) as loader:
        list(loader)
        older = iter(loader)
        got = [next(older)]
        loader.depth = 6
        assert_same(list(loader), want)
        got.extend(older)
        assert_same(got, want)
        assert_same(list(loader), want)
        assert slots(loader) == slots_at(name, 6)


@pytest.mark.parametrize("name", [pytest.param("workers", marks=pytest.mark.slow), "persistent workers"])
def test_the_budget_holds_at_every_depth(name):
    make = SOURCES[name]
    with StreamedLoader(make(), device="cpu", feed="ring", depth=0, feed_bytes=60_000) as loader:
        list(loader)
        loader.depth = 20
        assert_same(list(loader), list(without_workers(make)()))
        assert slots(loader) == slots_at(name, 20, feed_bytes=60_000) < slots_at(name, 20)


def test_a_loader_whose_depth_was_changed_before_its_first_pass():
    make = SOURCES["workers"]
    with StreamedLoader(make(), [TransformStage(lambda image: image + 1, on="image")], device="cpu", feed="ring") as loader:
        loader.depth = 6
        assert len(list(loader)) == COUNT + 1
        assert slots(loader) == slots_at("workers", 6)


def test_a_ring_that_can_grow_no_more_says_what_to_type(caplog):
    make = SOURCES["one persistent worker"]
    want = list(without_workers(make)())
    with StreamedLoader(make(), device="cpu", feed="ring", depth=0) as loader:
        for depth in range(9):
            loader.depth = depth
            assert_same(list(loader), want)
        assert caplog.messages == [
            "Workers have 15 slots each, fewer than the 16 for this depth, because the slots of a ring can be changed only 8 "
            "times. Call loader.close() between two loops: workers then start again with a new ring."
        ]
        assert slots(loader) == 15
        loader.close()
        assert_same(list(loader), want)
        assert slots(loader) == slots_at("one persistent worker", 8) == 16
