"""Arguments, inputs and draws that ``fuse`` refuses, and the texts that say so."""

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from PIL import Image
from support.replay import left_to_kornia

import gpuaug


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        (
            (K.RandomInvert,),
            {},
            gpuaug.ArgumentTypeError,
            r"pipeline must be an instance, got the class RandomInvert. Call it first: RandomInvert\(…\).",
        ),
        ((3,), {}, gpuaug.ArgumentTypeError, "pipeline must be a Kornia augmentation, .* got int. Pass a list"),
        (([],), {}, gpuaug.ArgumentError, "pipeline must hold at least one augmentation, got an empty list. Add one, such"),
        (
            (K.RandomInvert(),),
            {"dtype": torch.float64},
            gpuaug.ArgumentError,
            "dtype must be torch.float32, .* got torch.float64. Leave",
        ),
        (
            (K.RandomInvert(),),
            {"memory_format": torch.preserve_format},
            gpuaug.ArgumentError,
            "memory_format must be .* Leave it out",
        ),
        (
            (K.RandomInvert(),),
            {"boxes": "yxyx"},
            gpuaug.ArgumentError,
            "boxes must be 'xyxy', 'xywh', 'cxcywh' or 'cxcywh_share', got 'yxyx'. Leave it out for torchvision's.",
        ),
        (
            (K.RandomInvert(),),
            {"num_classes": 0},
            gpuaug.ArgumentError,
            "num_classes must be 1 or more, got 0. Leave it out.",
        ),
        (
            (K.RandomInvert(),),
            {"label_smoothing": 1.5, "num_classes": 3},
            gpuaug.ArgumentError,
            r"label_smoothing must be in \[0, 1\), got 1.5. Leave it out for none.",
        ),
        (
            (K.RandomInvert(),),
            {"label_smoothing": 0.1},
            gpuaug.ArgumentError,
            "label_smoothing must come with num_classes, got 0.1 without. Pass how many classes there are",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments, options, error, text):
    with pytest.raises(error, match=text):
        gpuaug.fuse(*arguments, **options)


@pytest.mark.parametrize(
    ("inputs", "options", "error", "text"),
    [
        (
            (torch.zeros(2, 3, 4, 4, dtype=torch.int64),),
            {},
            gpuaug.ArgumentTypeError,
            "images must be uint8, uint16, int16 or floating of 16 bits or more, got torch.int64. Scale them",
        ),
        (
            (torch.zeros(2, 3, 4, 4).to(torch.float8_e4m3fn),),
            {},
            gpuaug.ArgumentTypeError,
            "images must be uint8, uint16, int16 or floating of 16 bits or more, got torch.float8_e4m3fn. Scale them",
        ),
        (([1, 2],), {}, gpuaug.ArgumentTypeError, "input must be a tensor or a gpuaug.Ragged, got list. Stack images"),
        *(
            (
                (given,),
                {},
                gpuaug.ArgumentTypeError,
                f"input must be a tensor, got {kind}. Make tensors of images in the dataset, as v2.ToImage",
            )
            for given, kind in ((Image.new("RGB", (4, 4)), "Image"), (np.zeros((4, 4, 3)), "ndarray"))
        ),
        (
            (torch.arange(4),),
            {},
            gpuaug.ArgumentError,
            r"input must be \(B, C, H, W\), one \(C, H, W\), or clips \(B, T, C, H, W\), got \(4,\). Name the images by on=",
        ),
        (
            (torch.zeros(1, 1, 2, 3, 4, 4),),
            {},
            gpuaug.ArgumentError,
            r"clips \(B, T, C, H, W\), got \(1, 1, 2, 3, 4, 4\). Make clips of a sample samples of their own",
        ),
        (
            (torch.zeros(2, 3, 4, 4, requires_grad=True),),
            {},
            gpuaug.ArgumentError,
            "images must not require gradients, .* Pass images.detach",
        ),
        (
            (torch.zeros(2, 3, 4, 4),) * 2,
            {},
            gpuaug.ArgumentError,
            r"data_keys must name each input, got 1 for 2 inputs. Name all: data_keys=\['input', 'mask'\], or in a stage on=",
        ),
        (
            (torch.zeros(2, 3, 4, 4),),
            {"data_keys": ["mask"]},
            gpuaug.ArgumentError,
            r"data_keys must contain 'input', got \['mask'\]",
        ),
        (
            (torch.zeros(2, 3, 4, 4),),
            {"data_keys": ["picture"]},
            gpuaug.ArgumentError,
            "data_keys must be among .* got 'picture'",
        ),
        (
            (torch.zeros(2, 3, 4, 4), torch.zeros(2, 1, 5, 4)),
            {"data_keys": ["input", "mask"]},
            gpuaug.ArgumentError,
            r"mask must be of the images' size \(2, 3, 4, 4\), got \(2, 1, 5, 4\). Resize",
        ),
        (
            (torch.zeros(2, 3, 4, 4), torch.zeros(3, 5, 4)),
            {"data_keys": ["input", "bbox_xyxy"]},
            gpuaug.ArgumentError,
            r"bbox_xyxy must hold one entry for each of the 2 images, got \(3, 5, 4\)",
        ),
        (
            (torch.zeros(2, 3, 4, 4), torch.zeros(2, 5, 4, device="meta")),
            {"data_keys": ["input", "bbox_xyxy"]},
            gpuaug.DeviceError,
            "bbox_xyxy must be on cpu, where the images are, got meta. Move it there first.",
        ),
    ],
)
def test_bad_inputs_are_refused(inputs, options, error, text):
    with pytest.raises(error, match=text):
        gpuaug.fuse(K.RandomInvert())(*inputs, **options)


