"""Images of every size, packed by workers into the slots that the device reads."""

from functools import partial
from pickle import dumps, loads
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
import torch
from support import internals
from support.feed.ring_equality import assert_ring_is_plain, assert_same, passes
from support.feed.ring_inputs import NoList, Opaque, without_workers
from torch.utils.data import DataLoader, Dataset

from gpuaug import Ragged, StreamedLoader, collate_ragged
from gpuaug.feed import ring, ring_memory
from gpuaug.feed import worker as worker_module
from gpuaug.feed.collate_members import allocating_with

# What a finaliser raises nobody else hears of.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


class Photos(Dataset):
    """Photographs of random sizes and kinds, with targets."""

    def __init__(self, count=26, most=40):
        self.count, self.most = count, most

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        random = np.random.default_rng(index)
        height, width = random.integers(1, self.most, 2)
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        kind = index % 3
        image = PIL.Image.fromarray(pixels) if kind == 0 else pixels if kind == 1 else torch.from_numpy(pixels).permute(2, 0, 1)
        return {"image": image, "label": index, "target": {"boxes": torch.ones(index % 4, 4)}}


class Sized(Dataset):
    """One grey image of a given size each."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        return np.full((self.sizes[index], 1), index % 256, np.uint8)


def lie_in_a_slot(*tensors):
    """Asked in a worker: whether tensors are in the memory that it shares with the loader's process."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps if "gpuaug-ring" in line]
    return all(any(start <= tensor.data_ptr() < end for start, end in spans) for tensor in tensors)


def telling(samples, **options):
    """A user's own collate function, which calls ours."""
    images = collate_ragged(samples, **options)
    return {"images": images, "packed there": lie_in_a_slot(images.data, images.places)}


def loader_of(dataset, collate_fn=collate_ragged, kind=DataLoader, **options):
    return lambda: kind(dataset, collate_fn=collate_fn, **{"batch_size": 4, "num_workers": 2, **options})


def assert_whole(batches, dataset, batch_size=4):
    """Every batch, against the samples that it was made of."""
    count = 0
    for number, batch in enumerate(batches):
        assert type(batch["image"]) is Ragged
        assert len(batch["image"]) == len(batch["target"]) == len(batch["label"])
        for place, image in enumerate(batch["image"]):
            sample = dataset[number * batch_size + place]
            assert np.array_equal(image.numpy(), planes(sample))
            assert batch["label"][place] == sample["label"]
            assert torch.equal(batch["target"][place]["boxes"], sample["target"]["boxes"])
            count += 1
    assert count == len(dataset)


def planes(sample):
    image = sample["image"]
    return image.numpy() if isinstance(image, torch.Tensor) else np.asarray(image).transpose(2, 0, 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"persistent_workers": True},
    ],
    ids=["forked", "persistent"],
)
def test_ragged_batches_through_slots_match_plain_feed(options):
    make = loader_of(Photos(), **options)
    epochs, _ = assert_ring_is_plain(make, epochs=2)
    for batches in epochs:
        assert len(batches[-1]["image"]) == 2, "the last batch is partial"
        assert_whole(batches, Photos())


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_ragged_batches_of_workers_that_are_not_forked_from_here_arrive_through_slots(method):
    make = loader_of(Photos(), persistent_workers=True, num_workers=1, multiprocessing_context=method)
    epochs, stats, _ = passes(make, "ring", epochs=2)
    for batches in epochs:
        assert_whole(batches, Photos())
    assert stats.slot_batches > len(epochs[0])


def test_ragged_batches_without_workers_are_staged():
    epochs, _ = assert_ring_is_plain(loader_of(Photos(), num_workers=0))
    assert_whole(epochs[0], Photos())


def test_collate_ragged_within_own_collate_fn_packs_into_slots():
    make = loader_of(Sized([50] * 64), partial(telling, channels=1), num_workers=1)
    with StreamedLoader(make(), device="cpu", feed="ring") as loader:
        told = [batch["packed there"] for batch in loader]
    assert not told[0], "nobody knew a batch's size"
    assert all(told[-8:])


