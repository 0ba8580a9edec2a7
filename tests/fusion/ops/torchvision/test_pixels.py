"""Every transform of torchvision's that is lowered, against its own function with the same draws."""

import pytest
import torch
from support.batches.ragged import images_of, pack
from support.comparison.replay import photographs
from support.comparison.torchvision_replay import BYTES_OFF, assert_replays, both, replayed, scaled
from support.comparison.values import assert_values
from torchvision.transforms import InterpolationMode, v2

import gpuaug
from gpuaug.fusion.lower.torchvision import LOWERED
from gpuaug.fusion.policies.torchvision import TorchvisionPolicy

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
BILINEAR = InterpolationMode.BILINEAR

EXACT = {
    "flip": lambda: v2.RandomHorizontalFlip(),
    "flip, vertical": lambda: v2.RandomVerticalFlip(0.3),
    "centre crop": lambda: v2.CenterCrop((20, 31)),
    "centre crop, half to even": lambda: v2.CenterCrop((17, 45)),
    "centre crop, padded": lambda: v2.CenterCrop((35, 61)),
    "centre crop, padded across": lambda: v2.CenterCrop((20, 55)),
    "rgb": lambda: v2.RGB(),
    "pad": lambda: v2.Pad((3, 1), fill=0.25),
    "pad, each side": lambda: v2.Pad([1, 2, 3, 4], fill=(0.5, 0.25, 1.0)),
    "pad, edge": lambda: v2.Pad(5, padding_mode="edge"),
    "pad, reflect": lambda: v2.Pad((4, 3, 2, 1), padding_mode="reflect"),
    "crop": lambda: v2.RandomCrop((20, 30)),
    "crop, padded": lambda: v2.RandomCrop(28, padding=4, fill=0.5),
    "crop, padded apart": lambda: v2.RandomCrop((30, 44), padding=[1, 2, 3, 4], padding_mode="reflect"),
    "crop, padded if needed": lambda: v2.RandomCrop((40, 50), padding=2, pad_if_needed=True, fill=[0.1, 0.2, 0.3]),
    "crop, padded if needed, edge": lambda: v2.RandomCrop((40, 20), pad_if_needed=True, padding_mode="edge"),
    "resize to its size": lambda: v2.Resize((32, 48)),
    "invert": lambda: v2.RandomInvert(),
    "solarize": lambda: v2.RandomSolarize(0.4),
    "permute": lambda: v2.RandomChannelPermutation(),
    "erasing": lambda: v2.RandomErasing(0.7, value=0.5),
    "erasing, nearly all": lambda: v2.RandomErasing(1.0, scale=(0.9, 1.0), ratio=(0.5, 2.0)),
    "erasing, one pixel": lambda: v2.RandomErasing(1.0, scale=(0.0, 0.0005)),
    "erasing, values": lambda: v2.RandomErasing(0.7, value=(0.1, -0.5, 2.0)),
    "erasing, noise": lambda: v2.RandomErasing(0.7, value="random"),
    "elastic": lambda: v2.ElasticTransform(60.0, (1.8, 1.2), fill=None),
    "elastic, filled": lambda: v2.ElasticTransform((90.0, 30.0), 1.8, fill=(0.5, 0.25, 1.0)),
    "elastic, nearest, not smooth": lambda: v2.ElasticTransform(40.0, 0.0, InterpolationMode.NEAREST, fill=0.5),
    "noise": lambda: v2.GaussianNoise(0.1, 0.3),
    "noise, unclipped": lambda: v2.GaussianNoise(-0.2, 0.5, clip=False),
    "resized crop, nearest": lambda: v2.RandomResizedCrop((16, 20), interpolation=InterpolationMode.NEAREST_EXACT),
    "autocontrast": lambda: v2.RandomAutocontrast(0.7),
}
"""Permutations, apply masks and thresholds: the same bits."""

