"""Ragged batches and pipelines that are refused, and the texts that say so."""

import re

import kornia.augmentation as K
import pytest
import torch
from support.batches.ragged import images_of, pack
from torchvision.transforms import v2

import gpuaug
from gpuaug.core.ragged import Ragged


def raises(text):
    return pytest.raises(gpuaug.ArgumentError, match=re.escape(text))


NOT_SIZED = {
    "as its end": (
        [K.RandomHorizontalFlip()],
        "pipeline must give images one size with ragged=True, got RandomHorizontalFlip_0 at the end.",
    ),
    "of one side": ([K.Resize(32)], "pipeline must give images one size with ragged=True, got Resize_0 at the end."),
    "blur first": (
        [K.RandomInvert(), K.RandomGaussianBlur((3, 3), (0.1, 2.0)), K.CenterCrop(8)],
        "one size with ragged=True, got RandomGaussianBlur_1: it reads other pixels of an image, or their coordinates. Put",
    ),
    "levels first": (
        [K.RandomEqualize(), K.CenterCrop(8)],
        "got RandomEqualize_0: it reads other pixels of an image, or their",
    ),
    "erasing first": ([K.RandomErasing(), K.CenterCrop(8)], "got RandomErasing_0: it reads other pixels of an image, or their"),
    "mix first": ([K.RandomMixUpV2(), K.CenterCrop(8)], "got RandomMixUpV2_0: it reads other pixels of an image, or their"),
    "kornia first": (
        [K.RandomMedianBlur(), K.CenterCrop(8)],
        "one size with ragged=True, got RandomMedianBlur_0: no lowering for this type. Put",
    ),
    "by chance": (
        [K.RandomResizedCrop((8, 8), p=0.5)],
        "got RandomResizedCrop_0: with p=0.5 the size of the output depends on the draw. Put",
    ),
}


@pytest.mark.parametrize("name", NOT_SIZED)
def test_pipelines_with_ragged_output_are_refused(name):
    modules, text = NOT_SIZED[name]
    with pytest.raises(gpuaug.ArgumentError, match=re.escape(text)) as caught:
        gpuaug.fuse(K.AugmentationSequential(*modules), ragged=True)
    assert "such as RandomResizedCrop((224, 224))" in str(caught.value)


CROP = "v2.RandomCrop((224, 224), pad_if_needed=True)"
NOT_SIZED_AGAIN = {
    "as its end": (
        [v2.RandomShortestSize([8, 12]), v2.RandomHorizontalFlip()],
        "pipeline must give images one size after RandomShortestSize_0, got RandomHorizontalFlip_1 at the end. Put a "
        f"transform to one size after it, such as {CROP}, or keep RandomShortestSize_0 in the dataset.",
    ),
    "blur first": (
        [v2.CenterCrop(20), v2.ScaleJitter((8, 8)), v2.GaussianBlur(3), v2.RandomCrop(8, pad_if_needed=True)],
        "one size after ScaleJitter_1, got GaussianBlur_2: it reads other pixels of an image, or their coordinates. Put a",
    ),
    "left to torchvision": (
        [v2.RandomZoomOut(), v2.GaussianNoise(), v2.CenterCrop(8)],
        "after RandomZoomOut_0, got GaussianNoise_1: no lowering for this type. Put a transform to one size",
    ),
}


@pytest.mark.parametrize("name", NOT_SIZED_AGAIN)
@pytest.mark.filterwarnings("ignore::gpuaug.GpuAugWarning")
def test_pipelines_that_draw_sizes_and_keep_them_are_refused(name):
    modules, text = NOT_SIZED_AGAIN[name]
    for options in ({}, {"ragged": True}):
        with raises(text):
            gpuaug.fuse(modules, **options)


TOO_SMALL = {
    "crop": (
        [v2.ScaleJitter((40, 40), (0.7, 2.0)), v2.RandomCrop(24)],
        "images must fit RandomCrop_1, got 36x48{}, which crops 24x24 out of 21x28. Pad or resize before it.",
    ),
    "reflection": (
        [v2.RandomShortestSize([20], 20), v2.RandomCrop(30, pad_if_needed=True, padding_mode="reflect")],
        "images must fit RandomCrop_1, got 36x48{}, which pads by reflection by a whole side or more. Pad or resize before it.",
    ),
    "skipped": (
        [v2.RandomApply([v2.RandomShortestSize([80])]), v2.RandomCrop(45)],
        "images must fit RandomCrop_1, got 36x48{}, which crops 45x45 out of 36x48. Pad or resize before it.",
    ),
    "not turned": (
        [v2.RandomRotation(45, expand=True), v2.RandomCrop(45)],
        "images must fit RandomCrop_1, got 36x48{}, which crops 45x45 out of 36x48. Pad or resize before it.",
    ),
    "turn skipped": (
        [v2.RandomApply([v2.RandomRotation((40, 50), expand=True)]), v2.RandomCrop(45)],
        "images must fit RandomCrop_1, got 36x48{}, which crops 45x45 out of 36x48. Pad or resize before it.",
    ),
    "no pixels": (
        [v2.ScaleJitter((40, 40), (0.03, 2.0)), v2.RandomCrop(24, pad_if_needed=True)],
        "images must fit ScaleJitter_0, got 36x48{}, which comes out without pixels. Pad or resize before it.",
    ),
}


@pytest.mark.parametrize("name", TOO_SMALL)
def test_images_that_may_be_drawn_too_small_are_refused_whatever_is_drawn(name):
    modules, text = TOO_SMALL[name]
    with raises(text.format("")):
        gpuaug.fuse(modules)(torch.zeros(0, 3, 36, 48))
    with raises(text.format(" at 1 of the batch")):
        gpuaug.fuse(modules, ragged=True).draw(pack(images_of([(48, 48), (36, 48)])))


def test_ragged_image_without_pixels_is_refused():
    batch = pack([torch.zeros(3, 4, 5, dtype=torch.uint8), torch.zeros(3, 0, 7, dtype=torch.uint8)])
    with raises("images must have pixels, got (0, 7) at 1 of the batch. Leave the image out."):
        gpuaug.fuse(K.CenterCrop(2), ragged=True)(batch)


def test_ragged_batch_must_be_uint8():
    batch = pack(images_of())
    floats = Ragged(batch.data.float(), batch.places, batch.shapes)
    with pytest.raises(
        gpuaug.ArgumentTypeError, match=r"images must be uint8, uint16 or int16 in a ragged batch, got torch.float32\. Create"
    ):
        gpuaug.fuse(K.CenterCrop(2), ragged=True)(floats)


def test_ragged_batch_shorter_than_its_shapes_is_refused():
    batch = pack(images_of())
    short = Ragged(batch.data[:-1], batch.places, batch.shapes)
    text = "A ragged batch must agree with its shapes, 44034 elements of 5 images, got {} and places {} of torch.{}. Create"
    with raises(text.format(44033, "(5, 3)", "int64")):
        gpuaug.fuse(K.CenterCrop(2), ragged=True)(short)
    with raises(text.format(44034, "(4, 3)", "int64")):
        gpuaug.fuse(K.CenterCrop(2), ragged=True)(Ragged(batch.data, batch.places[1:], batch.shapes))
    with raises(text.format(44034, "(5, 3)", "float32")):
        gpuaug.fuse(K.CenterCrop(2), ragged=True)(Ragged(batch.data, batch.places.float(), batch.shapes))
