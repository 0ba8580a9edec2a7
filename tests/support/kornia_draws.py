"""Parameters drawn by fuse and by Kornia's own generators, for every op that draws."""

import kornia.augmentation as K
import numpy as np
import torch

import gpuaug

COUNT = 12_000

CONSTANT = {
    "batch_idx",
    "center",
    "dst",
    "forward_input_shape",
    "image_shape",
    "input_size",
    "output_size",
    "start_points",
    "values",
}
"""Parameters that are not drawn: they must be equal."""

ONE_A_BATCH = {"order", "gaussian_noise"}
"""Drawn for the batch, and so not compared from sample to sample."""

PARTNERS = {"mixup_pairs", "mix_pairs"}
"""Permutations of the batch: not shared by the samples even under ``same_on_batch``."""

DISTRIBUTION_CASES = {
    "horizontal flip": (K.RandomHorizontalFlip, {}),
    "vertical flip": (K.RandomVerticalFlip, {}),
    "crop": (K.RandomCrop, {"size": (12, 40)}),
    "crop, padded": (K.RandomCrop, {"size": (24, 40), "padding": (3, 5, 2, 7)}),
    "crop, padded if needed": (
        K.RandomCrop,
        {"size": (24, 40), "padding": 1, "pad_if_needed": True, "padding_mode": "reflect"},
    ),
    "resized crop": (K.RandomResizedCrop, {"size": (24, 40)}),
    "resized crop, misses": (K.RandomResizedCrop, {"size": (24, 40), "scale": (0.6, 1.0), "ratio": (0.5, 3.0)}),
    "resized crop, narrow": (K.RandomResizedCrop, {"size": (24, 40), "scale": (0.5, 1.0), "ratio": (0.4, 0.9)}),
    "resized crop, wide": (K.RandomResizedCrop, {"size": (24, 40), "scale": (0.7, 1.0), "ratio": (2.0, 5.0)}),
    "rotation": (K.RandomRotation, {"degrees": 45.0}),
    "rotation, one way": (K.RandomRotation, {"degrees": (10.0, 80.0)}),
    "quarters": (K.RandomRotation90, {"times": (-3, 3)}),
    "affine": (
        K.RandomAffine,
        {"degrees": 30.0, "translate": (0.2, 0.1), "scale": (0.7, 1.3), "shear": (5.0, 20.0, -8.0, 3.0)},
    ),
    "affine, two scales": (K.RandomAffine, {"degrees": (-10.0, 40.0), "scale": (0.5, 0.8, 1.1, 1.4)}),
    "affine, four shears": (K.RandomAffine, {"degrees": 5.0, "shear": (-5.0, 5.0, 10.0, 20.0)}),
    "shear": (K.RandomShear, {"shear": (-10.0, 20.0)}),
    "shear, both": (K.RandomShear, {"shear": (-10.0, 20.0, 5.0, 15.0)}),
    "translate": (K.RandomTranslate, {"translate_x": (-0.2, 0.3), "translate_y": (-0.1, 0.1)}),
    "translate, down": (K.RandomTranslate, {"translate_y": (-0.3, 0.1)}),
    "perspective": (K.RandomPerspective, {"distortion_scale": 0.5}),
    "perspective, outwards": (K.RandomPerspective, {"distortion_scale": 0.6, "sampling_method": "area_preserving"}),
    "erasing": (K.RandomErasing, {}),
    "erasing, wide": (K.RandomErasing, {"scale": (0.1, 0.9), "ratio": (2.0, 4.0), "value": 0.5}),
    "erasing, all": (K.RandomErasing, {"scale": (0.9, 1.5), "ratio": (0.9, 1.5)}),
    "jitter": (K.ColorJitter, {"brightness": 0.4, "contrast": (0.2, 3.0), "saturation": 0.7, "hue": 0.1}),
    "jitter, hue alone": (K.ColorJitter, {"hue": (-0.1, 0.4)}),
    "jiggle": (K.ColorJiggle, {"brightness": 0.4, "contrast": 0.6, "saturation": (0.1, 2.0), "hue": 0.5}),
    "brightness": (K.RandomBrightness, {"brightness": (0.5, 1.5)}),
    "contrast": (K.RandomContrast, {"contrast": (0.5, 1.7)}),
    "saturation": (K.RandomSaturation, {"saturation": (0.2, 1.8)}),
    "hue": (K.RandomHue, {"hue": (-0.5, 0.3)}),
    "gamma": (K.RandomGamma, {"gamma": (0.3, 2.5), "gain": (0.5, 1.5)}),
    "solarize": (K.RandomSolarize, {"thresholds": 0.3, "additions": 0.2}),
    "solarize, bounds": (K.RandomSolarize, {"thresholds": (0.2, 0.9), "additions": (-0.4, 0.1)}),
    "snow": (K.RandomSnow, {"snow_coefficient": (0.2, 0.8), "brightness": (1.0, 3.0)}),
    "posterize": (K.RandomPosterize, {"bits": 3}),
    "posterize, all": (K.RandomPosterize, {"bits": (0.0, 8.0)}),
    "invert": (K.RandomInvert, {}),
    "grey": (K.RandomGrayscale, {}),
    "shuffle": (K.RandomChannelShuffle, {}),
    "equalize": (K.RandomEqualize, {}),
    "CLAHE": (K.RandomClahe, {"clip_limit": (1.0, 9.0)}),
    "auto contrast": (K.RandomAutoContrast, {}),
    "dropout": (K.RandomChannelDropout, {}),
    "dropout of two": (K.RandomChannelDropout, {"num_drop_channels": 2}),
    "blur": (K.RandomGaussianBlur, {"kernel_size": (5, 3), "sigma": (0.1, 2.0)}),
    "sharpness": (K.RandomSharpness, {"sharpness": (0.5, 4.0)}),
    "sharpness, one number": (K.RandomSharpness, {"sharpness": 0.7}),
    "mixup": (K.RandomMixUpV2, {"lambda_val": (0.2, 0.7)}),
    "cutmix": (K.RandomCutMixV2, {"cut_size": (0.1, 0.8), "beta": 0.7, "use_correct_lambda": True}),
    "cutmix, plain": (K.RandomCutMixV2, {"use_correct_lambda": True}),
}
NOT_DRAWN = {K.CenterCrop, K.PadTo, K.Resize, K.Normalize, K.Denormalize}
"""Only the apply mask is drawn."""

