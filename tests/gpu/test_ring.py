"""The ring on a card: slots are read before they are written again, and their memory is let go of."""

import multiprocessing
import os
import signal
from collections import deque
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from support import internals
from support.comparison.values import assert_values
from support.feed.poison import overwrite_freed_slots
from torch.utils.data import DataLoader, Dataset

import gpuaug
from gpuaug import Ragged
from gpuaug.core.packed_targets import unpack_targets
from gpuaug.feed import feed
from gpuaug.stages.copy import Copier

pytestmark = pytest.mark.gpu


class Samples(Dataset):
    """Images that differ, each with its index."""

    def __init__(self, length=120, side=64):
        self.length, self.side = length, side

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, (3, self.side, self.side), dtype=torch.uint8, generator=generator), index


class Growing(Samples):
    """Batches of one size, then of a larger one."""

    def __getitem__(self, index):
        self.side = 64 if index < 60 else 96
        return super().__getitem__(index)


def reference(dataset):
    return list(DataLoader(dataset, 4))


def assert_equal(got, expected):
    assert len(got) == len(expected)
    for (images, labels), (want, want_labels) in zip(got, expected, strict=True):
        assert_values(images.cpu(), want)
        assert_values(labels.cpu(), want_labels)


class Buffering(DataLoader):
    """Returns each batch after it has read the next three."""

    def __iter__(self):
        kept = deque()
        for batch in super().__iter__():
            kept.append(batch)
            if len(kept) > 3:
                yield kept.popleft()
        while kept:
            yield kept.popleft()


@pytest.mark.parametrize("depth", [0, 2, 5])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [DataLoader, Buffering])
def test_slots_are_not_overwritten_before_they_are_read(monkeypatch, depth, persistent, kind):
    overwrite_freed_slots(monkeypatch)
    make_current = gpuaug.core.streams.Lane.make_current

    def delayed(lane):
        make_current(lane)
        torch.cuda._sleep(3_000_000)  # before each copy and stage: what is freed too early is poisoned by then

    monkeypatch.setattr(gpuaug.core.streams.Lane, "make_current", delayed)
    wrapped = kind(Samples(), 4, num_workers=3, persistent_workers=persistent, pin_memory=True)
    with gpuaug.StreamedLoader(wrapped, depth=depth) as loader:
        for _ in range(2):
            assert_equal(list(loader), reference(Samples()))
        assert loader.stats().slot_batches > 30


def test_poison_reveals_slot_released_too_early(monkeypatch):
    overwrite_freed_slots(monkeypatch)
    monkeypatch.setattr(feed.Feed, "free_after", lambda self, pulled, mark: setattr(pulled, "slot", None))
    make_current = gpuaug.core.streams.Lane.make_current

    def delayed(lane):
        make_current(lane)
        torch.cuda._sleep(20_000_000)

    monkeypatch.setattr(gpuaug.core.streams.Lane, "make_current", delayed)
    with gpuaug.StreamedLoader(DataLoader(Samples(), 4, num_workers=3)) as loader:
        got = list(loader)
    assert any(not torch.equal(images.cpu(), want) for (images, _), (want, _) in zip(got, reference(Samples()), strict=True))


def test_growing_batches_get_larger_slots():
    with gpuaug.StreamedLoader(DataLoader(Growing(), 4, num_workers=2)) as loader:
        for _ in range(2):
            assert_equal(list(loader), reference(Growing()))
        assert internals.ring(loader).memory.newest_generation()[0] == 2


def test_slots_are_page_locked_until_close(monkeypatch):
    loader = gpuaug.StreamedLoader(DataLoader(Samples(), 4, num_workers=2))
    list(loader)
    made, released = internals.ring(loader), []
    registered = {address for address, _ in internals.page_locked_slots(made).values()}
    assert registered
    assert loader.stats().pinned_bytes == sum(size for _, size in internals.page_locked_slots(made).values())
    unregister = torch.cuda.cudart().cudaHostUnregister

    def release(address):
        released.append((address, int(unregister(address))))
        return 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostUnregister=release))
    loader.close()
    assert dict(released) == dict.fromkeys(registered, 0)
    assert loader.stats().pinned_bytes == 0
    assert not internals.page_locked_slots(made)


def test_batches_are_right_after_workers_were_killed_again_and_again():
    """A ``DataLoader`` raises from its signal handler that a worker died, wherever the training thread is."""
    want = reference(Samples())
    for number in range(20):
        loader = gpuaug.StreamedLoader(DataLoader(Samples(), 4, num_workers=2), [lambda images: images * 1])
        with suppress(RuntimeError, OSError):
            for index, _ in enumerate(loader):
                if index == number % 4:
                    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        loader.close()
        with gpuaug.StreamedLoader(DataLoader(Samples(), 4, num_workers=2), [lambda images: images * 1]) as after:
            assert_equal(list(after), want)
            assert after.stats().slot_batches


