"""Pipelines that reach every branch of the kernels, for the executors to be compared on."""

import kornia.augmentation as K
import torch
from kornia.augmentation import auto
from support.ops.op_cases import CASES, MEAN, STD
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2


def alone(*, exact, rgb):
    """Pipelines of one op, for 80 % of the samples: those of the cases with ``alone``."""
    found = [case for case in CASES.values() if case.alone and (case.exact, case.rgb) == (exact, rgb)]
    return {case.name: lambda case=case: [case.first(p=1.0 if "size" in case.parameters.split() else 0.8)] for case in found}


def by_the_batch(module):
    """The module, for half of the batches."""
    module.p_batch = 0.5
    return module


EXACT = {
    **alone(exact=True, rgb=False),
    "nothing": lambda: [K.RandomHorizontalFlip(p=0.0)],
    "flips": lambda: [K.RandomHorizontalFlip(), K.RandomVerticalFlip()],
    "crop, padded": lambda: [K.RandomHorizontalFlip(), K.RandomCrop((14, 16), padding=4, fill=0.25)],
    "crop, reflected": lambda: [K.RandomCrop((14, 16), padding=7, padding_mode="reflect"), K.RandomVerticalFlip()],
    "crop, replicated": lambda: [K.RandomCrop((14, 16), padding=(2, 9), padding_mode="replicate")],
    "crop, jigsaw": lambda: [K.RandomCrop((14, 16)), K.RandomJigsaw((2, 4), p=0.8), K.RandomInvert()],
    "apply masks": lambda: [
        K.RandomInvert(),
        K.RandomErasing(value=0.5),
        K.RandomHorizontalFlip(),
        K.RandomChannelDropout(fill_value=0.5),
    ],
    "cutmix": lambda: [
        K.RandomHorizontalFlip(),
        K.RandomCutMixV2(p=1.0, cut_size=(0.3, 0.6), use_correct_lambda=True),
        K.RandomInvert(),
    ],
    "equalize": lambda: [K.RandomEqualize(p=0.8), K.RandomInvert()],
    "equalize, torchvision's": lambda: [v2.RandomEqualize(0.8), v2.RandomInvert()],
    "one of": lambda: [auto.TrivialAugment([[("posterize", 0.0, 8.0)], [("invert", 0, 1)]])],
    "two passes, exact": lambda: [K.RandomHorizontalFlip(), K.RandomSharpness(p=0.0), K.RandomPosterize((0.0, 8.0), p=0.8)],
}
"""Permutations, apply masks and whole numbers: both executors give the same bits."""

RGB_EXACT = alone(exact=True, rgb=True)

