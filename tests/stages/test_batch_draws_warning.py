"""The warning of torchvision's transforms as a stage, which draw once for the whole batch."""

import copy
import inspect
import warnings

import pytest
import torch
from support.ops.library_transforms import instance
from torch import nn
from torchvision import transforms as v1
from torchvision.models import ResNet18_Weights
from torchvision.transforms import v2

from gpuaug import GpuAugWarning, StreamedLoader, TransformStage
from gpuaug.core.torchvision_types import names_drawing_once

TEXT = "because torchvision's {} draws once for the whole batch"

BASES = {"Transform", "AutoAugmentPolicy", "InterpolationMode"}
"""Names of torchvision's that are no transforms."""

CONTAINERS = {"Compose", "RandomApply", "RandomChoice", "RandomOrder"}

FOR_BATCHES = {"CutMix", "MixUp"}
"""Random, and documented to draw once for a batch."""

NO_DRAW_FOR_THE_BATCH = {
    "CenterCrop",
    "ClampBoundingBoxes",
    "ClampKeyPoints",
    "ConvertBoundingBoxFormat",
    "ConvertImageDtype",
    "FiveCrop",
    "GaussianNoise",  # which draws for each pixel
    "Grayscale",
    "Identity",
    "Lambda",
    "LinearTransformation",
    "Normalize",
    "PILToTensor",
    "Pad",
    "RGB",
    "Resize",
    "SanitizeBoundingBoxes",
    "SanitizeKeyPoints",
    "SetClampingMode",
    "TenCrop",
    "ToDtype",
    "ToImage",
    "ToPILImage",
    "ToPureTensor",
    "ToTensor",
    "UniformTemporalSubsample",
}


def transforms_of(module):
    """Every transform of one of torchvision's modules but the containers, with arguments."""
    for name, kind in vars(module).items():
        if inspect.isclass(kind) and kind.__module__.startswith("torchvision.transforms") and name not in BASES | CONTAINERS:
            yield pytest.param(name, instance(kind), id=f"{module.__name__}.{name}")


@pytest.mark.parametrize(("name", "transform"), [*transforms_of(v2), *transforms_of(v1)])
def test_every_transform_of_torchvision_is_known_to_draw_for_the_batch_or_not(name, transform):
    assert names_drawing_once(transform) == (() if name in NO_DRAW_FOR_THE_BATCH | FOR_BATCHES else (name,))


RUN = {
    "AutoAugment",
    "CenterCrop",
    "ColorJitter",
    "GaussianBlur",
    "GaussianNoise",
    "Grayscale",
    "Identity",
    "Pad",
    "RandAugment",
}
RUN |= {"RandomAffine", "RandomChannelPermutation", "RandomCrop", "RandomGrayscale", "RandomHorizontalFlip", "RandomInvert"}
RUN |= {"RandomPerspective", "RandomPhotometricDistort", "RandomResizedCrop", "RandomRotation", "Resize"}
RUN |= {"RandomAdjustSharpness", "RandomAutocontrast", "RandomEqualize", "RandomErasing", "RandomPosterize", "RandomSolarize"}
OF_BYTES = {"AutoAugment", "RandAugment", "RandomEqualize", "RandomPosterize"}


def run_transforms():
    """Transforms in ``RUN``, and those with a probability also with a probability of 1."""
    for param in transforms_of(v2):
        name, transform = param.values
        if name in RUN:
            yield param
            if hasattr(transform, "p"):
                certain = copy.copy(transform)
                certain.p = 1.0
                yield pytest.param(name, certain, id=f"{param.id}, p=1")


@pytest.mark.parametrize(("name", "transform"), [*run_transforms()])
def test_what_is_said_of_a_transform_is_what_it_does_with_images_that_are_all_the_same(name, transform):
    image = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0))
    batch = image.expand(4, 3, 16, 16).contiguous()
    if name in OF_BYTES:
        batch = (batch * 255).to(torch.uint8)
    made = []
    for seed in range(12):
        torch.manual_seed(seed)
        made.append(transform(batch))
    for_all = all(torch.equal(one, images[0]) for images in made for one in images)
    always = all(torch.equal(images, made[0]) for images in made)
    assert (for_all and not always) == (names_drawing_once(transform) != ())


class OwnCrop(v2.RandomCrop):
    pass


class EachByItself(v2.RandomCrop):
    def forward(self, images):
        return torch.stack([v2.RandomCrop.forward(self, image) for image in images])


