"""LeRobot's transforms of images: as lerobot/datasets/transforms.py of lerobot 0.4.4 has them, and from the package."""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import torch
from torchvision.transforms import v2


class RandomSubsetApply(v2.Transform):
    """``n_subset`` of some transforms, picked by weight, in their own order or in that in which they were picked."""

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
        picked = torch.multinomial(torch.tensor(self.p), self.n_subset)
        if not self.random_order:
            picked = picked.sort().values
        self.selected_transforms = [self.transforms[index] for index in picked]
        for transform in self.selected_transforms:
            made = transform(*inputs)
            inputs = made if several else (made,)
        return made


class SharpnessJitter(v2.Transform):
    """Sharpness by a uniform factor."""

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
    """The transforms of a configuration: ``enable``, ``max_num_transforms``, ``random_order`` and ``tfs``."""

    def __init__(self, cfg):
        super().__init__()
        self._cfg = cfg
        self.weights = [each.weight for each in cfg.tfs.values()]
        self.transforms = {name: of_config(each) for name, each in cfg.tfs.items()}
        picks = min(len(self.transforms), cfg.max_num_transforms)
        self.tf = v2.Identity()
        if picks and cfg.enable:
            self.tf = RandomSubsetApply(list(self.transforms.values()), self.weights, picks, cfg.random_order)

    def forward(self, *inputs):
        return self.tf(*inputs)


def of_config(config):
    return (SharpnessJitter if config.type == "SharpnessJitter" else getattr(v2, config.type))(**config.kwargs)


DEFAULT = {
    "brightness": ("ColorJitter", {"brightness": (0.8, 1.2)}),
    "contrast": ("ColorJitter", {"contrast": (0.8, 1.2)}),
    "saturation": ("ColorJitter", {"saturation": (0.5, 1.5)}),
    "hue": ("ColorJitter", {"hue": (-0.05, 0.05)}),
    "sharpness": ("SharpnessJitter", {"sharpness": (0.5, 1.5)}),
    "affine": ("RandomAffine", {"degrees": (-5.0, 5.0), "translate": (0.05, 0.05)}),
}
"""The transforms of LeRobot's default configuration, of which it picks three, each as often."""


class ImageTransformsConfig(SimpleNamespace):
    def __init__(self, enable=False, max_num_transforms=3, random_order=False):
        tfs = {name: SimpleNamespace(weight=1.0, type=kind, kwargs=given) for name, (kind, given) in DEFAULT.items()}
        super().__init__(enable=enable, max_num_transforms=max_num_transforms, random_order=random_order, tfs=tfs)


for _kind in (RandomSubsetApply, SharpnessJitter, ImageTransforms):
    _kind.__module__ = "lerobot.datasets.transforms"


def installed():
    """The module of the installed package alone, whose own imports need much more; ``None`` without one."""
    found = find_spec("lerobot")
    if found is None:
        return None
    folder = Path(found.submodule_search_locations[0])
    places = {f"lerobot.{each}.transforms": folder / each / "transforms.py" for each in ("transforms", "datasets")}
    name, path = next(place for place in places.items() if place[1].exists())  # by version
    spec = spec_from_file_location(name, path)
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
