"""Arguments, inputs and draws that ``fuse`` refuses, and the texts that say so."""

import kornia.augmentation as K
import pytest
import torch
from support.comparison.replay import left_to_kornia
from torch import nn
from torchvision.transforms import v2

import gpuaug

HELD = (K.RandomHorizontalFlip(p=1.0), v2.RandomInvert(1.0), K.AugmentationSequential(K.RandomVerticalFlip(p=1.0)))


@pytest.mark.parametrize("holder", [nn.ModuleList, nn.Sequential, list, tuple])
def test_modules_in_any_sequence_run_in_order(holder):
    images = torch.rand(2, 3, 4, 5)
    pipeline = holder(*[HELD] if holder is not nn.Sequential else HELD)
    for nested in (pipeline, [pipeline], nn.ModuleList([pipeline]) if isinstance(pipeline, nn.Module) else (pipeline,)):
        torch.testing.assert_close(gpuaug.fuse(nested)(images), 1 - images.flip(-1, -2))


class Empty(nn.Module):
    """A module of the user without ``forward``."""


@pytest.mark.parametrize(
    "module", [nn.ModuleDict({"flip": HELD[0]}), nn.ParameterList(), Empty()], ids=lambda m: type(m).__name__
)
def test_modules_without_forward_are_refused_by_fuse(module):
    for pipeline in (module, [module], nn.Sequential(HELD[0], module), K.AugmentationSequential(module)):
        with pytest.raises(gpuaug.ArgumentTypeError, match=f"got {type(module).__name__}, which has no forward"):
            gpuaug.fuse(pipeline)


def test_a_sequence_that_can_be_called_is_a_transform_of_its_own():
    class Own(list):
        def __call__(self, image):
            return 255 - image

    images = torch.arange(48, dtype=torch.uint8).view(1, 3, 4, 4)
    with pytest.warns(gpuaug.GpuAugWarning, match="Own_0 is not fused"):
        augment = gpuaug.fuse(v2.Compose([Own([v2.RandomHorizontalFlip(1.0)])]))
    torch.testing.assert_close(augment(images), 255 - images)


@left_to_kornia
@pytest.mark.parametrize(
    ("module", "shape", "note"),
    [
        (K.RandomSharpness(p=1.0), (2, 3, 2, 8), "RandomSharpness_0: the image has no 3x3 pixels."),
        (K.CenterCrop(9), (2, 3, 8, 8), "CenterCrop_0: crops 9x9 out of 8x8."),
    ],
)
def test_errors_of_kornia_name_the_module_and_why_kornia_runs_it(module, shape, note):
    with pytest.raises(Exception) as caught:  # noqa: PT011 of Kornia's own type
        gpuaug.fuse([module])(torch.zeros(shape))
    (found,) = caught.value.__notes__
    assert found.startswith(f"gpuaug: raised by Kornia, which runs {note}")


@pytest.mark.parametrize(("key", "shape"), [("mask", (2, 1, 4, 4)), ("bbox_xyxy", (2, 5, 4))])
def test_targets_on_another_device_are_refused(key, shape):
    with pytest.raises(
        gpuaug.DeviceError, match=f"{key} must be on cpu, where the images are, got meta. Move it to that device."
    ):
        gpuaug.fuse(K.RandomInvert())(torch.zeros(2, 3, 4, 4), torch.zeros(shape, device="meta"), data_keys=["input", key])
