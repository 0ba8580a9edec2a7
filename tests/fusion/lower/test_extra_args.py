"""The setting ``extra_args`` of Kornia's containers: results are Kornia's, or the setting is refused."""

import itertools

import kornia.augmentation as K
import pytest
import torch
from kornia.constants import DataKey, Resample
from torch import nn
from torchvision.transforms import v2

import gpuaug

MODULES = {
    "rotation": lambda: K.RandomRotation(30.0, p=1.0),
    "affine": lambda: K.RandomAffine(30.0, p=1.0, align_corners=True),
    "bicubic": lambda: K.RandomAffine(30.0, resample="bicubic", p=1.0),
    "elastic": lambda: K.RandomElasticTransform((5, 5), (2.0, 2.0), (4.0, 4.0), p=1.0),
    "resized crop": lambda: K.RandomResizedCrop((8, 9)),
    "resampled crop": lambda: K.RandomResizedCrop((8, 9), cropping_mode="resample", align_corners=False),
    "invert": lambda: K.RandomInvert(p=1.0),
    "median": lambda: K.RandomMedianBlur((3, 3), p=1.0),
    "flip": lambda: K.RandomHorizontalFlip(p=1.0),
}
SETTINGS = {
    "none": None,
    "nearest": {DataKey.INPUT: {"resample": "nearest"}},
    "corners": {DataKey.IMAGE: {"align_corners": False}},
    "largest value": {DataKey.INPUT: {"max_val": torch.tensor(0.5)}},
    "same largest value": {DataKey.INPUT: {"max_val": torch.tensor(1.0)}},
    "kernel": {DataKey.INPUT: {"kernel_size": (5, 5)}},
    "nearest masks": {DataKey.MASK: {"resample": Resample.NEAREST}},
    "bilinear masks": {DataKey.MASK: {"resample": "bilinear"}},
    "masks' corners": {DataKey.MASK: {"resample": "nearest", "align_corners": True}},
    "masks without resample": {DataKey.MASK: {"align_corners": None}},
}
HOLDERS = {
    "container": lambda container: (container, container, lambda params: params),
    "torch's": lambda container: (nn.Sequential(container), container, lambda params: params[0]),
    "list": lambda container: ([container], container, lambda params: params[0]),
    "inner": lambda container: (outer := K.AugmentationSequential(container, data_keys=["input", "mask"]), outer, lambda x: x),
    "compose": lambda container: (v2.Compose([container]), container, lambda params: params[0]),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.filterwarnings("ignore")
def test_images_and_masks_are_kornias_or_the_setting_is_refused(settings, holder):
    images = torch.rand(2, 3, 12, 14)
    masks = torch.randint(0, 50, (2, 1, 12, 14)).float()
    refused = 0
    for (name, module), with_masks in itertools.product(MODULES.items(), (False, True)):
        container = K.AugmentationSequential(module(), data_keys=["input", "mask"], extra_args=SETTINGS[settings])
        pipeline, reference, params_of = HOLDERS[holder](container)
        keys = ["input", "mask"][: 1 + with_masks]
        inputs = (images, masks)[: 1 + with_masks]
        try:
            augment = gpuaug.fuse(pipeline)
            draws = augment.draw(images.shape, seed=0, dtype=images.dtype)
            got = augment(*inputs, draws=draws, data_keys=keys)
        except gpuaug.ArgumentError as error:
            if "extra_args" not in str(error):
                raise
            refused += 1
            continue
        expected = reference(*inputs, params=params_of(draws.as_kornia()), data_keys=keys)
        for result, other in zip(got, expected, strict=True) if with_masks else [(got, expected)]:
            torch.testing.assert_close(result, other, atol=1e-4, rtol=0, msg=f"{name}, {with_masks}")
    if settings == "same largest value" and holder != "inner":
        assert refused == 1, (
            "extra_args without masks removes Kornia's default for masks, and so changes masks of the elastic transform"
        )
    elif settings in ("none", "nearest masks") or holder == "inner":
        assert refused == 0, "this changes no result"
    else:
        assert 0 < refused < 2 * len(MODULES)


def test_a_module_of_the_user_applies_the_settings_of_its_container():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            settings = {DataKey.INPUT: {"max_val": torch.tensor(0.5)}}
            self.container = K.AugmentationSequential(K.RandomInvert(p=1.0), extra_args=settings)

        def forward(self, images):
            return self.container(images)

    images = torch.rand(2, 3, 4, 4)
    with pytest.warns(gpuaug.GpuAugWarning):
        augment = gpuaug.fuse(Own())
    torch.testing.assert_close(augment(images), 0.5 - images)