def test_generator_with_pageable_batches_is_staged():
    def batches():
        for index in range(12):
            yield torch.full((256, 1024), float(index))

    loader = gpuaug.StreamedLoader(batches())
    assert [batch[0, 0].item() for batch in loader] == list(range(12))
    assert loader.stats().slot_batches >= 8
    pinned = gpuaug.StreamedLoader(batch.pin_memory() for batch in batches())
    assert [batch[0, 0].item() for batch in pinned] == list(range(12))
    assert pinned.stats().slot_batches == 0


def test_user_graph_capture_while_workers_fill_slots():
    """The thread that pulls makes no CUDA calls, which would end a capture on any thread."""
    zeros = torch.zeros(8, device="cuda")
    got = []
    with gpuaug.StreamedLoader(DataLoader(Samples(), 4, num_workers=2)) as loader:
        for index, batch in enumerate(loader):
            got.append(batch)
            if index % 6 == 0:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    ones = zeros + 1
                graph.replay()
                assert ones.sum().item() == 8
        assert loader.stats().slot_batches > 0
    assert_equal(got, reference(Samples()))


def test_slots_that_cannot_be_page_locked_are_still_read(monkeypatch):
    real = torch.cuda.cudart()

    def refused(address, size, flags):
        assert int(real.cudaHostRegister(address, size, flags)) == 0
        error = real.cudaHostRegister(address, size, flags)  # CUDA refuses what is registered already
        real.cudaHostUnregister(address)
        return error

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=refused))
    with gpuaug.StreamedLoader(DataLoader(Samples(), 4, num_workers=2), [lambda images: images * 1]) as loader:
        with pytest.warns(gpuaug.GpuAugWarning, match=r"could not be page-locked \(CUDA error") as caught:
            assert_equal(list(loader), reference(Samples()))
        assert loader.stats().slot_batches
        assert loader.stats().pinned_bytes == 0
    assert len([each for each in caught if each.category is gpuaug.GpuAugWarning]) == 1
    torch.cuda.synchronize()  # nothing of it is left for whoever comes next


# Ragged batches


class Photos(Dataset):
    """Images of random sizes, with targets of several tensors."""

    def __len__(self):
        return 90

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        height, width = torch.randint(20, 200, (2,), generator=generator).tolist()
        image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)
        return image, {"boxes": torch.rand(index % 5, 4, generator=generator), "labels": torch.arange(index % 5)}


def loader(**options):
    return DataLoader(Photos(), 4, collate_fn=gpuaug.collate_ragged, **options)


def assert_arrived(batches):
    assert len(batches) == 23
    for (images, targets), (want, want_targets) in zip(batches, loader(), strict=True):
        assert type(images) is Ragged
        assert images.device.type == images.places.device.type == "cuda"
        assert_values(images.data.cpu(), want.data)
        assert_values(images.places.cpu(), want.places)
        assert images.shapes.sizes.tolist() == want.shapes.sizes.tolist()
        for target, wanted in zip(targets, want_targets, strict=True):
            assert_values(target["boxes"].cpu(), wanted["boxes"])
            assert_values(target["labels"].cpu(), wanted["labels"])


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("options", [{"num_workers": 3}, {"num_workers": 2, "persistent_workers": True}, {}], ids=repr)
def test_ragged_batches_arrive_through_ring_slots(monkeypatch, options, depth):
    overwrite_freed_slots(monkeypatch)
    with gpuaug.StreamedLoader(loader(**options), depth=depth) as streamed:
        for _ in range(2):
            assert_arrived(list(streamed))
        assert streamed.stats().slot_batches > 20


def test_ragged_batches_arrive_from_a_pinning_loader():
    pinned = list(loader(num_workers=2, pin_memory=True))
    assert all(images.data.is_pinned() and images.places.is_pinned() for images, _ in pinned)
    assert_arrived(list(gpuaug.StreamedLoader(loader(num_workers=2, pin_memory=True), feed="plain")))


def test_ragged_batches_move_with_to():
    assert_arrived([(images.to("cuda"), targets) for images, targets in loader()])


def test_small_tensors_of_each_key_beside_ragged_images_share_a_copy():
    batch = gpuaug.collate_ragged([Photos()[index] for index in (4, 9, 14, 19)])
    copied = unpack_targets(Copier(torch.device("cuda"), warn_pageable=False).copy(batch).batch)
    torch.cuda.synchronize()
    for name in ("boxes", "labels"):
        assert len({target[name].untyped_storage().data_ptr() for target in copied[1]}) == 1
    assert_values(copied[0].data.cpu(), batch[0].data)
