"""Sources without workers: their batches are staged in slots by this process."""

import gc
import threading
import weakref

import pytest
import torch
from support import internals
from support.feed.ring_cleanup import failure, leave_by_break
from support.feed.ring_equality import assert_ring_is_plain, assert_same
from support.feed.ring_inputs import COUNT, NOT_PLACED, PLACED, Samples, Source, generator, padded, values
from support.process.waiting import until
from torch.utils.data import DataLoader

from gpuaug import StreamedLoader
from gpuaug.core.streams import Event

# What a finaliser raises nobody else hears of.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("make", PLACED.values(), ids=PLACED.keys())
def test_staged_batch_of_any_type_arrives_bit_for_bit(make):
    _, stats = assert_ring_is_plain(lambda: Source(make))
    assert stats.other_batches <= 1 or make is PLACED["other mappings"] or make is PLACED["tuple"], stats


@pytest.mark.parametrize("make", NOT_PLACED.values(), ids=NOT_PLACED.keys())
def test_batch_without_plain_tensors_is_not_staged(make):
    assert_ring_is_plain(lambda: Source(make), slots=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (values(index, 3) for index in range(COUNT)),
        lambda: map(torch.tensor, range(COUNT)),
        lambda: DataLoader(Samples(), batch_size=2),
        lambda: DataLoader(Samples(), batch_size=None),
        lambda: DataLoader(Samples(), batch_size=2, shuffle=True, collate_fn=padded, generator=generator()),
        lambda: torch.arange(COUNT),
    ],
    ids=["generator", "map", "no workers", "no batches", "shuffled", "tensor"],
)
def test_sources_without_workers_are_staged(make):
    assert_ring_is_plain(make)


def test_generator_error_is_the_same_as_with_plain_feed():
    def failing():
        for index in range(9):
            yield values(index, 3)
        raise LookupError("nine")

    plain, through_ring = (failure(StreamedLoader(failing(), device="cpu", feed=feed)) for feed in ("plain", "ring"))
    assert_same(through_ring[0], plain[0])
    assert through_ring[1] == plain[1]
    assert through_ring[1][3] == ["gpuaug: raised by the wrapped loader, at batch 9 of epoch 0."]


def test_endless_generator_can_be_left(held):
    threads = set(threading.enumerate())
    loader = StreamedLoader((torch.full((1000,), index) for index in iter(int, 1)), device="cpu", feed="ring")
    leave_by_break(loader)
    assert set(threading.enumerate()) <= threads
    assert held()
    del loader
    gc.collect()
    assert not held()


def test_dropped_batch_is_freed():
    class Kept:
        pass

    watched = []

    def source():
        for index in range(20):
            kept = Kept()
            watched.append(weakref.ref(kept))
            yield values(index, 3), kept

    for index, batch in enumerate(StreamedLoader(source(), device="cpu", feed="ring")):
        del batch
        alive = sum(ref() is not None for ref in watched)
        assert alive <= 5, index
    gc.collect()
    assert not any(ref() is not None for ref in watched)


class Owner:
    """A source that is in its batches, and refers to its loader."""

    def __iter__(self):
        for index in range(COUNT):
            yield {"image": values(index, 100), "owner": self}


def test_ring_is_deleted_although_a_batch_refers_to_the_loader(monkeypatch):
    monkeypatch.setattr(Event, "query", lambda _: False)  # the device has not passed the last copy
    owner = Owner()
    owner.loader = StreamedLoader(owner, device="cpu", feed="ring")
    list(owner.loader)
    list(owner.loader)
    reference = weakref.ref(internals.ring(owner.loader))
    del owner
    gc.collect()
    until(lambda: reference() is None)
