"""Modules that ``gpuaug.fuse`` lowers, their containers, and for each argument of them another value."""

import inspect
import zlib

import kornia.augmentation as K
import torch
from kornia.constants import DataKey
from support.ops.op_cases import CASES
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug.fusion.lower import kornia, torchvision
from gpuaug.stages.definition import definition

KORNIA = [*kornia.LOWERED, *kornia.POLICIES]
TORCHVISION = [*torchvision.LOWERED, *torchvision.MIXES]
OTHERS = [
    *torchvision.IDENTITIES, *torchvision.TARGET_TRANSFORMS, v2.ToDtype, v2.ConvertImageDtype, *torchvision.RANDOM_CONTAINERS,
    v2.Compose, v2.Lambda, K.AugmentationSequential, K.ImageSequential, K.RandomRain,
    K.VideoSequential,
]  # fmt: skip
"""Modules without an op, modules that their library runs, and containers."""


def halved(image):
    return image / 2


def doubled(image):
    return image * 2


FLIPS = [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]
POLICY = [[("invert", 1.0, None)], [("equalize", 0.5, None)]]
GIVEN = {
    "RandomCrop": {"size": (8, 8)},
    "CenterCrop": {"size": (8, 8)},
    "FiveCrop": {"size": (8, 8)},
    "TenCrop": {"size": (8, 8)},
    "PadTo": {"size": (24, 24)},
    "FixedSizeCrop": {"size": (8, 8)},
    "PadIfSmaller": {"size": 20},
    "RandomResizedCrop": {"size": (8, 8)},
    "Resize": {"size": (8, 8)},
    "RandomRotation": {"degrees": 10.0},
    "RandomRotation90": {"times": (0, 2)},
    "RandomAffine": {"degrees": 10.0},
    "RandomShear": {"shear": 10.0},
    "Normalize": {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.2, 0.2)},
    "Denormalize": {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.2, 0.2)},
    "RandomGaussianBlur": {"kernel_size": (3, 3), "sigma": (0.1, 2.0)},
    "RandomMotionBlur": {"kernel_size": 3, "angle": 35.0, "direction": 0.5},
    "GaussianBlur": {"kernel_size": 3},
    "UniformTemporalSubsample": {"num_samples": 2},
    "RandAugment": {"n": 2, "m": 10},
    "Pad": {"padding": 2},
    "RandomResize": {"min_size": 8, "max_size": 12},
    "RandomShortestSize": {"min_size": (8, 12)},
    "ScaleJitter": {"target_size": (16, 16)},
    "RandomSolarize of torchvision": {"threshold": 0.5},
    "RandomPosterize of torchvision": {"bits": 4},
    "RandomAdjustSharpness": {"sharpness_factor": 2.0},
    "RandAugment of torchvision": {},
    "MixUp": {"num_classes": 10},
    "CutMix": {"num_classes": 10},
    "ConvertBoundingBoxFormat": {"format": "XYWH"},
    "ToDtype": {"dtype": torch.float32},
    "RandomApply": {"transforms": FLIPS},
    "RandomChoice": {"transforms": FLIPS},
    "RandomOrder": {"transforms": FLIPS},
    "Compose": {"transforms": FLIPS},
    "JPEG": {"quality": 50},
    "ElasticTransform": {"sigma": 1.0},
    "LinearTransformation": {"transformation_matrix": torch.eye(48), "mean_vector": torch.zeros(48)},
    "Lambda": {"lambd": halved},
    "RandomTranslate": {"translate_x": (0.0, 0.1)},
    "RandomRain": {"drop_height": (3, 4), "drop_width": (1, 2), "number_of_drops": (5, 6)},
}
"""Arguments that a module is made with, by its class. The others are left out."""