SIZES = {
    "of a few images": np.random.default_rng(0).lognormal(8, 2, 40).astype(int) + 1,  # that differ by a factor of thousands
    "growing slowly": (10_000 * 1.03 ** np.arange(32)).astype(int),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_slots_grow_with_ragged_batches(sizes):
    make = loader_of(Sized(sizes.tolist()), partial(telling, channels=1), batch_size=1, persistent_workers=True)
    with StreamedLoader(make(), device="cpu", feed="ring") as loader:
        told = [[batch["packed there"] for batch in loader] for _ in range(2)]
        generations, *_ = ring.rings[max(ring.rings)].memory.newest_generation()
    assert 1 < generations < ring_memory.MAX_GENERATIONS
    assert all(told[1])


@pytest.mark.filterwarnings("ignore:Batches of .* travel without slots")
def test_ragged_batch_larger_than_budget_uses_no_slot():
    sizes = [500] * 24 + [90_000] * 4 + [500] * 24
    make = loader_of(Sized(sizes), partial(telling, channels=1), num_workers=1)
    (got,), stats, _ = passes(make, "ring", feed_bytes=100_000)
    assert_same([batch["images"] for batch in got], [batch["images"] for batch in without_workers(make)()])
    told = [batch["packed there"] for batch in got]
    assert not told[6], "it is larger than all slots together"
    assert all(told[7:])
    assert stats.slot_batches > 6


def opaque(samples):
    """Images in an object that nobody looks into."""
    return Opaque(collate_ragged(samples, channels=1).data[:50])


def beside_an_opaque(samples):
    images = collate_ragged(samples, channels=1)
    return images, Opaque(images.data[:50])


def in_no_list(samples):
    return NoList(collate_ragged(samples, channels=1), len(samples))


def views(samples):
    """Only a part of what was packed, which does not fit behind it."""
    images = collate_ragged(samples, channels=1)
    return images.data[10:].view(-1, 10), images.data[1:]


@pytest.mark.parametrize("collate_fn", [opaque, beside_an_opaque, in_no_list, views])
def test_own_collate_fn_may_wrap_or_view_packed_images(collate_fn):
    count = 20
    make = loader_of(Mixed(count), partial(sometimes_plain, collate_fn=collate_fn), num_workers=1)
    want = list(without_workers(make)())
    (got,), stats, _ = passes(make, "ring", feed_bytes=1 << 20)
    assert stats.slot_batches > 0
    for a, b in zip(got, want, strict=True):
        assert_same([read(leaf) for leaf in parts(a)], [read(leaf) for leaf in parts(b)])
        for leaf in parts(a):
            if type(leaf) is Opaque:
                assert leaf.value.untyped_storage().nbytes() < 1000, "it has brought the whole ring with it"


class Mixed(Sized):
    def __init__(self, count):
        super().__init__([50] * 4 * count)


def sometimes_plain(samples, collate_fn):
    """Now and then a batch that shows its size, so that there are slots."""
    return torch.zeros(2000) if samples[0][0] % 5 == 0 else collate_fn(samples)


def parts(batch):
    return list(batch) if isinstance(batch, tuple) else [batch]


def read(leaf):
    return leaf.value if type(leaf) is Opaque else leaf


def test_packed_images_are_copied_out_of_a_released_slot(monkeypatch):
    monkeypatch.setattr(worker_module, "get_worker_info", lambda: SimpleNamespace(id=0))
    own = ring.Ring(1, 2, 1 << 20)
    own.make_room(torch.zeros(2000))
    collate = worker_module.SlotCollate(in_no_list, own.memory)
    first, second = (collate([np.full((5, 4), value, np.uint8)]) for value in (1, 2))
    assert first[0].data.tolist() == [1] * 20
    assert second[0].data.tolist() == [2] * 20
    assert sum(own.memory.take_slot(0) is not None for _ in range(3)) == 2
    own.close()


@pytest.mark.usefixtures("_reads_for_feed")
def test_packed_images_are_described_without_copy():
    samples = [(np.full((height, 7, 3), height, np.uint8), height) for height in (3, 9, 5)]
    want = collate_ragged(samples)
    own = ring.Ring(1, 2, 1 << 20)
    own.make_room(want)
    writer = own.memory.take_slot(0)
    with allocating_with(writer.allocate):
        batch = collate_ragged(samples)
    placed = {tensor.data_ptr() for tensor, _ in internals.tensors(writer).values()}
    assert {batch[0].data.data_ptr(), batch[0].places.data_ptr()} == placed
    described = writer.describe(batch)
    assert {type(batch[0].data), type(described.batch[0].data), type(described.batch[0].places)} == {
        torch.Tensor,
        ring_memory.TensorInSlot,
    }
    assert type(described.batch[0]) is Ragged
    assert len(internals.tensors(writer)) == 3, "the labels were copied, the images were there"
    got = loads(dumps(described))
    assert_same(got, want)
    batch[0].data[0] = 77
    assert got[0].data[0] == 77
    del got
    own.close()


def in_shared_memory(samples):
    images = collate_ragged(samples, channels=1)
    return images.data.is_shared() and images.places.is_shared(), images


def test_worker_without_slot_packs_into_shared_memory():
    batches = list(loader_of(Sized([50] * 8), in_shared_memory)())
    assert [shared for shared, _ in batches] == [True, True]
    assert_same(
        [images for _, images in batches],
        [images for _, images in loader_of(Sized([50] * 8), in_shared_memory, num_workers=0)()],
    )
    assert not collate_ragged([np.zeros((2, 3), np.uint8)], channels=1).data.is_shared()


def test_allocating_with_ends_with_its_block():
    calls = []
    with allocating_with(lambda *asked: calls.append(asked)):
        inside = collate_ragged([np.zeros((2, 3), np.uint8)], channels=1)
    outside = collate_ragged([np.zeros((2, 3), np.uint8)], channels=1)
    assert calls == [((6,), torch.uint8), ((1, 3), torch.int64)]
    assert_same(inside, outside)
