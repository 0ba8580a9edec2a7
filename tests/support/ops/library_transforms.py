"""One instance of every transform of torchvision and Kornia, with arguments for small images."""

import inspect

import kornia.augmentation as K
import kornia.geometry.transform as geometry
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

ARGUMENTS = {
    "CenterCrop": (4,),
    "ConvertImageDtype": (torch.float32,),
    "ConvertBoundingBoxFormat": ("XYXY",),
    "ElasticTransform": (5.0, 1.0),
    "FiveCrop": (4,),
    "GaussianBlur": (3,),
    "Lambda": (len,),
    "LinearTransformation": (torch.eye(12), torch.zeros(12)),
    "Normalize": ([0.5], [0.5]),
    "Pad": (1,),
    "RandomAdjustSharpness": (2.0,),
    "RandomAffine": (10,),
    "RandomCrop": (4,),
    "RandomPosterize": (4,),
    "RandomResize": (4, 8),
    "RandomResizedCrop": (4,),
    "RandomRotation": (10,),
    "RandomShortestSize": ([4, 8],),
    "RandomSolarize": (0.5,),
    "Resize": (4,),
    "ScaleJitter": ((8, 8),),
    "SetClampingMode": ("soft",),
    "TenCrop": (4,),
    "ToDtype": (torch.float32,),
    "UniformTemporalSubsample": (2,),
}
OPTIONS = {
    "ColorJitter": {"brightness": 0.5},
    "CutMix": {"num_classes": 3},
    "JPEG": {"quality": (5, 50)},
    "MixUp": {"num_classes": 3},
    "ScaleJitter": {"scale_range": (0.5, 2.0)},
}
"""Keyword arguments of torchvision's transforms."""

KORNIA_ARGUMENTS = {
    "Affine": (torch.tensor([90.0, 90.0]),),
    "CenterCrop": (4,),
    "CenterCrop2D": ((4, 4),),
    "Denormalize": (torch.zeros(3), torch.ones(3)),
    "LongestMaxSize": (4,),
    "Normalize": (torch.zeros(3), torch.ones(3)),
    "PadTo": ((12, 12),),
    "RandomAffine": (10.0,),
    "RandomClahe": ((40.0, 40.0), (2, 2)),
    "RandomCrop": ((4, 4),),
    "RandomFisheye": (torch.tensor([-0.3, 0.3]), torch.tensor([-0.3, 0.3]), torch.tensor([0.9, 1.0])),
    "RandomGaussianBlur": ((3, 3), (0.1, 2.0)),
    "RandomMotionBlur": (3, 35.0, 0.5),
    "RandomRain": ((1, 2), (2, 4), (-2, 2)),
    "RandomResizedCrop": ((4, 4),),
    "RandomRotation": (10.0,),
    "RandomRotation90": ((1, 1),),
    "RandomShear": (10.0,),
    "Rescale": (0.5,),
    "Resize": ((4, 4),),
    "Rotate": (torch.tensor([90.0]),),
    "Scale": (torch.tensor([[0.5, 0.5]]),),
    "Shear": (torch.tensor([[0.5, 0.5]]),),
    "SmallestMaxSize": (4,),
    "Translate": (torch.tensor([[1.0, 1.0]]),),
}

NO_TRANSFORMS = {
    *("AutoAugmentPolicy", "Compose", "InterpolationMode", "RandomApply", "RandomChoice", "RandomOrder", "Transform"),
    *("BaseModel", "BaseWarper", "Homography", "HomographyWarper", "ImageRegistrator", "ScalePyramid", "Similarity"),
    *("GeometricAugmentationBase2D", "IntensityAugmentationBase2D", "RandomDissolving"),
}
"""Containers, base classes, classes that do not map one image to one image, and a class that needs another library."""


def _instances(module, prefix, arguments, options):
    """(label, instance) of each transform of a module whose class is defined below ``prefix``."""
    for name, kind in vars(module).items():
        if inspect.isclass(kind) and kind.__module__.startswith(prefix) and name not in NO_TRANSFORMS:
            yield f"{prefix}: {name}", kind(*arguments.get(name, ()), **options.get(name, {}))


def geometric_transforms():
    """Transforms that move pixels: name → instance. Those of v1 are the classes that v2 defines as geometric."""
    geometric_of_v2 = ("torchvision.transforms.v2._geometry", "torchvision.transforms.v2._auto_augment")
    found = {}
    for prefix in geometric_of_v2:
        found |= _instances(v2, prefix, ARGUMENTS, OPTIONS)
    for name, transform in _instances(v1, "torchvision.transforms", ARGUMENTS, OPTIONS):
        if getattr(v2, type(transform).__name__).__module__ in geometric_of_v2:
            found[name] = transform
    found |= _instances(K, "kornia.augmentation._2d.geometric", KORNIA_ARGUMENTS, {})
    return found | dict(_instances(geometry, "kornia.geometry.transform", KORNIA_ARGUMENTS, {}))


def colour_transforms():
    """Transforms that change values only, and run on a batch of floats: name → instance."""
    found = dict(_instances(K, "kornia.augmentation._2d.intensity", KORNIA_ARGUMENTS, {}))
    for module in (v1, v2):
        for name in COLOURS_OF_TORCHVISION & vars(module).keys():
            transform = getattr(module, name)(*ARGUMENTS.get(name, ()), **OPTIONS.get(name, {}))
            found[f"{module.__name__}: {name}"] = transform
    return dict(sorted(found.items()))


COLOURS_OF_TORCHVISION = {
    *("ColorJitter", "GaussianBlur", "GaussianNoise", "Grayscale", "Identity", "Normalize", "RandomAdjustSharpness"),
    *("RandomAutocontrast", "RandomChannelPermutation", "RandomEqualize", "RandomErasing", "RandomGrayscale", "RandomInvert"),
    *("RandomPhotometricDistort", "RandomPosterize", "RandomSolarize", "RGB"),
}
