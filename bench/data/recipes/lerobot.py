"""LeRobot's image transforms: a copy of lerobot/datasets/transforms.py of lerobot 0.4.4, and the module of the package."""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import torch
from torchvision.transforms import v2


class RandomSubsetApply(v2.Transform):
    """Apply ``n_subset`` transforms, drawn with weights ``p``, in the order of the list, or of the draw if ``random_order``."""

    def __init__(self, transforms, p=None, n_subset=None, random_order=False):
        super().__init__()
        weights = [1] * len(transforms) if p is None else p
        self.transforms = transforms
        self.p = [weight / sum(weights) for weight in weights]
        self.n_subset = len(transforms) if n_subset is None else n_subset
        self.random_order = random_order
        self.selected_transforms = None

    def forward(self, *inputs):
        several = len(inputs) > 1
        indices = torch.multinomial(torch.tensor(self.p), self.n_subset)
        if not self.random_order:
            indices = indices.sort().values
        self.selected_transforms = [self.transforms[index] for index in indices]
        for transform in self.selected_transforms:
            outputs = transform(*inputs)
            inputs = outputs if several else (outputs,)
        return outputs


class SharpnessJitter(v2.Transform):
    """Adjust the sharpness by a uniform random factor."""

    def __init__(self, sharpness):
        super().__init__()
        low, high = (max(0.0, 1.0 - sharpness), 1.0 + sharpness) if isinstance(sharpness, float) else sharpness
        self.sharpness = float(low), float(high)

    def make_params(self, flat_inputs):
        return {"factor": torch.empty(1).uniform_(self.sharpness[0], self.sharpness[1]).item()}

    def transform(self, inpt, params):
        return self._call_kernel(F.adjust_sharpness, inpt, sharpness_factor=params["factor"])


F = v2.functional


class ImageTransforms(v2.Transform):
    """Transforms of a configuration with ``enable``, ``max_num_transforms``, ``random_order`` and ``tfs``."""

    def __init__(self, cfg):
        super().__init__()
        self._cfg = cfg
        self.weights = [config.weight for config in cfg.tfs.values()]
        self.transforms = {name: create_transform(config) for name, config in cfg.tfs.items()}
        count = min(len(self.transforms), cfg.max_num_transforms)
        self.tf = v2.Identity()
        if count and cfg.enable:
            self.tf = RandomSubsetApply(list(self.transforms.values()), self.weights, count, cfg.random_order)

    def forward(self, *inputs):
        return self.tf(*inputs)


def create_transform(config):
    return (SharpnessJitter if config.type == "SharpnessJitter" else getattr(v2, config.type))(**config.kwargs)


DEFAULT = {
    "brightness": ("ColorJitter", {"brightness": (0.8, 1.2)}),
    "contrast": ("ColorJitter", {"contrast": (0.8, 1.2)}),
    "saturation": ("ColorJitter", {"saturation": (0.5, 1.5)}),
    "hue": ("ColorJitter", {"hue": (-0.05, 0.05)}),
    "sharpness": ("SharpnessJitter", {"sharpness": (0.5, 1.5)}),
    "affine": ("RandomAffine", {"degrees": (-5.0, 5.0), "translate": (0.05, 0.05)}),
}
"""Transforms of LeRobot's default configuration. A call draws three of them, with equal probability."""


class ImageTransformsConfig(SimpleNamespace):
    def __init__(self, enable=False, max_num_transforms=3, random_order=False):
        tfs = {
            name: SimpleNamespace(weight=1.0, type=type_name, kwargs=arguments)
            for name, (type_name, arguments) in DEFAULT.items()
        }
        super().__init__(enable=enable, max_num_transforms=max_num_transforms, random_order=random_order, tfs=tfs)


for _class in (RandomSubsetApply, SharpnessJitter, ImageTransforms):
    _class.__module__ = "lerobot.datasets.transforms"


def installed():
    """Return the module of the installed package, loaded without the package, whose imports need much more; else ``None``."""
    package_spec = find_spec("lerobot")
    if package_spec is None:
        return None
    folder = Path(package_spec.submodule_search_locations[0])
    candidates = {f"lerobot.{package}.transforms": folder / package / "transforms.py" for package in ("transforms", "datasets")}
    name, path = next(item for item in candidates.items() if item[1].exists())  # the path depends on the version
    spec = spec_from_file_location(name, path)
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
