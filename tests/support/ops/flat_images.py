"""Images of one value a channel, ops that leave them so but for a rounding error, and ops that measure what they see."""

import kornia.augmentation as K
import torch
from torchvision.transforms import InterpolationMode, v2

import gpuaug

BILINEAR, BICUBIC = InterpolationMode.BILINEAR, InterpolationMode.BICUBIC
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)

FIRST = {
    "crop": lambda: [v2.RandomResizedCrop(12)],
    "crop, four taps": lambda: [v2.RandomResizedCrop(12, antialias=False)],
    "crop, cubic": lambda: [v2.RandomResizedCrop(12, interpolation=BICUBIC)],
    "smaller": lambda: [v2.Resize((7, 9))],
    "smaller, cubic": lambda: [v2.Resize((7, 9), interpolation=BICUBIC)],
    "larger": lambda: [v2.Resize((31, 29))],
    "turned": lambda: [v2.RandomRotation(20, BILINEAR, fill=None), v2.CenterCrop(9)],
    "moved corners": lambda: [v2.RandomPerspective(0.2, 1.0, fill=None), v2.CenterCrop(9)],
    "padded": lambda: [v2.RandomCrop(12, padding=7, padding_mode="reflect"), v2.Resize(11)],
    "blurred": lambda: [v2.GaussianBlur(5)],
    "drawn size": lambda: [v2.RandomResize(9, 30), v2.CenterCrop(9)],
    "crop, Kornia's": lambda: [K.RandomResizedCrop((12, 12))],
    "crop, squares": lambda: [K.RandomResizedCrop((12, 12), align_corners=False)],
    "affine": lambda: [K.RandomAffine(20.0, padding_mode="border", p=1.0)],
    "blurred, Kornia's": lambda: [K.RandomGaussianBlur((5, 11), (0.3, 2.0), p=1.0)],
    "sharpened": lambda: [K.RandomSharpness(2.0, p=1.0)],
    "several": lambda: [
        v2.RandomResizedCrop(19),
        v2.GaussianBlur(3),
        v2.RandomRotation(20, BILINEAR, fill=None),
        v2.CenterCrop(9),
    ],
}
"""Each makes of an image of one value another of that value."""

LAST = {
    "autocontrast": lambda: v2.RandomAutocontrast(1.0),
    "equalize": lambda: v2.RandomEqualize(1.0),
    "autocontrast, Kornia's": lambda: K.RandomAutoContrast(p=1.0),
    "autocontrast, not clipped": lambda: K.RandomAutoContrast(clip_output=False, p=1.0),
    "equalize, Kornia's": lambda: K.RandomEqualize(p=1.0),
    "CLAHE": lambda: K.RandomClahe((40.0, 40.0), (2, 3), p=1.0),
    "posterize": lambda: K.RandomPosterize((3.0, 3.0), p=1.0),
}
"""Each divides by the range of the values, or counts their levels."""

FORMS = {
    "bytes": ([], [TO_FLOAT]),
    "bytes, converted first": ([TO_FLOAT], []),
    "floats": ([], []),
}
"""What the images are: the modules before and behind all others."""


def flat(levels, height=17, width=23):
    """Images (n, 3, height, width) of these bytes, one for each channel."""
    return torch.as_tensor(levels, dtype=torch.uint8).view(-1, 3, 1, 1).expand(-1, -1, height, width).contiguous()


def off(first, last, form, images):
    """How far the last op behind the first is from what it makes of images that are exactly of one value."""
    before, behind = FORMS[form]
    images = images.float() / 255 if form == "floats" else images
    got = gpuaug.fuse([*before, *FIRST[first](), LAST[last](), *behind], antialias=True)(images)
    exact = images[:, :, :1, :1].expand(-1, -1, *got.shape[2:]).contiguous()
    return (got - gpuaug.fuse([*before, LAST[last](), *behind])(exact)).abs().max().item()
