"""``collate_ragged(channels=None)``: images of any number of channels, and of 16 bits."""

from functools import partial

import numpy as np
import PIL.Image
import pytest
import torch
from support.comparison.values import assert_values
from torch.utils.data import DataLoader

import gpuaug

collate = partial(gpuaug.collate_ragged, channels=None)
SIZES = [(5, 7), (9, 4), (1, 3)]


def arrays(bands, dtype):
    rng = np.random.default_rng(0)
    return [rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (*size, bands), dtype) for size in SIZES]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16])
@pytest.mark.parametrize("bands", [1, 2, 3, 4, 13])
@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_images_are_packed_as_they_are(kind, bands, dtype):
    images = arrays(bands, dtype)
    samples = [torch.from_numpy(each.transpose(2, 0, 1).copy()) for each in images] if kind == "tensor" else images
    batch, labels = collate([(each, index) for index, each in enumerate(samples)])
    assert labels.tolist() == [0, 1, 2]
    assert batch.data.dtype == getattr(torch, np.dtype(dtype).name)
    assert batch.shapes.channels == bands
    for got, image in zip(batch, images, strict=True):
        assert_values(got, torch.from_numpy(image.transpose(2, 0, 1).copy()))


def test_grey_arrays_and_pil_images():
    grey = arrays(1, np.uint16)[0][..., 0]
    for image in (grey, PIL.Image.fromarray(grey)):
        assert_values(collate([image])[0], torch.from_numpy(grey[None].copy()))
    for mode, bands in (("L", 1), ("LA", 2), ("RGB", 3), ("RGBA", 4)):
        assert collate([PIL.Image.new(mode, (4, 3))])[0].shape == (bands, 3, 4)


REFUSED = {
    "another type": (
        [np.zeros((3, 3, 2), np.uint16), np.zeros((3, 3, 2), np.uint8)],
        "uint16 and 2, got uint8 and 2 in sample 1",
    ),
    "other channels": (
        [np.zeros((3, 3, 2), np.uint16), np.zeros((3, 3, 4), np.uint16)],
        "uint16 and 2, got uint16 and 4 in sample 1",
    ),
    "a palette": ([PIL.Image.new("P", (3, 3))], "must be grey or RGB, of 8 or 16 bits"),
    "32 bits": ([PIL.Image.new("I", (3, 3))], "must be grey or RGB, of 8 or 16 bits"),
    "no pixels": ([np.zeros((0, 3, 2), np.int16)], "must have pixels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    images, text = REFUSED[name]
    with pytest.raises(gpuaug.ArgumentError, match=text):
        collate(images)


def test_convert_goes_with_a_number_of_channels():
    with pytest.raises(gpuaug.ArgumentError, match="convert must be left out with channels=None"):
        collate([np.zeros((3, 3, 2), np.uint16)], convert=True)


def test_without_it_arrays_of_16_bits_are_no_images():
    image, depth = np.zeros((4, 4, 3), np.uint8), np.ones((4, 4), np.uint16)
    batch, depths = gpuaug.collate_ragged([(image, depth), (image, depth)])
    assert isinstance(batch, gpuaug.Ragged)
    assert depths.shape == (2, 4, 4)
    assert all(isinstance(each, gpuaug.Ragged) for each in collate([(image, depth)]))


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_move_them(workers):
    images = arrays(6, np.uint16)
    source = DataLoader(images, batch_size=3, collate_fn=collate, num_workers=workers)
    with gpuaug.StreamedLoader(source, device="cpu") as loader:
        (batch,) = loader
    for got, image in zip(batch, images, strict=True):
        assert_values(got, torch.from_numpy(image.transpose(2, 0, 1).copy()))
