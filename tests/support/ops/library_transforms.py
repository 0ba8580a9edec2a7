"""One instance of every transform of torchvision and Kornia, with arguments for small images."""

import inspect

import kornia.augmentation as K
import kornia.geometry.transform as geometry
import torch
from support.ops import other_arguments
from torchvision import transforms as v1
from torchvision.transforms import v2

SIZED = ("CenterCrop", "FiveCrop", "RandomCrop", "RandomResizedCrop", "Resize", "TenCrop")
"""Names of transforms to a size, which is four pixels along each axis."""

ARGUMENTS = {
    "Affine": (torch.tensor([90.0, 90.0]),),
    "CenterCrop2D": ((4, 4),),
    "ColorJitter": (0.5,),
    "ConvertImageDtype": (torch.float32,),
    "JPEG": ((5, 50),),
    "LinearTransformation": (torch.eye(12), torch.zeros(12)),
    "LongestMaxSize": (4,),
    "RandomFisheye": (torch.tensor([-0.3, 0.3]), torch.tensor([-0.3, 0.3]), torch.tensor([0.9, 1.0])),
    "Rescale": (0.5,),
    "Rotate": (torch.tensor([90.0]),),
    "Scale": (torch.tensor([[0.5, 0.5]]),),
    "SetClampingMode": ("soft",),
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


def instance(kind):
    """Make an instance of a class of transforms."""
    if kind.__name__ in ARGUMENTS:
        return kind(*ARGUMENTS[kind.__name__])
    return other_arguments.made(kind, **({"size": (4, 4)} if kind.__name__ in SIZED else {}))


def _instances(module, prefix):
    """(label, instance) of each transform of a module whose class is defined below ``prefix``."""
    for name, kind in vars(module).items():
        if inspect.isclass(kind) and kind.__module__.startswith(prefix) and name not in NO_TRANSFORMS:
            yield f"{prefix}: {name}", instance(kind)


def geometric_transforms():
    """Transforms that move pixels: name → instance. Those of v1 are the classes that v2 defines as geometric."""
    geometric_of_v2 = ("torchvision.transforms.v2._geometry", "torchvision.transforms.v2._auto_augment")
    found = {}
    for prefix in geometric_of_v2:
        found |= _instances(v2, prefix)
    for name, transform in _instances(v1, "torchvision.transforms"):
        if getattr(v2, type(transform).__name__).__module__ in geometric_of_v2:
            found[name] = transform
    found |= _instances(K, "kornia.augmentation._2d.geometric")
    return found | dict(_instances(geometry, "kornia.geometry.transform"))


def colour_transforms():
    """Transforms that change values only, and run on a batch of floats: name → instance."""
    found = dict(_instances(K, "kornia.augmentation._2d.intensity"))
    for module in (v1, v2):
        for name in COLOURS_OF_TORCHVISION & vars(module).keys():
            found[f"{module.__name__}: {name}"] = instance(getattr(module, name))
    return dict(sorted(found.items()))


COLOURS_OF_TORCHVISION = {
    *("ColorJitter", "GaussianBlur", "GaussianNoise", "Grayscale", "Identity", "Normalize", "RandomAdjustSharpness"),
    *("RandomAutocontrast", "RandomChannelPermutation", "RandomEqualize", "RandomErasing", "RandomGrayscale", "RandomInvert"),
    *("RandomPhotometricDistort", "RandomPosterize", "RandomSolarize", "RGB"),
}