class OwnDraws(v2.Transform):
    def make_params(self, flat_inputs):
        return {"scale": torch.rand(len(flat_inputs[0]), 1, 1, 1)}

    def transform(self, inpt, params):
        return inpt * params["scale"]


class Cropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.crop = v2.RandomCrop(4)


MIXES = [v2.CutMix(num_classes=3), v2.MixUp(num_classes=3)]

HELD = {
    "a list of random ones and others": (
        v2.Compose([v2.Resize(8), v2.RandomCrop(4), v2.RandomHorizontalFlip()]),
        ("RandomCrop", "RandomHorizontalFlip"),
    ),
    "one twice": (v2.Compose([v2.RandomInvert(), v2.RandomInvert()]), ("RandomInvert",)),
    "deterministic ones": (v2.Compose([v2.Resize(8), v2.CenterCrop(4), v2.ToDtype(torch.float32), v2.Normalize([0], [1])]), ()),
    "nested": (v2.Compose([v2.Compose([v1.Compose([v1.RandomCrop(4)])])]), ("RandomCrop",)),
    "a chance": (v2.RandomApply([v2.CenterCrop(4)], p=0.5), ("RandomApply",)),
    "a chance of a random one": (v2.RandomApply([v2.RandomCrop(4)], p=0.5), ("RandomApply", "RandomCrop")),
    "a certain one": (v2.RandomApply([v2.CenterCrop(4)], p=1.0), ()),
    "a certain random one": (v2.RandomApply(nn.ModuleList([v2.RandomCrop(4)]), p=1.0), ("RandomCrop",)),
    "none": (v2.RandomApply([v2.RandomCrop(4)], p=0.0), ()),
    "a choice": (v2.RandomChoice([v2.CenterCrop(4), v2.Identity()]), ("RandomChoice",)),
    "a choice of v1": (v1.RandomChoice([v1.CenterCrop(4), v1.Pad(1)]), ("RandomChoice",)),
    "an order": (v2.RandomOrder([v2.CenterCrop(4), v2.Pad(1)]), ("RandomOrder",)),
    "mixes": (v2.RandomChoice(MIXES), ()),
    "mixes, by chance": (v2.RandomApply([v2.RandomChoice(MIXES)], p=0.5), ()),
    "mixes behind a crop": (v2.Compose([v2.RandomCrop(4), v2.RandomChoice(MIXES)]), ("RandomCrop",)),
    "a certain flip": (v2.RandomHorizontalFlip(p=1.0), ()),
    "a certain flip of v1": (v1.RandomVerticalFlip(p=1), ()),
    "a certain perspective": (v2.RandomPerspective(p=1.0), ("RandomPerspective",)),
    "never": (v2.RandomErasing(p=0.0), ()),
    "a blur of one sigma": (v2.GaussianBlur(3, sigma=1.0), ()),
    "a blur of one sigma of v1": (v1.GaussianBlur(3, sigma=1.0), ()),
    "one quality": (v2.JPEG(50), ()),
    "a sequential": (nn.Sequential(v2.Resize(8), v2.RandomCrop(4)), ("RandomCrop",)),
    "a subclass": (OwnCrop(4), ("OwnCrop",)),
    "a subclass that runs each image": (EachByItself(4), ()),
    "a transform of the user's": (OwnDraws(), ()),
    "a module of the user's": (Cropping(), ()),
    "a function": (lambda images: v2.RandomCrop(4)(images), ()),
    "a function of torchvision's": (v2.functional.hflip, ()),
    "a preset": (ResNet18_Weights.DEFAULT.transforms(), ()),
}


@pytest.mark.parametrize(("transform", "names"), HELD.values(), ids=HELD)
def test_a_stage_warns_of_what_draws_once_for_the_batch(transform, names):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stage = TransformStage(transform)
        loader = StreamedLoader([torch.rand(2, 3, 8, 8)] * 2, device="cpu")
        loader.stages = [stage]
    texts = [str(each.message) for each in caught]
    assert len(texts) == bool(names)
    assert all(TEXT.format(", ".join(names)) in text for text in texts)
    assert {each.category for each in caught} <= {GpuAugWarning}


def test_a_bare_callable_is_warned_of_once_and_not_at_every_batch():
    with pytest.warns(GpuAugWarning, match=TEXT.format("RandomCrop")) as caught:
        loader = StreamedLoader([torch.rand(2, 3, 8, 8)] * 3, [v2.RandomCrop(4)], device="cpu")
    assert len(caught) == 1
    # A warning is an error in these tests.
    assert [len(images) for _ in range(2) for images in loader] == [2] * 6