CLOSE = {
    "resized crop": lambda: v2.RandomResizedCrop((16, 20)),
    "resized crop, larger": lambda: v2.RandomResizedCrop((61, 64), scale=(0.2, 0.5)),
    "resized crop, four taps": lambda: v2.RandomResizedCrop((16, 20), antialias=False),
    "resized crop, cubic": lambda: v2.RandomResizedCrop((16, 20), interpolation=InterpolationMode.BICUBIC),
    "resized crop, by number": lambda: v2.RandomResizedCrop((16, 20), interpolation=3, antialias=True),
    "resized crop, no window fits": lambda: v2.RandomResizedCrop((16, 20), scale=(0.99, 1.0), ratio=(4.0, 5.0)),
    "resized crop, upright": lambda: v2.RandomResizedCrop((16, 20), scale=(0.99, 1.0), ratio=(0.1, 0.2)),
    "resize": lambda: v2.Resize((15, 64)),
    "resize, shorter side": lambda: v2.Resize(20),
    "resize, four taps": lambda: v2.Resize(20, antialias=None),
    "resize, bounded": lambda: v2.Resize([30], max_size=36),
    "resize, longer side": lambda: v2.Resize(None, max_size=40),
    "rotation": lambda: v2.RandomRotation(45, interpolation=BILINEAR, fill=None),
    "rotation, about a point": lambda: v2.RandomRotation((10, 80), BILINEAR, center=(3, 20), fill=None),
    "rotation, expanded": lambda: v2.RandomRotation((33, 33), BILINEAR, expand=True, fill=0.25),
    "rotation, quarters": lambda: v2.RandomRotation((90, 90), BILINEAR, fill=None),
    "affine": lambda: v2.RandomAffine(30, (0.2, 0.1), (0.7, 1.3), (5, 20, -8, 3), BILINEAR, fill=None),
    "affine, sheared across": lambda: v2.RandomAffine(0, shear=25, interpolation=BILINEAR, fill=None),
    "affine, about a point": lambda: v2.RandomAffine(30, (0.2, 0.1), center=(40, 5), interpolation=BILINEAR, fill=None),
    "rotation, filled": lambda: v2.RandomRotation(45, BILINEAR),
    "affine, filled": lambda: v2.RandomAffine(30, (0.2, 0.1), interpolation=BILINEAR, fill=(0.25, 0.5, 1.0)),
    "perspective, filled": lambda: v2.RandomPerspective(fill=0.75),
    "perspective": lambda: v2.RandomPerspective(0.5, fill=None),
    "perspective, far": lambda: v2.RandomPerspective(0.9, p=1.0, fill=None),
    "jitter": lambda: v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
    "jitter, strong": lambda: v2.ColorJitter((0.2, 2.0), (0.1, 3.0), (0.0, 3.0), 0.5),
    "jitter, contrast": lambda: v2.ColorJitter(contrast=(0.2, 3.0)),
    "jitter, saturation": lambda: v2.ColorJitter(saturation=(0.0, 3.0)),
    "jitter, nothing": lambda: v2.ColorJitter(),
    "jitter, photometric": lambda: v2.RandomPhotometricDistort(),
    "jitter, photometric, strong": lambda: v2.RandomPhotometricDistort((0, 2), (0, 2), (0, 2), (-0.5, 0.5), p=0.8),
    "grey": lambda: v2.RandomGrayscale(0.5),
    "grey, always": lambda: v2.Grayscale(3),
    "grey, one channel": lambda: v2.Grayscale(),
    "blur": lambda: v2.GaussianBlur((5, 9), (0.1, 2.0)),
    "blur, large": lambda: v2.GaussianBlur(23, (0.5, 4.0)),
    "sharpness": lambda: v2.RandomAdjustSharpness(2.5),
    "sharpness, blurred": lambda: v2.RandomAdjustSharpness(0.0, p=1.0),
    "equalize": lambda: v2.RandomEqualize(0.7),
    "normalize": lambda: v2.Normalize(MEAN, STD),
    "normalize, one": lambda: v2.Normalize([0.5], [0.25]),
}
"""What interpolates or weighs: within 5e-5 at these sizes, where all ops on single pixels are within 5e-6."""

