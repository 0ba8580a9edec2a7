"""Settings with a value per channel: one value, or as many as images have channels, or an error of gpuaug's."""

import kornia.augmentation as K
import pytest
import torch
from support.comparison.values import assert_values
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

import gpuaug

BILINEAR = InterpolationMode.BILINEAR
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)

SETTINGS = {
    "fill of Pad_0": lambda values: [v2.Pad(2, fill=values)],
    "fill of RandomCrop_0": lambda values: [v2.RandomCrop(8, padding=3, fill=values)],
    "fill of RandomCrop_1": lambda values: [v2.RandomHorizontalFlip(), v2.RandomCrop(20, pad_if_needed=True, fill=values)],
    "fill of RandomZoomOut_0": lambda values: [v2.RandomZoomOut(values), v2.CenterCrop(8)],
    "fill of RandomAffine_0": lambda values: [v2.RandomAffine(20, fill=values)],
    "fill of RandomRotation_0": lambda values: [v2.RandomRotation(20, BILINEAR, fill=values)],
    "fill of RandomRotation_1": lambda values: [v2.Resize(9), v2.RandomRotation((20, 20), expand=True, fill=values)],
    "fill of RandomPerspective_0": lambda values: [v2.RandomPerspective(fill=values)],
    "fill of Pad_1": lambda values: [v2.RandomInvert(), v2.Pad(2, fill={tv_tensors.Image: values, "others": 0})],
    "fill of RandAugment_0": lambda values: [v2.RandAugment(fill=values), TO_FLOAT],
    "fill of TrivialAugmentWide_0": lambda values: [v2.TrivialAugmentWide(fill=values), TO_FLOAT],
    "fill of AutoAugment_0": lambda values: [v2.AutoAugment(fill=values), TO_FLOAT],
    "fill of AugMix_0": lambda values: [v2.AugMix(fill=values), TO_FLOAT],
    "value of RandomErasing_0": lambda values: [v2.RandomErasing(0.0, value=values)],
    "fill of RandomCrop_2": lambda values: [K.RandomInvert(), K.RandomInvert(), K.RandomCrop((8, 8), padding=3, fill=values)],
    "fill of RandomCrop_3": lambda values: [
        *[K.RandomInvert()] * 3,
        K.RandomCrop((8, 8), padding=3, fill=torch.tensor(values)),
    ],
    "pad_value of PadTo_0": lambda values: [K.PadTo((20, 20), pad_value=values)],
    "mean of Normalize_0": lambda values: [K.Normalize(torch.tensor(values), torch.tensor(0.5))],
    "std of Normalize_0": lambda values: [K.Normalize(torch.tensor(0.5), torch.tensor(values) + 0.5)],
    "mean of Denormalize_0": lambda values: [K.Denormalize(torch.tensor(values), torch.tensor(0.5))],
    "mean of Normalize_1": lambda values: [v2.RandomInvert(), v2.Normalize(list(values), [0.5])],
    "std of Normalize_1": lambda values: [v2.RandomInvert(), v2.Normalize([0.5], [value + 0.5 for value in values])],
    "rgb_weights of RandomGrayscale_0": lambda values: [K.RandomGrayscale(rgb_weights=torch.tensor(values), p=1.0)],
}
BROADCAST = ("mean of Normalize_1", "std of Normalize_1")
"""With torchvision, a grey image then has as many channels as there are values."""


@pytest.mark.filterwarnings("ignore::gpuaug.GpuAugWarning")
@pytest.mark.every(2)
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_as_many_values_as_channels_or_one_or_an_error(name, channels):
    if "Aug" in name and channels == 4:
        pytest.skip("torchvision's policies take no such images")
    images = torch.rand(2, channels, 16, 16)
    images = (images * 255).byte() if "Aug" in name else images  # else torchvision runs it
    for count in range(6):
        modules = SETTINGS[name](tuple(0.1 * value for value in range(1, count + 1)))
        if count in (1, channels):
            if "Aug" not in name and ("rgb_weights" not in name or count == channels):
                assert gpuaug.fuse(modules)(images).shape[1] == channels
        else:
            if name in BROADCAST and channels == 1:
                continue
            text = (
                f"{name} must have one value, or one per channel of the images, got {count} for {channels} channels. Pass one"
            )
            with pytest.raises(gpuaug.ArgumentError, match=text):
                gpuaug.fuse(modules)(images)
            with pytest.raises(gpuaug.ArgumentError, match=text):
                gpuaug.fuse(modules).draw(images.shape)


def test_constants_of_tensors_are_compared_by_value():
    one, other = torch.tensor([0.25, 0.5, 0.75]), torch.tensor([0.25, 0.5, 1.0])
    images = torch.rand(2, 3, 8, 8)
    for fills, launches in (((one, one.clone()), 1), ((one, other), 2)):
        modules = [K.RandomCrop((8, 8), padding=3, fill=fill) for fill in fills]
        pipeline = K.AugmentationSequential(*modules)
        augment = gpuaug.fuse(pipeline)
        draws = augment.draw(images.shape, seed=0)
        assert augment.explain(images.shape).launches == launches
        assert_values(augment(images, draws=draws), pipeline(images, params=draws.as_kornia()))


