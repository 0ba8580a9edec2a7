"""Crops and padding: half precision, and settings that Kornia refuses. ``test_random_pipelines`` compares their pixels."""

import kornia.augmentation as K
import pytest
import torch
from support.comparison.replay import both, left_to_kornia, photographs
from support.comparison.values import assert_values

import gpuaug


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_output_is_the_float32_result_rounded(dtype):
    modules = K.RandomCrop((14, 14), padding=2), K.Resize((30, 30)), K.RandomHorizontalFlip()
    pipeline = K.AugmentationSequential(*modules)
    images = photographs(2, 3, 20, 30)
    assert_values(both(pipeline, images, dtype=dtype)[1], both(pipeline, images)[1].to(dtype))


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda mode, fill: K.RandomCrop((10, 10), padding=2, padding_mode=mode, fill=fill), "fill=0.5 with padding_mode={!r}"),
        (
            lambda mode, fill: K.RandomCrop((10, 10), pad_if_needed=True, padding_mode=mode, fill=fill),
            "fill=0.5 with padding_mode={!r}",
        ),
        (lambda mode, fill: K.PadTo((10, 10), pad_mode=mode, pad_value=fill), "pad_value=0.5 with pad_mode={!r}"),
    ],
)
@left_to_kornia
def test_fill_with_reflect_or_replicate_padding_is_left_to_kornia(make, reason, mode):
    images = photographs(2, 3, 8, 8)
    assert reason.format(mode) in str(gpuaug.fuse(make(mode, 0.5)).explain((2, 3, 8, 8)))
    with pytest.raises(RuntimeError, match="doesn't take in value argument"):
        gpuaug.fuse(make(mode, 0.5))(images)
    assert "left to Kornia" not in str(gpuaug.fuse(make(mode, 0)).explain((2, 3, 8, 8)))
    assert gpuaug.fuse(make(mode, 0))(images).shape == (2, 3, 10, 10)