CLOSE = {
    **alone(exact=False, rgb=False),
    "antialiased crop, its middle where none fits": lambda: [
        v2.RandomResizedCrop((16, 20), scale=(0.9, 1.0), ratio=(3.0, 4.0)),
        v2.RandomErasing(0.7, value=0.5),
    ],
    "choice and order": lambda: [
        v2.RandomChoice([v2.RandomSolarize(128), v2.RandomHorizontalFlip(), v2.RandomRotation(30, "bilinear", fill=None)]),
        v2.RandomOrder([v2.RandomInvert(), v2.RandomErasing(1.0, value=0.5)]),
    ],
    "floats of bytes": lambda: [
        v2.RandomResizedCrop((16, 20)),
        v2.ToDtype(torch.float32),
        v2.RandomRotation(30, "bilinear"),
        v2.GaussianBlur(5),
        v2.RandomAffine(20, (0.2, 0.1), interpolation="bilinear", fill={torch.Tensor: 114, tv_tensors.Mask: 0}),
        v2.RandomErasing(0.7, value=200),
        v2.Normalize([114.0], [57.0]),
    ],
    "elastic": lambda: [
        v2.ElasticTransform(40.0, 1.0, fill=0.5),
        v2.RandomApply([v2.ElasticTransform(9.0, 0.0)]),
        v2.RandomInvert(),
    ],
    "erased with noise": lambda: [
        v2.RandomErasing(0.8, value="random"),
        v2.ToDtype(torch.float32, scale=True),
        v2.RandomErasing(0.8, value="random"),
    ],
    "resized crop, flip": lambda: [K.RandomResizedCrop((16, 20)), K.RandomHorizontalFlip()],
    "resized crop, squares": lambda: [K.RandomResizedCrop((16, 20), align_corners=False)],
    "resized crop, of a pixel": lambda: [K.RandomResizedCrop((5, 7), scale=(1e-4, 3e-3))],
    "resized crop, of a square pixel": lambda: [K.RandomResizedCrop((5, 7), scale=(1e-4, 3e-3), align_corners=False)],
    "crop, resize, pad": lambda: [
        K.RandomCrop((14, 14), padding=3, fill=0.5),
        K.Resize((12, 30)),
        K.PadTo((20, 36), pad_value=0.25),
    ],
    "drawn size, padded crop": lambda: [
        v2.ScaleJitter((24, 28), (0.3, 1.5)),
        v2.RandomHorizontalFlip(),
        v2.RandomCrop((16, 20), pad_if_needed=True, fill=64),
    ],
    "zoomed out, drawn size, middle": lambda: [
        v2.RandomZoomOut(0.5, side_range=(1.0, 2.0)),
        v2.RandomResize(12, 24, antialias=False),
        v2.CenterCrop((9, 11)),
    ],
    "padded, rotation, flip": lambda: [
        K.RandomCrop((20, 24), padding=3, fill=0.5),
        K.RandomRotation(40.0, p=1.0),
        K.RandomHorizontalFlip(),
    ],
    "affine, border": lambda: [K.RandomAffine(20.0, (0.1, 0.1), (0.8, 1.2), padding_mode="border")],
    "shears, shifts": lambda: [
        auto.RandAugment(2, 10, [[("shear_x", -0.3, 0.3)], [("translate_y", -0.4, 0.4)]]),
        K.Normalize(0.5, 0.25),
    ],
    # By a quarter, the nearest pixel of a mask is anyone's guess where one side is odd and the other even.
    "half turn": lambda: [K.RandomRotation90((2, 2), p=0.8)],
    "perspective, filled": lambda: [
        v2.RandomVerticalFlip(),
        v2.RandomPerspective(0.5, 0.8, fill={torch.Tensor: 128, tv_tensors.Mask: 0}),
        v2.CenterCrop((20, 24)),
    ],
    "affine, filled": lambda: [
        v2.RandomCrop(24, padding=4, fill=64),
        v2.RandomAffine(40, None, None, None, InterpolationMode.BILINEAR),
    ],
    "cubic behind levels": lambda: [
        v2.RandomEqualize(1.0),
        v2.RandomResizedCrop((24, 28), interpolation=InterpolationMode.BICUBIC),
    ],
    "two passes": lambda: [K.RandomResizedCrop((16, 20)), K.RandomRotation(30.0), K.Normalize(0.5, 0.25)],
    "tone": lambda: [
        K.RandomBrightness((0.6, 1.5), p=0.7),
        K.RandomContrast((0.6, 1.5), clip_output=False, p=0.7),
        K.Normalize(0.5, 0.25),
        K.Denormalize(0.5, 0.25),
    ],
    "auto contrast": lambda: [K.RandomAutoContrast(p=0.8), K.Normalize(0.5, 0.25)],
    "noise": lambda: [K.RandomGaussianNoise(0.1, 0.3, p=0.8), K.RandomVerticalFlip()],
    "noise of torchvision": lambda: [
        v2.GaussianNoise(0.1, 0.3),
        v2.GaussianNoise(-0.1, 0.2, clip=False),
        v2.ToDtype(torch.float32, scale=True),
        v2.GaussianNoise(0.1, 0.3),
        v2.RandomApply([v2.GaussianNoise(sigma=0.3, clip=False)], p=0.5),
    ],
    "noise, same": lambda: [K.RandomGaussianNoise(0.1, 0.3, p=0.8, same_on_batch=True)],
    "blur": lambda: [K.RandomHorizontalFlip(), K.RandomGaussianBlur((5, 9), (0.3, 2.0), p=0.7), K.RandomInvert()],
    "blur, constant": lambda: [K.RandomGaussianBlur((3, 3), (0.3, 2.0), border_type="constant", p=0.7)],
    "blur, circular": lambda: [K.RandomGaussianBlur((5, 3), (0.3, 2.0), border_type="circular", p=0.7)],
    "blur, replicate": lambda: [K.RandomGaussianBlur((3, 1), (0.3, 2.0), border_type="replicate", p=1.0)],
    "either mix": lambda: [
        K.AugmentationSequential(
            K.RandomMixUpV2(p=1.0), K.RandomCutMixV2(p=1.0, cut_size=(0.3, 0.6), use_correct_lambda=True), random_apply=1
        ),
        K.RandomInvert(),
    ],
    "torchvision's mixes": lambda: [
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
        v2.RandomChoice([v2.MixUp(alpha=0.4), v2.CutMix()]),
        v2.RandomApply([v2.CutMix()], p=0.5),
        v2.RandomInvert(),
    ],
    "mixup": lambda: [K.RandomGrayscale(), K.RandomMixUpV2(p=1.0), K.RandomGrayscale(), K.Normalize(0.5, 0.25)],
    "mixup, never": lambda: [K.RandomMixUpV2(p=0.0)],
    "mixup, alone": lambda: [K.RandomMixUpV2(p=1.0)],
    "sharpness": lambda: [K.RandomSharpness((0.0, 3.0), p=0.8), K.Normalize(0.5, 0.25)],
    "CLAHE": lambda: [K.RandomClahe((1.0, 40.0), (3, 4), p=0.8), K.RandomInvert()],
    "channels": lambda: [
        K.RandomResizedCrop((16, 20)),
        K.RandomChannelShuffle(p=0.6),
        K.ColorJitter(0.4, 0.9, p=0.7),
        K.RandomGrayscale(p=0.5),
        K.RandomHorizontalFlip(),
        K.Normalize(0.5, 0.25),
    ],
    "jitter, then jitter": lambda: [K.ColorJitter(0.4, 0.9, p=0.7), K.ColorJitter(0.4, 0.9, order=(1, 0))],
    "jitter of normalised images": lambda: [K.Normalize(0.5, 0.25), K.ColorJitter(0.4, 0.9, p=0.5)],
    "jitter between filters": lambda: [
        K.RandomSharpness((0.0, 3.0), p=0.5),
        K.ColorJitter(0.4, 0.9, p=0.5),
        K.RandomSharpness((0.0, 3.0), p=0.5),
    ],
    "filters, each for some": lambda: [
        K.RandomEqualize(p=0.5),
        K.RandomClahe((1.0, 40.0), (3, 4), p=0.5),  # before what rounds: a level may become the next one
        K.RandomAutoContrast(p=0.5),
        K.RandomGaussianBlur((3, 3), (0.3, 2.0), p=0.5),
        K.RandomSharpness((0.0, 3.0), p=0.5),
        K.RandomRotation(20.0, p=0.5),
        K.RandomGaussianBlur((3, 11), (0.3, 2.0), p=0.5),
        K.Normalize(0.5, 0.25),
    ],
}