EXACT_SIZES = {
    "zoom out, middle": lambda: [v2.RandomZoomOut((0.5, 0.25, 1.0), (1.0, 2.5)), v2.CenterCrop((30, 33))],
    "zoom out, crop": lambda: [
        v2.RandomHorizontalFlip(),
        v2.RandomZoomOut(0.5, p=0.7),
        v2.RandomCrop((60, 50), pad_if_needed=True, fill=0.5),
    ],
    "nearest": lambda: [v2.RandomResize(20, 60, InterpolationMode.NEAREST_EXACT), v2.RandomCrop(20)],
    "zoom out, centre crop padded": lambda: [v2.RandomZoomOut((0.5, 0.25, 1.0), (1.0, 2.5)), v2.CenterCrop((80, 70))],
    "sizes by chance": lambda: [v2.RandomChoice([v2.RandomZoomOut(0.5), v2.Identity()]), v2.CenterCrop((30, 33))],
}
CLOSE_SIZES = {
    "segmentation": lambda: [
        v2.RandomResize(20, 61),
        v2.RandomHorizontalFlip(),
        v2.RandomCrop(40, pad_if_needed=True),
        v2.Normalize(MEAN, STD),
    ],
    "lsj": lambda: [
        v2.ScaleJitter((40, 64)),
        v2.RandomCrop((40, 64), pad_if_needed=True, fill=(0.5, 0.25, 1.0)),
        v2.RandomHorizontalFlip(),
    ],
    "shortest size": lambda: [v2.RandomShortestSize((40, 33, 56), max_size=70), v2.RandomCrop((24, 20), padding=3)],
    "four taps": lambda: [v2.RandomCrop(28), v2.RandomResize(14, 40, antialias=None), v2.CenterCrop(14)],
    "cubic": lambda: [v2.ScaleJitter((40, 40), (0.5, 2.0), InterpolationMode.BICUBIC), v2.RandomCrop(30, pad_if_needed=True)],
    "zoom out, resize": lambda: [v2.RandomZoomOut(0.25), v2.RandomVerticalFlip(), v2.Resize((30, 25))],
    "zoom out, crop and resize": lambda: [v2.RandomZoomOut(), v2.RandomResizedCrop((30, 25))],
    "zoom out, turn": lambda: [v2.RandomZoomOut(), v2.RandomRotation(30, BILINEAR, fill=None), v2.CenterCrop(30)],
    "expanded": lambda: [v2.RandomRotation(170, BILINEAR, expand=True, fill=0.5), v2.CenterCrop((40, 44))],
    "expanded, two passes": lambda: [v2.RandomRotation((-20, 70), BILINEAR, expand=True), v2.Resize((30, 25))],
    "letterbox": lambda: [
        v2.Resize(None, max_size=40),
        v2.RandomHorizontalFlip(),
        v2.CenterCrop(40),
        v2.RandomZoomOut(),
        v2.CenterCrop(30),
    ],
    "one of three": lambda: [
        v2.RandomChoice([v2.RandomResize(20, 40), v2.ScaleJitter((50, 50)), v2.RandomZoomOut()]),
        v2.RandomCrop(30, pad_if_needed=True),
    ],
    "two passes": lambda: [v2.Resize(20), v2.RandomZoomOut(), v2.RandomVerticalFlip(), v2.Resize((30, 25))],
    "behind another pass": lambda: [
        v2.RandomSolarize(0.4),
        v2.RandomZoomOut(0.25, (1.0, 1.5)),
        v2.RandomResize(30, 50),
        v2.CenterCrop(30),
        v2.RandomInvert(),
    ],
}
"""Pipelines that draw a size for each sample, and give all one behind it."""

NEAREST = {
    "rotation": lambda: v2.RandomRotation(45),
    "rotation, about a point": lambda: v2.RandomRotation(45, center=(3, 20), fill=None),
    "affine": lambda: v2.RandomAffine(30, (0.2, 0.1), (0.7, 1.3), (5, 20, -8, 3)),
    "affine, filled": lambda: v2.RandomAffine(30, (0.2, 0.1), fill=0.5),
    "perspective": lambda: v2.RandomPerspective(0.5, interpolation=InterpolationMode.NEAREST, fill=[0.25, 0.5, 1.0]),
}
"""The nearest pixel, where two may be as near."""

MOVED = ("affine", "blur", "perspective", "resize", "resized", "rotation")


def batches():
    yield photographs(7, dtype=torch.float32)
    yield photographs(2, height=37, width=33, dtype=torch.float32, seed=1)