@left_to_kornia
@pytest.mark.parametrize(
    ("module", "shape", "note"),
    [
        (K.RandomSharpness(p=1.0), (2, 3, 2, 8), "RandomSharpness_0, which is left to it: the image has no 3x3 pixels."),
        (K.CenterCrop(9), (2, 3, 8, 8), "CenterCrop_0, which is left to it: crops 9x9 out of 8x8."),
    ],
)
def test_errors_of_kornia_name_the_module_and_why_kornia_runs_it(module, shape, note):
    with pytest.raises(Exception) as caught:  # noqa: PT011 of Kornia's own type
        gpuaug.fuse([module])(torch.zeros(shape))
    (found,) = caught.value.__notes__
    assert found.startswith(f"gpuaug: raised by Kornia in {note}")


def test_bad_draws_are_refused():
    augment, images = gpuaug.fuse(K.RandomInvert()), torch.zeros(2, 3, 4, 4)
    with pytest.raises(gpuaug.ArgumentError, match=r"draws must be for images of the same shape, got draws for \(1, 3, 4, 4\)"):
        augment(images, draws=augment.draw((1, 3, 4, 4)))
    other = gpuaug.fuse([K.RandomInvert(), K.RandomInvert()])
    with pytest.raises(gpuaug.ArgumentError, match="draws must come from the same pipeline, got draws of 2 modules for 1"):
        augment(images, draws=other.draw(images.shape))
    with pytest.raises(gpuaug.ArgumentTypeError) as caught:
        augment(images, draws=augment.draw(images.shape).as_kornia())
    assert str(caught.value).startswith("draws must be what draw() of this module returned, got {'batch_prob': tensor([")
    assert str(caught.value).endswith(". What as_kornia() returns is for Kornia's own pipeline: pipeline(images, params=…).")
    with pytest.raises(gpuaug.ArgumentError, match=r"shape must be \(B, C, H, W\) or \(B, T, C, H, W\), got \(3, 4\)"):
        augment.draw((3, 4))
    with pytest.raises(gpuaug.ArgumentError) as caught:
        augment.draw(images)
    assert "shape must be (B, C, H, W) or (B, T, C, H, W), got Tensor of shape (2, 3, 4, 4)" in str(caught.value)


@pytest.mark.parametrize(("given", "text"), [("input", "'input'"), (5, "5"), ([["input"]], "[['input']]")])
def test_data_keys_must_be_a_list_of_names(given, text):
    with pytest.raises(gpuaug.ArgumentTypeError) as caught:
        gpuaug.fuse(K.RandomInvert())(torch.zeros(2, 3, 4, 4), data_keys=given)
    way_out = "Name each input in a list: data_keys=['input', 'mask']."
    assert str(caught.value) == f"data_keys must be a list of names, got {text}. {way_out}"