RGB_CLOSE = {
    **alone(exact=False, rgb=True),
    "noise behind a filter": lambda: [
        K.RandomSharpness((0.0, 3.0), p=0.8),
        K.RandomRGBShift(p=0.8),
        K.RandomSaltAndPepperNoise(0.3, p=0.8),
        K.RandomGaussianIllumination((0.3, 0.6), p=0.8),
    ],
    "one channel, then three": lambda: [
        v2.Grayscale(),
        v2.RandomCrop(14, padding=3, fill=99),
        v2.RGB(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN.tolist(), STD.tolist()),
    ],
    "one channel, then grey, then a jitter": lambda: [
        v2.Grayscale(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5], [2.0]),
        v2.Grayscale(3),
        v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
    ],
    "jpeg": lambda: [
        v2.RandomCrop((14, 18)),
        v2.RandomApply([v2.JPEG((5, 95))], p=0.5),
        v2.RandomHorizontalFlip(),
        v2.JPEG((5, 95)),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN.tolist(), STD.tolist()),
    ],
    "erased with a colour": lambda: [K.RandomHorizontalFlip(), v2.RandomErasing(0.8, value=(9, 99, 255))],
    "colour": lambda: [
        K.RandomResizedCrop((16, 20)),
        K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
        K.RandomGrayscale(p=0.5),
        K.Normalize(MEAN, STD),
    ],
    "jitters around a contrast": lambda: [
        K.ColorJitter(0.4, p=0.5),
        K.ColorJitter(0.4, 0.9, p=0.7),
        K.ColorJitter(saturation=0.9, p=0.5),
    ],
    "one of colours": lambda: [
        auto.RandAugment(3, 10, [[("color", 0.1, 1.9)], [("contrast", 0.1, 1.9)], [("solarize_add", 0.0, 0.43)]]),
        K.Normalize(MEAN, STD),
    ],
    "one of torchvision's": lambda: [
        v2.RandAugment(interpolation=InterpolationMode.BILINEAR, fill=[255, 128, 0]),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN.tolist(), STD.tolist()),
    ],
    "weighted chains": lambda: [
        v2.RandomResizedCrop((16, 20)),
        v2.RandomApply([v2.AugMix(10, 2, 2, fill=[255, 128, 0])], p=0.8),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN.tolist(), STD.tolist()),
    ],
    "one of, then jitter": lambda: [
        auto.AutoAugment([[("color", 0.8, 8), ("posterize", 0.6, 2)], [("invert", 0.5, None), ("rotate", 0.7, 1)]]),
        K.ColorJitter(0.4, 0.9, p=0.7),
    ],
    "orders of samples": lambda: [
        v2.RandomApply([v2.ColorJitter(0.4, 0.9, 0.9, 0.1), v2.RandomGrayscale(0.5)], p=0.8),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN.tolist(), STD.tolist()),
    ],
    "classification, torchvision's": lambda: [
        v2.RandomResizedCrop((16, 20)),
        v2.RandomHorizontalFlip(),
        v2.TrivialAugmentWide(interpolation=InterpolationMode.BILINEAR),
        v2.ToDtype(torch.float32, scale=True),
    ],
    "every step in bytes": lambda: [
        v2.RandomResizedCrop((16, 20), antialias=False),
        v2.GaussianBlur(3),
        v2.RandomAdjustSharpness(2.0, p=0.7),
        v2.ColorJitter(0.4, 0.4, 0.4, 0.2),
        v2.RandomGrayscale(0.3),
        v2.RandomRotation(30, "bilinear", fill={torch.Tensor: [99.6, 0, 255], tv_tensors.Mask: 0}),
        v2.ToDtype(torch.float32, scale=True),
    ],
    "autocontrast, torchvision's": lambda: [
        v2.RandomAutocontrast(0.8),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5], [0.25]),
    ],
    "photometric": lambda: [
        v2.RandomApply([v2.ColorJitter(0.4)], p=0.5),
        v2.RandomPhotometricDistort(p=0.7),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN.tolist(), STD.tolist()),
    ],
    "hue, saturation": lambda: [K.RandomHue((-0.5, 0.5), p=0.7), K.RandomSaturation((0.2, 1.8), p=0.7)],
    "self-supervised": lambda: [
        K.RandomResizedCrop((24, 24)),
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
        K.RandomGrayscale(p=0.2),
        K.RandomGaussianBlur((11, 11), (0.1, 2.0), p=0.5),
        K.Normalize(MEAN, STD),
    ],
}