@pytest.mark.parametrize("name", EXACT)
def test_what_moves_whole_pixels_equals_torchvision_bit_for_bit(name):
    for seed, images in enumerate([*batches(), photographs(1, dtype=torch.float32)]):
        if name.startswith(("centre", "crop", "pad", "resize to")) and images.shape[-1] != 48:
            continue
        expected, got = both(EXACT[name](), images, seed)
        assert_values(got, expected, about=name)


@pytest.mark.parametrize("name", CLOSE)
def test_what_computes_pixels_equals_torchvision(name):
    tolerance = 5e-5 if name.startswith(MOVED) else 5e-6
    for seed, images in enumerate(batches()):
        # A hue at the border of two sixths may fall on either side of it.
        assert_replays(CLOSE[name](), images, seed, atol=tolerance, share=1e-3 if "jitter" in name else 0)


CHANNELS = {
    "rgb of grey": lambda: [v2.RandomCrop(20, padding=3, fill=0.3), v2.RGB(), v2.Pad(3, fill=(0.1, 0.2, 0.3))],
    "rgb of grey, filled": lambda: [v2.RandomRotation(30, BILINEAR, fill=0.3), v2.RGB(), v2.Normalize(MEAN, STD)],
    "three of one": lambda: [v2.Grayscale(3), v2.ColorJitter(0.4, 0.4, 0.4, 0.1), v2.Normalize(MEAN, STD)],
    "three of one, and back": lambda: [v2.Grayscale(3), v2.RandomChannelPermutation(), v2.Grayscale(), v2.GaussianBlur(3)],
    "one of one": lambda: [v2.Grayscale(), v2.RandomSolarize(0.5), v2.RGB(), v2.RandomErasing(value=(0.1, 0.2, 0.3))],
}


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("name", CHANNELS)
def test_transforms_that_change_the_number_of_channels_equal_torchvision(name, views):
    images = photographs(5, 1, dtype=torch.float32)
    augment = gpuaug.fuse(CHANNELS[name](), views=views)
    assert not any(line.reason for line in augment.explain(images.shape).lines)
    draws = augment.draw(images.shape, seed=0, dtype=images.dtype)
    expected = torch.cat([replayed(view, images) for view in draws.views])
    assert_values(augment(images, draws=draws), expected, atol=5e-5)
    assert augment(images[:0]).shape == (0, *augment(images).shape[1:])


@pytest.mark.parametrize("channels", [1, 3])
def test_linear_transformations_equal_torchvision(channels):
    images = photographs(5, channels, 12, 9, dtype=torch.float32)
    count = images[0].numel()
    generator = torch.Generator().manual_seed(0)
    matrix, mean = torch.randn(count, count, generator=generator) / 9, torch.rand(count, generator=generator)
    whitening = v2.LinearTransformation(matrix, mean)
    expected = torch.stack([whitening(image) for image in images])
    augment = gpuaug.fuse([TO_FLOAT, whitening])
    assert not any(line.reason for line in augment.explain(images.shape).lines)
    assert_values(augment(images), expected, atol=1e-5)
    halves = gpuaug.fuse([TO_FLOAT, whitening, v2.Normalize([0.5], [2.0])], dtype=torch.float16)(images)
    assert_values(halves.float(), (expected - 0.5) / 2, atol=1e-2)
    bytes_ = photographs(5, channels, 12, 9)
    of_bytes = torch.stack([whitening(image.float()) for image in bytes_])
    assert_values(gpuaug.fuse([UNSCALED, whitening])(bytes_), of_bytes, atol=1e-3)
    some = gpuaug.fuse([TO_FLOAT, v2.RandomApply([whitening])])(images.repeat(8, 1, 1, 1))
    applied = torch.isclose(some, expected.repeat(8, 1, 1, 1), atol=1e-5).flatten(1).all(1)
    assert 8 < applied.sum() < 32
    assert_values(some[~applied], images.repeat(8, 1, 1, 1)[~applied])


@pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_linear_transformations_return_torchvisions_type(dtype):
    images = photographs(2, 3, 4, 4, dtype=torch.float32).to(dtype)
    large = v2.LinearTransformation(torch.eye(48) * 1e5, torch.zeros(48))  # the result is infinite in float16
    for transforms, other in (([large], large), ([large, v2.Normalize([0.5], [0.5])], v2.Normalize([0.5], [0.5]))):
        expected = large(images) if other is large else other(large(images))
        assert_values(gpuaug.fuse(transforms)(images), expected, atol=0.02)


@pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")
@pytest.mark.parametrize("channels", [-1, 0, 2, 4, None, "1", 1.0, 3.0, True])
def test_numbers_of_grey_channels_are_torchvisions(channels):
    images, grey = photographs(2), v2.Grayscale(channels)
    if channels not in (1, 3):
        with pytest.raises(ValueError, match="num_output_channels must be 1 or 3"):
            gpuaug.fuse(grey)(images)
        return
    assert gpuaug.fuse(grey)(images).shape == grey(images).shape


@pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")
def test_a_matrix_for_images_of_another_size_is_torchvisions_error():
    with pytest.raises(ValueError, match="incompatible shape"):
        gpuaug.fuse(v2.LinearTransformation(torch.eye(12), torch.zeros(12)))(torch.rand(2, 3, 4, 4))


@pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")
def test_modules_that_torchvision_runs_get_the_number_of_channels():
    images = photographs(4, dtype=torch.float32)
    grey = v2.functional.rgb_to_grayscale(images)
    for transforms, expected in (([v2.Grayscale()], grey), ([v2.Grayscale(), v2.RGB()], grey.expand_as(images))):
        augment = gpuaug.fuse([TO_FLOAT, *transforms, v2.Lambda(lambda image: image * 2), v2.Pad(1)])
        assert_values(augment(images)[..., 1:-1, 1:-1], expected * 2, atol=1e-6)


UNSCALED = v2.ToDtype(torch.float32)
UNIT_RANGE_ONLY = {
    *("ColorJitter", "RandomPhotometricDistort", "RandomInvert", "RandomSolarize", "RandomPosterize"),
    *("RandomAdjustSharpness", "RandomEqualize", "RandomAutocontrast"),
}


BYTE_CASES = [(table, name) for table in (EXACT, CLOSE, NEAREST) for name in table]  # CLOSE and NEAREST share names