def parameter(*values):
    return torch.nn.Parameter(torch.tensor(values))


WITH_GRADIENTS = {
    "Normalize": lambda: K.Normalize(parameter(0.1, 0.2, 0.3), parameter(0.1, 0.2, 0.3)),
    "Normalize, one value": lambda: K.Normalize(parameter(0.1), parameter(0.2)),
    "Denormalize": lambda: K.Denormalize(parameter(0.1, 0.2, 0.3), parameter(0.1, 0.2, 0.3)),
    "RandomGrayscale": lambda: K.RandomGrayscale(rgb_weights=parameter(0.1, 0.2, 0.7), p=1.0),
    "RandomInvert": lambda: K.RandomInvert(max_val=parameter(0.9)[0], p=1.0),
    "RandomAffine": lambda: K.RandomAffine(10.0, padding_mode="fill", fill_value=parameter(0.1, 0.2, 0.3), p=1.0),
    "RandomAffine's ranges": lambda: K.RandomAffine(parameter(-9.0, 9.0), parameter(0.1, 0.2), parameter(0.9, 1.1), p=1.0),
    "RandomRotation": lambda: K.RandomRotation(parameter(-10.0, 10.0), p=1.0),
    "RandomPerspective": lambda: K.RandomPerspective(parameter(0.5)[0], p=1.0),
    "RandomResizedCrop": lambda: K.RandomResizedCrop((8, 8), scale=parameter(0.1, 0.9), ratio=parameter(0.5, 2.0)),
    "RandomErasing": lambda: K.RandomErasing(parameter(0.1, 0.3), parameter(0.5, 2.0), p=1.0),
    "ColorJitter": lambda: K.ColorJitter(parameter(0.5, 1.5), parameter(0.5, 1.5), parameter(0.5, 1.5), p=1.0),
    "RandomContrast": lambda: K.RandomContrast(parameter(0.5, 1.5), p=1.0),
    "RandomPosterize": lambda: K.RandomPosterize(parameter(1.0, 5.0), p=1.0),
    "RandomSolarize": lambda: K.RandomSolarize(parameter(0.1, 0.9), parameter(-0.1, 0.1), p=1.0),
    "RandomGaussianBlur": lambda: K.RandomGaussianBlur((3, 3), parameter(0.5, 1.5), p=1.0),
    "RandomSharpness": lambda: K.RandomSharpness(parameter(0.5, 1.5), p=1.0),
    "RandomClahe": lambda: K.RandomClahe(parameter(1.0, 4.0), (2, 2), p=1.0),
    "RandomMixUpV2": lambda: K.RandomMixUpV2(parameter(0.1, 0.9), p=1.0),
    "RandomCutMixV2": lambda: K.RandomCutMixV2(beta=parameter(2.0), cut_size=parameter(0.1, 0.9), p=1.0),
    "random_apply of mixes": lambda: K.AugmentationSequential(
        K.RandomMixUpV2(p=1.0), K.RandomCutMixV2(p=1.0), random_apply=1, random_apply_weights=parameter(0.3, 0.7)
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_settings_that_require_gradients_equal_kornia(name):
    module, images = WITH_GRADIENTS[name](), torch.rand(4, 3, 24, 28)
    assert any(value.requires_grad for value in _tensors(vars(module))), "no setting requires gradients"
    augment = gpuaug.fuse(module)
    draws = augment.draw(images.shape, seed=1, dtype=images.dtype)
    got = augment(images, draws=draws)
    assert not got.requires_grad
    expected = module(images, params=draws.as_kornia())
    torch.testing.assert_close(got, expected.detach(), atol=1e-4, rtol=1e-4)


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from _tensors(vars(value))
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


TORCHVISION_WITH_GRADIENTS = {
    "Normalize": lambda: v2.Normalize(parameter(0.1, 0.2, 0.3), parameter(0.1, 0.2, 0.3)),
    "RandomSolarize": lambda: v2.RandomSolarize(parameter(0.4)[0], 1.0),
    "Pad": lambda: v2.Pad(1, fill=list(parameter(0.1, 0.2, 0.3))),
}


@pytest.mark.parametrize("name", TORCHVISION_WITH_GRADIENTS)
@pytest.mark.filterwarnings("ignore")
def test_settings_that_require_gradients_equal_torchvision(name):
    transform, images = TORCHVISION_WITH_GRADIENTS[name](), torch.rand(4, 3, 24, 28)
    torch.testing.assert_close(gpuaug.fuse(transform)(images), transform(images).detach())
