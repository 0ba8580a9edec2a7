"""The setting ``extra_args`` of Kornia's containers: Kornia runs a container that has any."""

import kornia.augmentation as K
import pytest
import torch
from kornia.constants import DataKey
from torch import nn
from torchvision.transforms import v2

import gpuaug


class Own(K.AugmentationSequential):
    """Overrides nothing."""


SETTINGS = {
    "images": {DataKey.INPUT: {"max_val": torch.tensor(0.5)}},
    "images, corners": {DataKey.IMAGE: {"align_corners": False}},
    "masks": {DataKey.MASK: {"resample": "bilinear"}},
}
HOLDERS = {
    "container": lambda container: (container, lambda params: params),
    "torch's": lambda container: (nn.Sequential(container), lambda params: params[0]),
    "list": lambda container: ([container], lambda params: params[0]),
    "compose": lambda container: (v2.Compose([container]), lambda params: params[0]),
    "subclass": lambda container: (
        type("Own", (K.AugmentationSequential,), {})(*container, **container.settings),
        lambda params: params,
    ),
}


def container(settings):
    made = K.AugmentationSequential(
        K.RandomAffine(30.0, align_corners=True, p=1.0), K.RandomInvert(p=1.0), data_keys=["input", "mask"], extra_args=settings
    )
    made.settings = {"data_keys": ["input", "mask"], "extra_args": settings}
    return made


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_container_with_extra_args_is_run_by_kornia(settings, holder):
    images, masks = torch.rand(2, 3, 12, 14), torch.randint(0, 50, (2, 1, 12, 14)).float()
    reference = container(SETTINGS[settings])
    pipeline, params_of = HOLDERS[holder](reference)
    with pytest.warns(gpuaug.GpuAugWarning, match="is not fused, .* extra_args"):
        augment = gpuaug.fuse(pipeline)
    keys = ["input", "mask"]
    draws = augment.draw(images.shape, seed=0, dtype=images.dtype)
    got = augment(images, masks, draws=draws, data_keys=keys)
    expected = reference(images, masks, params=params_of(draws.as_kornia()), data_keys=keys)
    for result, other in zip(got, expected, strict=True):
        torch.testing.assert_close(result, other, atol=1e-6, rtol=0)


def test_an_inner_container_is_fused_because_kornia_ignores_its_extra_args():
    outer = K.AugmentationSequential(container(SETTINGS["images"]), K.RandomHorizontalFlip(p=1.0))
    assert "left to" not in repr(gpuaug.fuse(outer))


def test_torchvisions_transforms_in_a_container_with_extra_args_are_refused():
    with pytest.raises(gpuaug.ArgumentTypeError, match="must hold Kornia's modules"):
        gpuaug.fuse(K.AugmentationSequential(v2.RandomInvert(), extra_args=SETTINGS["images"]))