@pytest.mark.parametrize(("table", "name"), BYTE_CASES, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.every(3)
def test_floats_of_bytes_equal_torchvision_or_are_refused(table, name):
    transform = table[name]()
    images = photographs(3)
    kind = type(transform).__name__
    if kind in UNIT_RANGE_ONLY or (kind == "GaussianNoise" and transform.clip):
        with pytest.raises(
            gpuaug.ArgumentError, match=rf"images must be in \[0, 1\] for {kind}_1, .* got floats in \[0, 255\]"
        ):
            gpuaug.fuse([UNSCALED, transform])(images)
        return
    tolerance = 255 * (5e-5 if name.startswith(MOVED) else 5e-6 if table is CLOSE else 1e-9)
    tolerance = 1e-3 if kind == "Normalize" else tolerance
    assert_replays([UNSCALED, transform], images, atol=tolerance, share=2e-3 if table is NEAREST else 0)
    behind = [v2.RandomHorizontalFlip(), UNSCALED, transform, *([] if kind == "Normalize" else [v2.Normalize([114.0], [57.0])])]
    assert_replays(
        behind,
        images,
        1,
        atol=tolerance if kind == "Normalize" else max(tolerance / 57, 1e-6),
        share=2e-3 if table is NEAREST else 0,
    )


LEVELS = {"equalize": lambda: v2.RandomEqualize(1.0), "autocontrast": lambda: v2.RandomAutocontrast(1.0)}


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("shape", [(4, 3, 32, 48), (4, 1, 15, 16)], ids=["enough pixels to spread", "few pixels"])
def test_channels_that_cannot_be_spread_equal_torchvision(name, shape):
    """The level of a float is torchvision's, which is not that of Kornia for one in four."""
    bytes_, floats = photographs(*shape), photographs(*shape, dtype=torch.float32) * 0.997 + 0.001
    for images, made in ((floats, LEVELS[name]()), (bytes_, [LEVELS[name](), TO_FLOAT])):
        images[0, 0] = images[0, 0, 0, 0]  # a channel of one level
        images[1] = images[1] > images[1].float().mean()  # two levels
        expected, got = both(made, images)
        # torchvision cuts bytes off behind autocontrast, where a rounding error of its division may decide on a byte.
        most = 1 / 255 if name == "autocontrast" and images is bytes_ else 0
        torch.testing.assert_close(got, expected, atol=most + 1.2e-7, rtol=0)


@pytest.mark.parametrize("name", [*EXACT_SIZES, *CLOSE_SIZES])
def test_drawn_sizes_equal_torchvision(name):
    make = {**EXACT_SIZES, **CLOSE_SIZES}[name]
    tolerance = 0 if name in EXACT_SIZES else 5e-5 / (min(STD) if name == "segmentation" else 1)
    for seed, images in enumerate(batches()):
        expected, got = both(make(), images, seed)
        assert got.shape == expected.shape
        assert_values(got, expected, atol=tolerance)
    if name != "behind another pass":  # Resize gives images of one size one
        ragged, sizes = gpuaug.fuse([TO_FLOAT, *make()], ragged=True), images_of([(37, 52), (64, 40), (48, 48), (90, 33)])
        batch = pack(sizes)
        draws = ragged.draw(batch, seed=6)
        expected = replayed(draws, [image.float() / 255 for image in sizes])
        assert_values(ragged(batch, draws=draws), expected, atol=max(tolerance, 1e-6))


@pytest.mark.parametrize("name", NEAREST)
def test_nearest_pixels_equal_torchvision(name):
    for seed, images in enumerate(batches()):
        expected, got = both(NEAREST[name](), images, seed)
        assert_values(got, expected, share=2e-3)


def test_no_window_fits_for_the_crops_that_fall_back():
    """Else the tests above would not reach the middle of the image."""
    draws = gpuaug.fuse(CLOSE["resized crop, no window fits"]()).draw((50, 3, 33, 48), seed=0)
    windows = [calls[0][1] for calls in draws.as_torchvision()]
    assert {(each["top"], each["left"], each["height"], each["width"]) for each in windows} == {(10, 0, 12, 48)}


def test_every_lowered_transform_is_compared():
    compared = {type(make()) for make in (*EXACT.values(), *CLOSE.values(), *NEAREST.values())}
    compared |= {type(each) for make in (*EXACT_SIZES.values(), *CLOSE_SIZES.values()) for each in make()} - {v2.RandomChoice}
    elsewhere = {
        gpuaug.FixedSizeCrop,
        gpuaug.PadIfSmaller,
        v2.FiveCrop,
        v2.JPEG,
        v2.LinearTransformation,
        v2.RandomPosterize,
        v2.RandomIoUCrop,
        v2.TenCrop,
        v2.UniformTemporalSubsample,
        *TorchvisionPolicy.lowers,
        v2.AugMix,
    }
    assert compared | elsewhere == set(LOWERED)


BYTES = {
    "flips, crop, padding": lambda: [v2.RandomHorizontalFlip(), v2.RandomCrop(36, padding=4, fill=127), v2.Pad(2, (1, 2, 3))],
    "solarize": lambda: [v2.RandomSolarize(128, p=1.0)],
    "solarize, between": lambda: [v2.RandomSolarize(99.5, p=1.0)],
    "posterize": lambda: [v2.RandomPosterize(3, p=0.7)],
    "posterize, one bit": lambda: [v2.RandomPosterize(1, p=1.0)],
    "posterize, none": lambda: [v2.RandomPosterize(0, p=1.0)],
    "posterize, all": lambda: [v2.RandomPosterize(8, p=1.0)],
    "solarize between two numbers, posterize": lambda: [v2.RandomSolarize(170.000005, p=1.0), v2.RandomPosterize(6)],
    "invert, posterize": lambda: [v2.RandomInvert(1.0), v2.RandomPosterize(7, p=1.0)],
    "invert, permute": lambda: [v2.RandomInvert(), v2.RandomChannelPermutation()],
    "erasing": lambda: [v2.RandomErasing(1.0, value=99)],
    "erasing, values": lambda: [v2.RandomErasing(1.0, value=(9.7, 0, 255))],
    "erasing, noise": lambda: [v2.RandomErasing(1.0, value="random")],
    "equalize": lambda: [v2.RandomPosterize(5), v2.RandomEqualize()],
    "elastic, nearest": lambda: [v2.ElasticTransform(40.0, 1.8, InterpolationMode.NEAREST, fill=9.6)],
    "jpeg, flip": lambda: [v2.RandomApply([v2.JPEG((5, 95))]), v2.RandomHorizontalFlip(), v2.JPEG(30)],
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_that_are_not_computed_with_equal_torchvision(name):
    """fuse divides a byte by 255, as one rounding; torchvision multiplies by 1 / 255, within one unit in the last place."""
    every = torch.arange(256, dtype=torch.uint8).repeat(3 * 8).view(8, 3, 8, 32).contiguous()
    for images in (photographs(9), every) if "crop" not in name else (photographs(9),):
        assert_replays([*BYTES[name](), TO_FLOAT], images, 1, atol=1.2e-7)


ROUNDED = {
    **{name: lambda make=make: [make()] for name, make in CLOSE.items() if "normalize" not in name},
    **{f"nearest, {name}": lambda make=make: [make()] for name, make in NEAREST.items()},
    "elastic": lambda: [v2.RandomApply([v2.ElasticTransform(60.0, 1.8, fill=(9, 99, 255))]), v2.RandomHorizontalFlip()],
    "rotation, filled with bytes": lambda: [v2.RandomRotation(45, BILINEAR, fill=99.6)],
    "nearest, rotation, filled with bytes": lambda: [v2.RandomRotation(45, fill=99.6)],
    "affine, filled with bytes": lambda: [
        v2.RandomAffine(30, (0.2, 0.1), (0.7, 1.3), (5, 20, -8, 3), BILINEAR, fill=[9, 80, 255])
    ],
    "brightness": lambda: [v2.ColorJitter(0.4)],
    "brightness, contrast": lambda: [v2.ColorJitter(0.4, 0.4)],
    "autocontrast": lambda: [v2.RandomAutocontrast(0.7)],
    "two resizes": lambda: [v2.Resize(28), v2.RandomSolarize(99), v2.RandomResizedCrop(40)],
}
"""Pipelines in which torchvision returns to bytes after each op, and after each axis of a resize, by rounding or truncation."""


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.every(3)
def test_bytes_are_rounded_where_torchvision_rounds(name):
    # torchvision cuts bytes off behind autocontrast, where a rounding error of its division may decide on a byte.
    one_level = 1 / 255 if name == "autocontrast" else 0
    for seed in range(2):
        got = assert_replays([*ROUNDED[name](), TO_FLOAT], photographs(8), seed, atol=1e-6 + one_level, share=BYTES_OFF)
        torch.testing.assert_close(got * 255, (got * 255).round(), atol=1e-4, rtol=0)


def test_cubic_swings_of_bytes_are_clamped_after_each_axis():
    images, resize = (photographs(4) > 127).to(torch.uint8) * 255, v2.Resize(28, InterpolationMode.BICUBIC)
    assert resize(scaled(images)).min() < -0.05
    assert_replays([resize, TO_FLOAT], images, atol=1e-6, share=BYTES_OFF)


def test_values_are_of_bytes_up_to_the_conversion_and_of_floats_behind_it():
    images = photographs(5)
    before, behind = v2.Pad(1, fill=51), v2.Pad(1, fill=0.2)
    for made in ([before, TO_FLOAT, behind], [v2.Compose([before, v2.Compose([TO_FLOAT])]), behind]):
        got = assert_replays(made, images, atol=1.2e-7)
        for place in (0, 1):
            assert_values(got[:, :, place, place], torch.full((5, 3), 0.2), atol=2e-6)


def test_skipped_samples_come_out_as_they_went_in():
    images = photographs(32)
    made = v2.RandomApply([v2.ColorJitter(0.4, 0.4), v2.RandomRotation(30), v2.GaussianBlur(3)], p=0.5)
    augment = gpuaug.fuse([made, TO_FLOAT])
    draws = augment.draw(images.shape, seed=0)
    skipped = torch.tensor([len(calls) == 1 for calls in draws.as_torchvision()])
    assert 5 < skipped.sum() < 27
    assert_values(augment(images, draws=draws)[skipped], scaled(images)[skipped])
    assert replayed(draws, images).shape == images.shape
