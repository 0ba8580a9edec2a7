"""Advice about modules that ``gpuaug.fuse`` refuses, because it cannot call them as their library does."""

import kornia.augmentation as K
import torch
from support.messages.registry import example
from torch import nn
from torchvision.transforms import v2

import gpuaug

IMAGES = torch.arange(2 * 3 * 8 * 8, dtype=torch.uint8).view(2, 3, 8, 8)
FLIP = v2.RandomHorizontalFlip(1.0)


@example("Put it into a stage without gpuaug.fuse")
def module_for_volumes(told):
    flip, volumes = K.RandomHorizontalFlip3D(p=1.0), torch.rand(2, 1, 4, 6, 7)
    with told:
        gpuaug.fuse(flip)
    (got,) = gpuaug.StreamedLoader([volumes], stages=[flip], device="cpu")
    assert torch.equal(got, volumes.flip(-1))


@example("pipeline must hold containers with Kornia's own forward and without hooks")
def container_with_a_hook(told):
    flip = K.AugmentationSequential(K.RandomHorizontalFlip(p=1.0))
    flip.register_forward_hook(lambda module, inputs, output: 2 * output)
    with told:
        gpuaug.fuse(flip)
    (got,) = gpuaug.StreamedLoader([IMAGES / 255], [gpuaug.TransformStage(flip)], device="cpu")
    torch.testing.assert_close(got, 2 * (IMAGES / 255).flip(-1))


@example("Pass the modules that it contains in a list: [*module.children()]")
def modules_by_name(told):
    module = nn.ModuleDict({"flip": FLIP, "invert": v2.RandomInvert(1.0)})
    with told:
        gpuaug.fuse(module)
    assert torch.equal(gpuaug.fuse([*module.children()])(IMAGES), 255 - IMAGES.flip(-1))


@example("Pass fill=0 for black")
def fill_by_name(told):
    with told:
        gpuaug.PadIfSmaller(9, fill="black")
    assert not gpuaug.PadIfSmaller(9, fill=0)(IMAGES)[..., 8].any()


@example("Pass (height, width), such as size=(640, 640)")
def size_of_a_box(told):
    with told:
        gpuaug.FixedSizeCrop((0, 0, 640, 640))
    assert gpuaug.FixedSizeCrop(size=(640, 640))(IMAGES).shape == (2, 3, 640, 640)


@example("Pass the smallest side in pixels, such as size=480")
def fraction_as_size(told):
    with told:
        gpuaug.PadIfSmaller(1.5)
    assert gpuaug.PadIfSmaller(size=480)(IMAGES).shape == (2, 3, 480, 480)
