"""Flips, crops, resizes and padding, against Kornia on the same draws."""

import kornia.augmentation as K
import pytest
import torch
from support.batches.pairwise import sweep
from support.comparison.replay import assert_replays, both, left_to_kornia, photographs
from support.comparison.values import assert_values

import gpuaug

SHAPES = [(3, 3, 32, 48), (1, 1, 33, 17), (0, 3, 16, 16), (2, 4, 24, 24)]

EXACT = {
    "horizontal": lambda p: K.RandomHorizontalFlip(p=p),
    "vertical": lambda p: K.RandomVerticalFlip(p=p),
    "crop": lambda p: K.RandomCrop((12, 10)),
    "crop, padded": lambda p: K.RandomCrop((14, 16), padding=(3, 5, 2, 7)),
    "crop, padded grey": lambda p: K.RandomCrop((14, 16), padding=4, fill=0.25),
    "crop, reflected": lambda p: K.RandomCrop((14, 16), padding=7, padding_mode="reflect"),
    "crop, replicated": lambda p: K.RandomCrop((14, 16), padding=(2, 9), padding_mode="replicate"),
    "crop, padded if needed": lambda p: K.RandomCrop((40, 40), pad_if_needed=True),
    "crop, same": lambda p: K.RandomCrop((12, 10), same_on_batch=True),
    "centre": lambda p: K.CenterCrop((9, 12)),
    "pad": lambda p: K.PadTo((50, 60), pad_value=0.5),
    "pad and crop": lambda p: K.PadTo((20, 60)),
    "pad, never crop": lambda p: K.PadTo((20, 60), crop_if_exceeds=False),
    "flips and crops": lambda p: [
        K.RandomVerticalFlip(p=p),
        K.RandomCrop((14, 16), padding=3),
        K.RandomHorizontalFlip(p=p),
        K.CenterCrop(8),
    ],
}

CLOSE = {
    "resized crop": lambda: K.RandomResizedCrop((16, 20)),
    "resized crop, squares": lambda: K.RandomResizedCrop((16, 20), align_corners=False),
    "resized crop, nearest": lambda: K.RandomResizedCrop((16, 20), resample="nearest"),
    "resized crop, narrow": lambda: K.RandomResizedCrop((16, 20), scale=(0.9, 1.0), ratio=(3.0, 4.0)),
    "resized crop, one pixel": lambda: K.RandomResizedCrop((1, 20)),
    "resized crop, same": lambda: K.RandomResizedCrop((16, 20), same_on_batch=True),
    "resize": lambda: K.Resize((20, 31)),
    "resize, squares": lambda: K.Resize((20, 31), align_corners=False),
    "resize, nearest": lambda: K.Resize((20, 31), resample="nearest"),
    "resize, short side": lambda: K.Resize(20),
    "resize, long side": lambda: K.Resize(20, side="long"),
    "crop, resize, flip": lambda: [K.RandomCrop((14, 14), padding=2), K.Resize((30, 30)), K.RandomHorizontalFlip()],
    "flip, resize, pad": lambda: [
        K.RandomVerticalFlip(),
        K.Resize((12, 30)),
        K.PadTo((40, 32), pad_value=0.5),
        K.RandomCrop((16, 16)),
    ],
}


def container(made):
    return K.AugmentationSequential(*made) if isinstance(made, list) else K.AugmentationSequential(made)


@pytest.mark.parametrize(("name", "p", "shape"), sweep(EXACT, [0.5, 0.0, 1.0], SHAPES), ids=str)
def test_crops_pads_and_flips_equal_kornia_exactly(name, p, shape):
    pipeline, images = container(EXACT[name](p)), photographs(*shape)
    if shape == (1, 1, 33, 17) and "reflected" not in name:
        images = images.float() / 255
    for seed in range(3):
        assert_replays(pipeline, images, seed)


@pytest.mark.parametrize(("name", "shape"), sweep(CLOSE, SHAPES), ids=str)
def test_resized_crops_and_resizes_are_close_to_kornia(name, shape):
    pipeline = container(CLOSE[name]())
    for seed in range(3):
        assert_replays(pipeline, photographs(*shape), seed, atol=5e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_output_is_the_float32_result_rounded(dtype):
    pipeline = container(CLOSE["crop, resize, flip"]())
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
