"""Images of uint16 and int16: their values are shares of the largest of their type, as ``v2.ToDtype(scale=True)`` has them."""

import kornia.augmentation as K
import pytest
import torch
from support.comparison.replay import assert_replays as assert_replays_kornia
from support.comparison.replay import photographs
from support.comparison.torchvision_replay import assert_replays, scaled
from support.comparison.values import assert_values
from torchvision.transforms import InterpolationMode, v2

import gpuaug
from gpuaug.fusion.lower.torchvision import LOWERED
from gpuaug.fusion.ops.geometry import GatherOp
from gpuaug.fusion.pixels import LARGEST
from gpuaug.fusion.policies.torchvision import TorchvisionPolicy

TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
TYPES = [torch.uint16, torch.int16]
of_both_types = pytest.mark.parametrize("dtype", TYPES, ids=str)


def images_with_ends(dtype, channels=3):
    """Images that hold all parts of the range of a type, its least and its largest value too."""
    limits = torch.iinfo(dtype)
    made = photographs(2, channels, dtype=torch.float32) * (limits.max - limits.min) + limits.min
    made[0, 0, 0, :2] = torch.tensor([limits.min, limits.max])
    return made.round().to(dtype)


def inside(dtype):
    """Images that keep away from the ends of the range, by which torchvision wraps some values around."""
    return (images_with_ends(dtype).to(torch.int32) // 2 + (16384 if dtype == torch.uint16 else 0)).to(dtype)


MOVED = {
    "flips": lambda: [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()],
    "crop, padded": lambda: [v2.RandomCrop(28, padding=4, fill=3000)],
    "crop, reflected": lambda: [v2.RandomCrop((30, 44), padding=5, padding_mode="reflect")],
    "pad, fills": lambda: [v2.Pad(2, fill=(1, 200, 30000))],
    "middle": lambda: [v2.CenterCrop((20, 31)), v2.RandomErasing(1.0, value=1234)],
    "zoomed out": lambda: [v2.RandomZoomOut(99), v2.CenterCrop((30, 33))],
    "nearest": lambda: [v2.RandomResizedCrop((16, 20), interpolation=InterpolationMode.NEAREST_EXACT)],
    "permuted": lambda: [v2.RandomChannelPermutation()],
}
"""Pipelines that move whole values."""


@of_both_types
@pytest.mark.parametrize("name", MOVED)
def test_values_that_are_moved_are_torchvisions_bit_for_bit(name, dtype):
    for memory_format in (torch.contiguous_format, torch.channels_last):
        got = assert_replays(MOVED[name](), images_with_ends(dtype), memory_format=memory_format)
    assert got.dtype == dtype
    # torchvision multiplies by the inverse of the largest value, and rounds twice.
    assert_replays([*MOVED[name](), TO_FLOAT], images_with_ends(dtype), atol=1.2e-7)


COMPUTED = {
    "resized crop": lambda: v2.RandomResizedCrop((16, 20)),
    "resized crop, cubic": lambda: v2.RandomResizedCrop((16, 20), interpolation=InterpolationMode.BICUBIC),
    "resize": lambda: v2.Resize(20, antialias=False),
    "drawn size": lambda: v2.Compose([v2.RandomResize(20, 61), v2.RandomCrop(40, pad_if_needed=True)]),
    "rotation": lambda: v2.RandomRotation(40, InterpolationMode.BILINEAR, fill=500),
    "affine": lambda: v2.RandomAffine(30, (0.2, 0.1), interpolation=InterpolationMode.BILINEAR),
    "perspective": lambda: v2.RandomPerspective(0.5, 1.0),
    "blur": lambda: v2.GaussianBlur((5, 9), (0.1, 2.0)),
    "grey": lambda: v2.RandomGrayscale(0.5),
    "autocontrast": lambda: v2.RandomAutocontrast(1.0),
    "jitter": lambda: v2.ColorJitter(0.3, 0.3, 0.3, 0.05),
    "photometric": lambda: v2.RandomPhotometricDistort((0.8, 1.2), (0.8, 1.2), (0.8, 1.2)),
    "sharpness": lambda: v2.RandomAdjustSharpness(1.5, p=1.0),
    "invert": lambda: v2.RandomInvert(0.5),
}
NOT_OF_INT16 = ("jitter", "photometric", "sharpness", "invert")
"""Transforms that torchvision computes differently for values below 0."""


@of_both_types
@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.every(3)
def test_values_that_are_computed_are_torchvisions_within_its_rounding(name, dtype):
    """torchvision rounds after each function, and cuts values of uint16 off."""
    for tail in ([], [TO_FLOAT]):
        pipeline = v2.Compose([v2.RandomHorizontalFlip(), COMPUTED[name](), *tail])
        if dtype == torch.int16 and name in NOT_OF_INT16:
            with pytest.warns(gpuaug.GpuAugWarning, match=r"differently for torch\.int16"):
                gpuaug.fuse(pipeline)(inside(dtype))
            continue
        most = 6 if name in ("jitter", "photometric") else 2
        # A hue at the border of two sixths may fall on either side of it.
        share = 1e-3 if most == 6 else 0
        assert_replays(pipeline, inside(dtype), atol=most / (LARGEST[dtype] if tail else 1), share=share)


def test_cubic_swings_of_uint16_are_clamped():
    """torchvision wraps them around: black next to white becomes white."""
    images = (photographs(4) > 127).to(torch.int32).mul(65535).to(torch.uint16)
    resize = v2.Resize(28, InterpolationMode.BICUBIC)
    got, swings = gpuaug.fuse([resize, TO_FLOAT])(images), resize(scaled(images))
    assert swings.min() < -0.05
    torch.testing.assert_close(got, swings.clamp(0, 1), atol=5e-5, rtol=0)
    whole = gpuaug.fuse(resize)(images).float() / 65535
    torch.testing.assert_close(whole, swings.clamp(0, 1), atol=6e-5, rtol=0)


def test_saturated_white_stays_white():
    """torchvision's hue makes 65536 of it, which is 0."""
    white = torch.full((2, 3, 8, 8), 65535, dtype=torch.int32).to(torch.uint16)
    assert (gpuaug.fuse(v2.ColorJitter(hue=0.3))(white).int() == 65535).all()


def test_every_op_is_compared_or_left():
    made = [make() for make in (*MOVED.values(), *COMPUTED.values())]
    compared = {type(each) for one in made for each in (one if isinstance(one, list) else [one])}
    for transform, op in LOWERED.items():
        if not (issubclass(op, GatherOp | TorchvisionPolicy) or set(op.unfused_dtypes) >= set(TYPES)):
            assert transform in compared | {v2.Normalize, v2.Grayscale, v2.JPEG, v2.LinearTransformation, v2.ElasticTransform}


LEFT = {
    "posterize": lambda: v2.RandomPosterize(4, p=1.0),
    "equalize": lambda: v2.RandomEqualize(1.0),
    "a function": lambda: v2.Lambda(lambda image: image),
    "symmetric": lambda: v2.Pad(3, padding_mode="symmetric"),
}


@pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")
@of_both_types
@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_torchvision_is_given_the_type_and_returns_it(name, dtype):
    images, transform = images_with_ends(dtype), LEFT[name]()
    augment = gpuaug.fuse(transform)
    assert_values(augment(images), torch.stack([transform(image) for image in images]))
    assert [line.package for line in augment.explain().lines] == ["torchvision"]


@pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")
@of_both_types
@pytest.mark.parametrize("policy", [v2.RandAugment, v2.AutoAugment, v2.TrivialAugmentWide, v2.AugMix])
def test_policies_are_left_to_torchvision(policy, dtype):
    augment = gpuaug.fuse(policy())
    assert "differently" in augment.explain((2, 3, 32, 48), dtype=dtype).lines[0].reason


@pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")
@of_both_types
def test_conversion_to_bytes_is_torchvisions(dtype):
    images, convert = images_with_ends(dtype), v2.ToDtype(torch.uint8, scale=True)
    expected = torch.stack([convert(image) for image in images])
    assert_values(gpuaug.fuse([v2.RandomHorizontalFlip(0.0), convert])(images), expected)
    back = gpuaug.fuse([v2.RandomHorizontalFlip(0.0), convert, TO_FLOAT])(images)
    assert_values(back, expected / 255, atol=1.2e-7)


KORNIA = {
    "flips": lambda: [K.RandomHorizontalFlip(), K.RandomErasing(value=0.5)],
    "resized crop": lambda: [K.RandomResizedCrop((16, 20)), K.RandomRotation(30.0)],
    "colour": lambda: [K.ColorJitter(0.4, 0.4, 0.4, 0.1), K.RandomGaussianBlur((3, 3), (0.1, 2.0))],
    "levels": lambda: [K.RandomEqualize(p=0.5), K.RandomPosterize(p=0.5), K.RandomClahe(p=0.5)],
    "normalised": lambda: [K.RandomVerticalFlip(), K.Normalize(torch.tensor([0.4]), torch.tensor([0.3]))],
}


@of_both_types
@pytest.mark.parametrize("name", KORNIA)
def test_kornia_is_given_shares_of_the_largest_value(name, dtype):
    pipeline = K.AugmentationSequential(*KORNIA[name]())
    got = assert_replays_kornia(pipeline, images_with_ends(dtype), atol=1e-4, share=2e-3)
    assert got.dtype == torch.float32


@of_both_types
@pytest.mark.parametrize("channels", [1, 4, 6, 13])
def test_bands_have_means_of_their_own(channels, dtype):
    images = images_with_ends(dtype, channels)
    mean, std = torch.linspace(0.1, 0.9, channels).tolist(), torch.linspace(0.2, 0.4, channels).tolist()
    pipeline = [v2.RandomResizedCrop((20, 24)), v2.RandomHorizontalFlip(), TO_FLOAT, v2.Normalize(mean, std)]
    assert_replays(pipeline, images, atol=2 / LARGEST[dtype] / 0.2)
    wrong = gpuaug.fuse([TO_FLOAT, v2.Normalize([*mean, 0.5, 0.5], [*std, 0.5, 0.5])])
    if channels > 1:
        with pytest.raises(gpuaug.ArgumentError, match=f"got {channels + 2} for {channels} channels"):
            wrong(images)


@of_both_types
def test_means_of_whole_numbers_are_refused(dtype):
    images, mean, std = images_with_ends(dtype), 1300.0, 900.0
    with pytest.raises(gpuaug.ArgumentError, match=f"Divide both by {LARGEST[dtype]}"):
        gpuaug.fuse(K.Normalize(mean, std))(images)
    with pytest.raises(gpuaug.ArgumentError, match=f"by {LARGEST[dtype]} for {str(dtype)[6:]}"):
        gpuaug.fuse([TO_FLOAT, v2.Normalize([mean], [std])])
    got = gpuaug.fuse([TO_FLOAT, v2.Normalize([mean / LARGEST[dtype]], [std / LARGEST[dtype]])])(images)
    assert_values(got, (images.float() - mean) / std, atol=1e-4)


@of_both_types
def test_what_torchvision_refuses_is_refused(dtype):
    for transform in (v2.Normalize([0.5], [0.5]), v2.MixUp(num_classes=3)):
        with pytest.raises(gpuaug.ArgumentTypeError, match=f"must be floating for .*, got {dtype}"):
            gpuaug.fuse(transform)(images_with_ends(dtype), torch.arange(2), data_keys=["input", "class"])
    limits = torch.iinfo(dtype)
    for fill in (limits.max + 1, limits.min - 1):
        with pytest.raises(gpuaug.ArgumentError, match=rf"must be in \[{limits.min}, {limits.max}\] for {str(dtype)[6:]}"):
            gpuaug.fuse(v2.RandomRotation(30, fill=fill))(images_with_ends(dtype))
    gpuaug.fuse(v2.RandomRotation(30, fill=limits.min))(images_with_ends(dtype))


@of_both_types
def test_cut_mix_copies_whole_values(dtype):
    images = images_with_ends(dtype)
    augment = gpuaug.fuse(v2.CutMix(num_classes=4))
    mixed, _ = augment(images, torch.arange(2), data_keys=["input", "class"])
    assert mixed.dtype == dtype
    kept = (mixed.int() == images.int()) | (mixed.int() == images.roll(1, 0).int())
    assert kept.all()
