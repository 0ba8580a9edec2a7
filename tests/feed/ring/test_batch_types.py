"""Whatever a batch is made of, it arrives through slots as it would without them."""

from multiprocessing.reduction import ForkingPickler
from pickle import loads

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches.nested_batches import NESTED
from support.feed.overridden_loaders import AsTheyAre
from support.feed.ring_equality import assert_ring_is_plain, assert_same
from support.feed.ring_inputs import NOT_PLACED, PLACED, NoList, made, target_dicts, twice, values
from torch.utils.data import DataLoader

from gpuaug import StreamedLoader
from gpuaug.core import packed_targets
from gpuaug.core.packed_targets import unpack_targets
from gpuaug.feed import ring
from gpuaug.feed.worker import SlotCollate

# What a finaliser raises nobody else hears of.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


def in_turn(kinds, kind=DataLoader):
    """A loader with one worker whose batches are of each of some kinds, three times, and the name of the kind of each batch."""
    names = list(kinds) * 3
    return made(lambda i: kinds[names[i]](i // len(kinds) + 1), len(names), kind, num_workers=1), names


@pytest.mark.parametrize("kind", [DataLoader, AsTheyAre])
def test_batch_of_any_container_or_dtype_arrives_bit_for_bit(kind):
    make, names = in_turn({"largest": PLACED["one large one"], **PLACED}, kind)
    want, through_slots, count = list(make()), set(), 0
    with StreamedLoader(make(), device="cpu", feed="ring", depth=0) as loader:
        for name, batch, plain in zip(names, loader, want, strict=True):
            assert_same(batch, plain, name)
            if loader.stats().slot_batches > count:
                count += 1
                through_slots.add(name)
    assert through_slots >= set(PLACED), set(PLACED) - through_slots


def test_batch_without_plain_tensors_uses_no_slot():
    make, _ = in_turn(NOT_PLACED)
    assert_ring_is_plain(make, slots=False)


def test_shared_tensor_stays_shared():
    (batches,), _ = assert_ring_is_plain(made(twice, num_workers=1))
    assert all(batch["first"] is batch["again"][0] is batch["again"][1][0] for batch in batches)


def test_staged_boxes_of_torchvision_come_through_slots():
    batches = [[{"boxes": each["boxes"]} for each in target_dicts(number, 12)] for number in range(4)]
    with StreamedLoader(iter(batches), device="cpu", feed="ring") as loader:
        assert_same(list(loader), batches)
        assert loader.stats().slot_batches > 0


def test_worker_without_slots_sends_target_dicts_packed():
    own = ring.Ring(1, 2, 1 << 20)
    try:
        sent = SlotCollate(lambda samples: (torch.ones(2), samples), own.memory)(target_dicts(1))
        assert type(sent[1]) is packed_targets.PackedTargets
    finally:
        own.close()


def test_batches_share_no_memory_with_slots():
    (batches, again), _ = assert_ring_is_plain(made(lambda i: (values(i, 5), values(i, 5)), num_workers=1), epochs=2)
    for batch in batches:
        for tensor in batch:
            tensor.fill_(-1)
    assert all((tensor >= 0).all() for batch in again for tensor in batch)
    addresses = [tensor.data_ptr() for epoch in (batches, again) for batch in epoch for tensor in batch]
    assert len(set(addresses)) == len(addresses)


def test_container_that_cannot_be_rebuilt_uses_no_slot():
    got, _ = assert_ring_is_plain(made(lambda i: NoList(values(i, 2), i), num_workers=1), slots=False)
    assert type(got[0][0]) is NoList


@pytest.fixture
def _every_list_of_dicts_is_packed(monkeypatch):
    monkeypatch.setattr(packed_targets, "MIN_PACKED_TENSORS", 1)


@pytest.mark.usefixtures("_every_list_of_dicts_is_packed")
@settings(max_examples=12)
@given(st.lists(NESTED, min_size=1, max_size=4))
def test_any_staged_batch_arrives_bit_for_bit(batches):
    loader = StreamedLoader(iter(batches), device="cpu", feed="ring", feed_bytes=1 << 20)
    assert_same(list(loader), batches)
    loader.close()


@pytest.mark.usefixtures("_every_list_of_dicts_is_packed", "_reads_for_feed")
@settings(max_examples=25)
@given(st.lists(NESTED, min_size=1, max_size=4), st.integers(0, 3))
def test_any_batch_survives_describe_pickle_and_receive(batches, room):
    # Within one process: what a worker does, the queue's pickling, and what arrives.
    own = ring.Ring(1, 2, 1 << 20)
    try:
        own.make_room(batches[min(room, len(batches) - 1)])
        for batch in batches:
            writer = own.memory.take_slot(0)
            if writer is None:
                continue
            sent = loads(bytes(ForkingPickler.dumps(writer.describe(batch) or batch)))
            assert_same(unpack_targets(sent), batch)
            del sent
        assert not own.memory.slots_in_use
        assert own.memory.newest_generation()[0] == 0 or own.memory.take_slot(0) is not None, "every slot is free again"
    finally:
        own.close()