OTHER = {
    "p": 0.3, "p_batch": 0.4, "same_on_batch": True, "keepdim": True, "size": (9, 9), "padding": 3, "pad_if_needed": True,
    "fill": 0.3, "padding_mode": "reflect", "resample": "nearest", "cropping_mode": "resample", "pad_mode": "reflect",
    "pad_value": 0.5, "crop_if_exceeds": False, "scale": (0.3, 0.9), "ratio": (0.8, 1.2), "side": "long", "degrees": 20.0,
    "times": (1, 3), "translate": (0.1, 0.2), "shear": 20.0, "fill_value": 0.5, "translate_x": (0.0, 0.2),
    "translate_y": (0.0, 0.2), "distortion_scale": 0.3, "sampling_method": "area_preserving", "brightness": (0.6, 1.4),
    "contrast": (0.6, 1.4), "saturation": (0.6, 1.4), "hue": (-0.2, 0.2), "clip_output": False,
    "max_val": 0.9, "thresholds": (0.2, 0.6), "additions": (0.2, 0.3), "bits": (4, 6),
    "snow_coefficient": (0.2, 0.4), "rgb_weights": torch.tensor([0.2, 0.3, 0.5]), "num_drop_channels": 2,
    "mean": (0.1, 0.2, 0.3), "std": (0.3, 0.4, 0.5), "value": 0.4, "order": (3, 2, 1, 0), "kernel_size": (5, 5),
    "sigma": (0.5, 1.0), "border_type": "constant", "separable": False, "sharpness": 0.9, "clip_limit": (10.0, 20.0),
    "grid_size": (4, 4), "slow_and_differentiable": True, "lambda_val": (0.2, 0.4), "num_mix": 2, "cut_size": (0.2, 0.4),
    "beta": 0.7, "data_keys": ["input", "mask"], "use_correct_lambda": True, "n": 3, "m": 12, "policy": POLICY,
    "transformation_matrix_mode": "skip", "side_range": (1.0, 2.0), "min_scale": 0.4, "max_scale": 0.9, "trials": 20,
    "min_aspect_ratio": 0.6, "max_aspect_ratio": 1.8, "sampler_options": [0.2, 1.0], "interpolation": "bicubic",
    "min_size": 9, "max_size": 13, "target_size": (20, 20), "scale_range": (0.5, 1.5), "expand": True, "center": (3, 4),
    "num_output_channels": 3, "threshold": 0.7, "sharpness_factor": 3.0, "num_ops": 3, "magnitude": 7, "inplace": True,
    "num_magnitude_bins": 21, "alpha": 0.4, "num_classes": 11, "quality": 80, "labels_getter": halved, "clamping_mode": "hard",
    "format": "CXCYWH", "min_area": 3.0, "dtype": torch.float16, "transforms": FLIPS[:1], "lambd": doubled, "clip": False,
    "transformation_matrix": torch.eye(48) * 2, "mean_vector": torch.ones(48), "random_apply": 1,
    "random_apply_weights": [0.2, 0.8], "extra_args": {DataKey.MASK: {"resample": "bilinear", "align_corners": True}},
    "if_unsupported_ops": "skip", "data_format": "BCTHW", "num_samples": 3,
    "disable_item_features": False, "disable_sequential_features": True,
    "severity": 10, "mixture_width": 2, "chain_depth": 1,
    "drop_height": (4, 5), "drop_width": (2, 3), "number_of_drops": (6, 7), "output_size": (9, 9), "mosaic_grid": (3, 2),
    "start_ratio_range": (0.1, 0.6), "min_bbox_size": 2.0, "grid": (4, 1),
}  # fmt: skip
"""Another value, by the name of the argument."""