TIES = {
    "rotation, nearest, filled": lambda: [v2.RandomRotation(40, fill={torch.Tensor: 191, tv_tensors.Mask: 0})],
    "resized crop, nearest": lambda: [K.RandomResizedCrop((16, 20), resample="nearest")],
    "affine, nearest": lambda: [K.RandomAffine(20.0, resample="nearest", p=1.0)],
}
"""Nearest neighbour: at equal distance, rounding decides which pixel is read."""

JUMPS = {
    *(case.name for case in CASES.values() if case.alone and case.jumps),
    "choice and order",
    "colour",
    "jitter, then jitter",
    "jitters around a contrast",
    "orders of samples",
    "photometric",
    "hue, saturation",
    "self-supervised",
    "one of colours",
    "one of torchvision's",
    "weighted chains",
    "one of, then jitter",
    *("antialiased crop, its middle where none fits", "drawn size, padded crop", "zoomed out, drawn size, middle"),
    *("perspective, filled", "affine, filled", "cubic behind levels", "floats of bytes", "autocontrast, torchvision's"),
    *("classification, torchvision's", "every step in bytes", "noise of torchvision", "erased with noise"),
}
"""A pixel at a threshold, such as the border of two bytes, may fall on either side of it: a card fuses products and sums.

Leave a name out unless the test fails without it.
"""

OF_BYTES = ("classification, torchvision's", "every step in bytes", "jpeg", "one of torchvision's", "weighted chains")
"""Several steps that return to bytes: floats, which have no such steps, run in another program, or are refused."""

OF_ALL_CHANNELS = ("hue, saturation", "jitter, then jitter", *alone(exact=False, rgb=True))
"""Each channel is made of all three, and so is NaN where one is: compared on images ``with_holes`` too."""

GROUPS = ("EXACT", "RGB_EXACT", "CLOSE", "RGB_CLOSE", "TIES")
"""Names of the dicts above. ``RGB_``: takes images of three channels only."""


def with_holes(images):
    """Floating images, of which one channel is NaN in a rectangle."""
    holes = images.clone()
    holes[:, 1, 5:9, 7:12] = float("nan")
    return holes
