"""Draws and labels in words."""

import kornia.augmentation as K
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kornia.augmentation.auto import RandAugment
from support.comparison.replay import left_to_kornia

import gpuaug
from gpuaug.viewer.captions import class_namer, draw_lines, label

CASES = [
    ("RandomResizedCrop_0", {"x": 4.0, "y": 5.0, "width": 11.0, "height": 12.0}, "ResizedCrop 11x12 at 4, 5"),
    ("RandomCrop_1", {"x": 4.0, "y": 5.0}, "Crop at 4, 5"),
    ("RandomErasing_3", {"widths": 3.0, "heights": 6.0, "xs": 1.0, "ys": 0.0}, "Erasing 3x6 at 1, 0"),
    ("RandomHorizontalFlip_12", {}, "HorizontalFlip"),
    ("ColorJitter", {"brightness_factor": 1.234, "hue_factor": -0.004}, "ColorJitter brightness 1.23, hue -0.004"),
    ("RandomBrightness_0", {"brightness_factor": 1.5}, "Brightness 1.50"),
    ("RandomRotation_0", {"degrees": -12.34}, "Rotation -12.3°"),
    ("RandomRotation90_0", {"times": 2.6}, "Rotation90 270°"),
    ("RandomPosterize_0", {"bits_factor": 6.0}, "Posterize bits 6"),
    ("RandomSolarize_0", {"thresholds": 0.4, "additions": 0.0}, "Solarize thresholds 0.40"),
    ("RandomContrast_0", {"contrast_factor": 1.25, "gain_factor": 1.0}, "Contrast 1.25"),
    ("RandomChannelShuffle_0", {"channels_0": 2.0, "channels_1": 0.0, "channels_2": 1.0}, "ChannelShuffle 2 0 1"),
    ("RandomChannelDropout_0", {"channel_idx_0": 1.0}, "ChannelDropout 1"),
    ("RandomPerspective_0", {"end_points_0_x": 1.0, "end_points_0_y": 2.0}, "Perspective"),
    ("RandomMixUpV2_0", {"partner": 3.0, "lambda": 0.456}, "MixUp 0.46 of sample 3"),
    (
        "RandomCutMixV2",
        {"partner": 3.0, "start_x": 1.0, "start_y": 2.0, "sides_x": 5.0, "sides_y": 6.0},
        "CutMix 5x6 at 1, 2 of sample 3",
    ),
    (
        "RandomAffine_0",
        {"angle": 5.0, "scale_x": 1.0, "scale_y": 1.0, "shift_x": 0.0, "shift_y": 0.0, "shear_x": 0.0, "shear_y": 0.0},
        "Affine 5.0°",
    ),
    (
        "RandomAffine_0",
        {"angle": 5.0, "scale_x": 1.5, "scale_y": 1.5, "shift_x": 0.5, "shift_y": 0.0, "shear_x": 0.0, "shear_y": -2.0},
        "Affine 5.0°, shift 0.50, 0, shear 0, -2, scale 1.50",
    ),
    ("RandomTranslate_0", {"translate_x": 3.0, "translate_y": -1.5}, "Translate shift 3, -1.50"),
    ("RandAugment_0/ShearX_0 (2)", {"shear_x": 18.0, "shear_y": 0.0}, "ShearX shear 18, 0"),
]


@pytest.mark.parametrize(("name", "numbers", "said"), CASES)
def test_caption_line(name, numbers, said):
    before = dict(numbers)
    assert draw_lines({name: numbers}) == [said]
    assert numbers == before


def test_deterministic_modules_have_no_caption():
    constant = ("Normalize_3", "Denormalize", "CenterCrop_0", "PadTo_1", "Resize_2")
    assert draw_lines({name: {} for name in constant} | {"RandomInvert_4": {}}) == ["Invert"]
    assert draw_lines({name: {} for name in constant}) == ["unchanged"]


def test_every_lowered_module_has_a_caption():
    from gpuaug.fusion.lower.kornia import LOWERED

    for kind in LOWERED:
        name = f"{kind.__name__}_0"
        (line,) = draw_lines({name: {"number": 0.5}})
        assert line.endswith("number 0.50") or line == "unchanged"


def test_label_text():
    name = class_namer(["cat", "dog", "cow"], "class {}")

    def say(*value, mixed=False, lam_is_sample=False):
        told = label(torch.tensor(value if len(value) > 1 else value[0]), name, mixed=mixed, lam_is_sample=lam_is_sample)
        return ", ".join("".join(part) for part in told)

    assert [say(1), say(3), say(2.5), say(-1)] == ["dog", "class 3", "class 2.5", "class -1"]
    assert say(0.1, 0.2, 0.7) == "cow 70%, dog 20%"
    assert say(0.0, 1.0, 0.0) == "dog"
    assert say(0.001, 0.998, 0.001) == "dog"
    assert say(0.3, 0.001, 0.001) == "cat 30%"
    assert say(0.0, 2.0, 0.25, mixed=True) == "cat 75%, cow 25%"
    assert say(0.0, 2.0, 0.25, mixed=True, lam_is_sample=True) == "cow 75%, cat 25%"
    assert say(1.0, 1.0, 0.25, mixed=True) == "dog"
    assert say(1.0, 0.0, 0.0, mixed=True) == "dog"
    nan, inf = float("nan"), float("inf")
    assert [say(nan), say(inf), say(-inf)] == ["class nan", "class inf", "class -inf"]
    assert say(nan, 1.0, 0.25, mixed=True) == "class nan 75%, dog 25%"
    assert class_namer(None)(nan) == "nan"
    assert class_namer(["cat"], "class {}")("mouse") == "mouse"
    assert class_namer(None)(4) == "4"
    assert class_namer("not names")(0) == "0"


@given(st.integers(0, 2**40))
@settings(max_examples=10)
@left_to_kornia
def test_captions_of_real_draws(seed):
    augment = gpuaug.fuse(
        [K.RandomAffine(20.0, (0.1, 0.1), (0.8, 1.2)), RandAugment(n=2, m=9), K.RandomErasing(), K.RandomChannelShuffle()],
        pick="sample",
    )
    for line in draw_lines(augment.draw((2, 3, 16, 16), seed).of(1)):
        assert line == "unchanged" or line[0].isupper()
        assert "_" not in line