OTHER_OF = {
    "RandomRotation of torchvision": {"interpolation": "bilinear"},
    "RandomPosterize of torchvision": {"bits": 5},
    "RandomChoice": {"p": [0.3, 0.7]},
    "RandomShortestSize": {"min_size": (9, 12)},
    "RandomGaussianNoise": {"mean": 0.2, "std": 0.5},
    "GaussianNoise": {"mean": 0.2},
    "AutoAugment of torchvision": {"policy": v2.AutoAugmentPolicy.SVHN},
    "TrivialAugment": {"policy": [[("invert", 0.0, 1.0)]]},
    "RandAugment": {"policy": [[("invert", 0.0, 1.0)], [("equalize", 0.0, 1.0)], [("auto_contrast", 0.0, 1.0)]]},
    "RandomSnow": {"brightness": (1.5, 2.5)},
    "RandomAffine of Kornia": {"padding_mode": "border"},
    "RandomShear": {"padding_mode": "border"},
    "RandomTranslate": {"padding_mode": "border"},
    "ToDtype": {"dtype": {torch.Tensor: torch.float32}},
    "PadIfSmaller": {"size": 25},
    "RandomZoomOut": {"fill": {tv_tensors.Image: 0.3}},
    "RandomGaussianBlur": {"sigma": (0.5, 1.0)},
    "RandomMotionBlur": {"border_type": "reflect", "resample": "bilinear"},
    "RandomGaussianIllumination": {"center": (0.2, 0.7)},
}
"""Another value where that of ``OTHER`` does not fit the class."""

WITHOUT_EFFECT = {
    ("ImageSequential", "disable_item_features"): "whether the container keeps its last images, to be shown",
}
"""Why an argument changes no draw and no pixel, by (class, argument)."""


def _of(table, kind):
    library = "torchvision" if kind.__module__.startswith("torchvision") else "Kornia"
    return table.get(f"{kind.__name__} of {library}", table.get(kind.__name__, {}))


def made(kind, made_as=None, **arguments):
    """A module with the arguments that it needs, and these; of the subclass ``made_as``, if given."""
    given = {**_of(GIVEN, kind), **arguments}
    positional = kornia_flips() if issubclass(kind, K.ImageSequential) and kind in OTHERS else ()
    return (made_as or kind)(*positional, **given)


def kornia_flips():
    return K.RandomHorizontalFlip(), K.RandomVerticalFlip()


def other_values(kind):
    """Another value for each argument of the constructor, by its name."""
    others = {**(CASES[kind].first_settings if kind in CASES else {}), **OTHER}
    found = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        own = _of(OTHER_OF, kind)
        if name in own:
            found[name] = own[name]
        elif isinstance(parameter.default, bool):
            found[name] = not parameter.default
        else:
            assert name in others, f"put {name} of {kind.__name__} into the first settings of its Case, or into OTHER"
            found[name] = others[name]
    return found


CONTAINERS = {
    "alone": lambda module: module,
    "list": lambda module: [module],
    "tuple": lambda module: (nn.Identity(), module),
    "Sequential": lambda module: nn.Sequential(module),
    "Sequential in a list": lambda module: [nn.Sequential(nn.Sequential(module))],
}
CONTAINERS_OF = {
    "Kornia": {
        "AugmentationSequential": lambda module: K.AugmentationSequential(module),
        "ImageSequential": lambda module: [K.ImageSequential(K.RandomInvert(), module, random_apply=1)],
        "both": lambda module: K.AugmentationSequential(K.ImageSequential(module)),
    },
    "torchvision": {
        "Compose": lambda module: v2.Compose([module]),
        "RandomApply": lambda module: [v2.RandomApply([module])],
        "RandomApply of a ModuleList": lambda module: v2.RandomApply(nn.ModuleList([module])),
        "RandomChoice": lambda module: [v2.RandomChoice([v2.RandomInvert(), module])],
        "RandomOrder": lambda module: v2.Compose([v2.RandomOrder([module, v2.RandomInvert()])]),
    },
}


def containers(kind):
    """Containers that hold a module of a class, by name."""
    library = "Kornia" if kind.__module__.startswith("kornia.") else "torchvision"
    return {**CONTAINERS, **CONTAINERS_OF[library]}


class Runs:
    """A function of the user's that holds a pipeline of any form."""

    def __init__(self, pipeline):
        self.pipeline = pipeline

    def __call__(self, images):
        return images


def defined(pipeline):
    """The definition of a stage with a pipeline."""
    return definition(gpuaug.TransformStage(Runs(pipeline)))


def all_defined():
    """Checksums of the definitions of all modules."""
    kinds = [*KORNIA, *TORCHVISION, *OTHERS]
    return {kind.__name__: zlib.crc32(defined([{"a", "b", "c"}, made(kind)]).encode()) for kind in kinds}
