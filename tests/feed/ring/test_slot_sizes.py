"""Batches of any size, and slots that take no more memory than they may."""

import pytest
import torch
from support import internals
from support.batches.containers import Encoding
from support.feed.ring_cleanup import ring_bytes
from support.feed.ring_equality import assert_ring_is_plain
from support.feed.ring_inputs import Source, any_bits, made, sized, values
from support.files.encoded import encoded
from torch.utils.data import DataLoader
from torchvision.tv_tensors import Image

from gpuaug import StreamedLoader, collate_encoded
from gpuaug.feed.ring_memory import DATA_OFFSET, batch_bytes

# What a finaliser raises nobody else hears of.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")

SIZES = {
    "changing": [(37 * i) % 11 * 1000 + 1 for i in range(24)],
    "growing": [1000 * (i + 1) for i in range(24)],
    "growing by far": [int(1.6**i) for i in range(26)],
    "shrinking": [100_000 // (i + 1) for i in range(24)],
    "one that is larger": [300_000 if i == 12 else 100 for i in range(24)],
    "empty at first": [0] * 8 + [5000] * 16,
    "around a page": [4096 + (i % 3) - 1 for i in range(24)],
}


TOO_LARGE = pytest.mark.filterwarnings("ignore:Batches of .* travel without slots")


@pytest.mark.parametrize(
    ("name", "persistent"),
    [
        *[("changing", False), ("growing", True), ("growing by far", False), ("shrinking", True), ("one that is larger", True)],
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("growing", False), ("shrinking", False)]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("empty at first", True), ("around a page", False)]),
    ],
)
def test_batch_sizes_may_change(name, persistent):
    make = sized(SIZES[name], num_workers=2 if persistent else 1, persistent_workers=persistent)
    assert_ring_is_plain(make, epochs=2)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("feed_bytes", [None, 50_000, 0])
@TOO_LARGE
def test_staged_batch_sizes_may_change(sizes, feed_bytes):
    def make():
        return Source(lambda i: (any_bits(i, torch.uint8, sizes[i]), torch.tensor(i)), len(sizes))

    assert_ring_is_plain(make, slots=feed_bytes != 0, feed_bytes=feed_bytes)


def test_tensors_that_are_never_in_slots_need_no_larger_slots():
    sizes = [*range(1000, 11_000, 1000), 500_000, 600_000]
    for kind in (Image, lambda tensor: Encoding(ids=tensor)):
        make = made(lambda i, kind=kind: (values(i, 1000), kind(values(i, 1, sizes[i]))), len(sizes), num_workers=1)
        with StreamedLoader(make(), device="cpu", feed="ring", feed_bytes=1 << 20) as loader:
            list(loader)
            before = loader.stats().slot_batches
            assert sum(1 for _ in loader) == len(sizes)
            assert loader.stats().slot_batches - before == len(sizes)


def test_grown_batches_use_slots_again():
    sizes = [1000] * 8 + [50_000] * 24
    _, stats = assert_ring_is_plain(sized(sizes), epochs=2)
    assert stats.slot_batches > 32 + 8, "all of the second epoch, and some larger ones of the first"


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, True), (2, False)])
def test_all_slots_of_growing_batches_stay_within_feed_bytes(workers, persistent):
    sizes = [int(50_000 * 1.3 ** (i // 5)) for i in range(40)]
    options = {"persistent_workers": persistent} if workers else {}
    loader = made(lambda i: torch.zeros(sizes[i], dtype=torch.uint8), len(sizes), num_workers=workers, **options)()
    assert_slots_stay_within(1_000_000, loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_all_slots_of_growing_encoded_batches_stay_within_feed_bytes(workers):
    sides = [int((50_000 / 3 * 1.3 ** (i // 5)) ** 0.5) for i in range(40)]
    files = [encoded(side, side, "BMP") for side in sides]
    assert_slots_stay_within(1_000_000, DataLoader(files, 1, collate_fn=collate_encoded, num_workers=workers))


def assert_slots_stay_within(budget, loader):
    """The first slots take nearly all of the budget, so larger ones have to wait until these can be given back.

    How many batches of the first pass find a slot depends on how far ahead workers are when slots are carved.
    """
    with StreamedLoader(loader, device="cpu", feed="ring", feed_bytes=budget) as streamed:
        most, largest, slot_bytes = 0, 0, []
        for _ in range(2):
            for batch in streamed:
                most, largest = max(most, ring_bytes()), max(largest, batch_bytes(batch))
            slot_bytes.append(internals.ring(streamed).memory.newest_generation()[2])
        before = streamed.stats().slot_batches
        for _ in streamed:
            most = max(most, ring_bytes())
        assert streamed.stats().slot_batches > before
    assert 0 < most <= budget + DATA_OFFSET + 4096
    assert slot_bytes[0] < largest <= slot_bytes[1], "the second pass has slots that hold the largest batches"


@pytest.mark.parametrize("feed_bytes", [0, 4095])
@TOO_LARGE
def test_feed_bytes_too_small_for_any_slot(feed_bytes):
    assert_ring_is_plain(made(lambda i: values(i, 5000)), slots=False, feed_bytes=feed_bytes)


@pytest.mark.parametrize(("workers", "slots"), [(1, True), (2, False)])
@TOO_LARGE
def test_feed_bytes_of_one_slot(workers, slots):
    num_bytes = 8 * 4096
    make = made(lambda i: any_bits(i, torch.uint8, num_bytes), 40, num_workers=workers)
    assert_ring_is_plain(make, slots=slots, feed_bytes=num_bytes)


@TOO_LARGE
def test_feed_bytes_that_only_small_batches_fit():
    sizes = [1000 if i % 3 else 500_000 for i in range(1, 25)]
    assert_ring_is_plain(sized(sizes), feed_bytes=300_000)