SHAPE = (COUNT, 3, 24, 40)


def made(name, **options):
    kind, settings = DISTRIBUTION_CASES[name]
    return kind(**settings, **options)


def ours(module, shape, seed):
    augment = gpuaug.fuse(module)
    assert "left to Kornia" not in str(augment.explain(shape))  # whose draws would be its own
    return augment.draw(shape, seed=seed).as_kornia()


def kornias(module, shape, seed):
    torch.manual_seed(seed)
    return module.forward_parameters(torch.Size(shape))


def columns(params, batch):
    """Each drawn number of a sample, by a name: {name: (B,)}."""
    found = {}
    for key, value in params.items():
        if key in CONSTANT or key in ONE_A_BATCH:
            continue
        numbers = value.numpy()
        if key in ("src", "crop_src"):
            corners = numbers.reshape(batch, 4, 2)
            (left, top), (right, bottom) = corners[:, 0].T, corners[:, 2].T
            width, height = right - left + 1, bottom - top + 1
            found.update({"x": left, "y": top, "width": width, "height": height, "area": width * height})
            rectangle = np.stack((left, top, right, top, right, bottom, left, bottom), -1).reshape(batch, 4, 2)
            np.testing.assert_array_equal(corners, rectangle)
        elif key in ("channels", "channel_idx"):
            found[key] = numbers @ 10 ** np.arange(numbers.shape[1])
        else:
            flat = numbers.reshape(batch, -1) if key not in PARTNERS else numbers.reshape(batch, 1)
            found.update({f"{key} {index}" if flat.shape[1] > 1 else key: flat[:, index] for index in range(flat.shape[1])})
    return found
