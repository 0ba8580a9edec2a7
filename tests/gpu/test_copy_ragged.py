"""Images of every size on their way to a card."""

import pytest
import torch
from support.comparison.values import assert_values
from torch.utils.data import DataLoader, Dataset

import gpuaug
from gpuaug import Ragged
from gpuaug.core.packed_targets import unpack_targets
from gpuaug.feed import ring
from gpuaug.stages.copy import Copier

pytestmark = pytest.mark.gpu


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
    monkeypatch.setattr(ring, "POISON", True)
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
