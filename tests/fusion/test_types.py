"""The type of the images that come out, and the type that modules are given that their own library runs."""

import random
import re

import kornia.augmentation as K
import pytest
import torch
from support.batches.pairwise import sweep
from support.comparison.replay import overriding, photographs
from support.comparison.values import assert_values
from torch import nn
from torchvision.transforms import InterpolationMode, v2

import gpuaug
from gpuaug.fusion.pixels import IMAGE_DTYPES, LARGEST, converted

pytestmark = pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")

TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
TOLERANCES = {**dict.fromkeys(LARGEST, 0), torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-6, torch.float64: 2e-6}


def batch_of(dtype, *shape):
    return converted(photographs(*shape), dtype)


class Seen:
    """Records the type of each image that it is called with."""

    def __init__(self):
        self.types = []

    def __call__(self, image):
        self.types.append(image.dtype)
        return image


STEPS = {
    "flip": lambda seen: v2.RandomHorizontalFlip(1.0),
    "crop": lambda seen: v2.CenterCrop((30, 40)),
    "pad": lambda seen: v2.Pad(1),
    "invert": lambda seen: v2.RandomInvert(1.0),
    "posterize": lambda seen: v2.RandomPosterize(4, 1.0),
    "jpeg": lambda seen: v2.JPEG((80, 80)),
    "seen": lambda seen: seen,
    "in a container": lambda seen: v2.Compose([v2.RandomApply([seen], 1.0), v2.Lambda(seen)]),
    "to [0, 1]": lambda seen: TO_FLOAT,
    "to bytes": lambda seen: v2.ToDtype(torch.uint8, scale=True),
    "to [0, 1] by a function": lambda seen: v2.Lambda(
        lambda image: image / 255 if image.dtype == torch.uint8 else image.float()
    ),
    "to bytes by a function": lambda seen: lambda image: (image * 255).round().byte() if image.is_floating_point() else image,
    "a shift by a function": lambda seen: lambda image: image // 2 if image.dtype == torch.uint8 else image / 2,
    "mean, deviation": lambda seen: v2.Normalize([0.25], [0.5]),
}
"""Transforms without a random choice, whose results are exact for bytes, and for floats that are bytes' shares."""


def outcome(run):
    try:
        return run()
    except Exception as error:
        return error


@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 120))])
def test_types_and_values_are_those_of_torchvision(seed):
    """What torchvision refuses is refused; else types, of results and of what functions see, and values are the same."""
    choices = random.Random(seed)
    names = [choices.choice(list(STEPS)) for _ in range(choices.randint(1, 6))]
    dtype = choices.choice([torch.uint8, torch.uint8, *sorted(IMAGE_DTYPES, key=str)])
    images, theirs, ours = batch_of(dtype, 2, 3), Seen(), Seen()
    plain = v2.Compose([v2.Identity(), *(STEPS[name](theirs) for name in names)])
    expected = outcome(lambda: torch.stack([plain(image) for image in images]))
    before = images.clone()
    got = outcome(lambda: gpuaug.fuse(v2.Compose([v2.RandomVerticalFlip(0.0), *(STEPS[name](ours) for name in names)]))(images))
    assert_values(images, before)
    if isinstance(expected, Exception):
        assert isinstance(got, Exception), f"{names} of {dtype}: torchvision says {expected}"
        return
    assert not isinstance(got, Exception), f"{names} of {dtype}: {got!r}"
    assert got.dtype == expected.dtype, names
    assert set(ours.types) == set(theirs.types), names
    tolerance = max(TOLERANCES[dtype], TOLERANCES[got.dtype]) if got.is_floating_point() else 0
    torch.testing.assert_close(got, expected, atol=max(tolerance, 2e-6), rtol=0, msg=lambda text: f"{names} of {dtype}: {text}")


ROUNDED = {
    "torchvision's": lambda: [
        v2.RandomResizedCrop(24),
        v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
        v2.RandomRotation(20),
        v2.GaussianBlur(5),
    ],
    "cubic": lambda: [v2.RandomInvert(), v2.RandomResizedCrop(40, interpolation=InterpolationMode.BICUBIC)],
    "levels": lambda: [v2.RandomEqualize(), v2.RandomAutocontrast(), v2.RandomAdjustSharpness(2.0)],
    "a policy": lambda: [v2.TrivialAugmentWide()],
    "a mix": lambda: [v2.RandomResizedCrop(24), v2.CutMix()],
    "Kornia's": lambda: [
        K.RandomResizedCrop((24, 24)),
        K.ColorJitter(0.4, 0.4, 0.4, 0.1),
        K.RandomGaussianBlur((5, 5), (0.1, 2.0)),
    ],
}


@pytest.mark.parametrize(("name", "memory_format"), sweep(ROUNDED, [torch.contiguous_format, torch.channels_last]), ids=str)
def test_bytes_are_the_float32_result_rounded_once(name, memory_format):
    images = photographs(6)
    options = {"memory_format": memory_format}
    augment, floats = (
        gpuaug.fuse(ROUNDED[name](), dtype=torch.uint8, **options),
        gpuaug.fuse(ROUNDED[name](), dtype=torch.float32),
    )
    draws = augment.draw(images.shape, seed=2)
    got, expected = augment(images, draws=draws), floats(images, draws=draws)
    assert got.dtype == torch.uint8
    assert got.is_contiguous(memory_format=memory_format)
    assert_values(got, (expected * 255).round().clamp(0, 255).byte())


@pytest.mark.parametrize("dtype", sorted(IMAGE_DTYPES, key=str), ids=str)
def test_type_that_comes_out_by_default(dtype):
    images = batch_of(dtype)
    assert gpuaug.fuse(K.RandomHorizontalFlip())(images).dtype == torch.float32
    assert gpuaug.fuse(v2.RandomHorizontalFlip())(images).dtype == dtype
    assert gpuaug.fuse([v2.RandomHorizontalFlip(), TO_FLOAT])(images).dtype == torch.float32
    assert gpuaug.fuse([v2.RandomHorizontalFlip(), K.RandomHorizontalFlip()])(images).dtype == torch.float32
    assert gpuaug.fuse(K.AugmentationSequential(v2.RandomHorizontalFlip()))(images).dtype == torch.float32
    assert gpuaug.fuse(v2.RandomHorizontalFlip(), views=2)(images).dtype == dtype
    assert gpuaug.fuse(v2.RandomHorizontalFlip())(images[:0]).dtype == dtype
    for asked in (torch.uint8, torch.float16, torch.bfloat16, torch.float32):
        for pipeline in (K.RandomHorizontalFlip(0.0), v2.RandomHorizontalFlip(0.0), v2.Lambda(lambda image: image)):
            got = gpuaug.fuse(pipeline, dtype=asked)(images)
            torch.testing.assert_close(got, converted(images, asked), atol=0 if asked == dtype else 1e-2, rtol=0)


def test_fills_and_thresholds_are_values_of_the_images_that_are_given():
    pipeline = v2.Compose([v2.Pad(2, fill=100), v2.RandomHorizontalFlip()])
    augment = gpuaug.fuse(pipeline)
    assert (augment(photographs())[..., 0] == 100).all()
    assert (augment(photographs(dtype=torch.float32))[..., 0] == 100.0).all()
    bytes_only = gpuaug.fuse(v2.RandomSolarize(128, 1.0))
    assert_values(bytes_only(photographs()), v2.RandomSolarize(128, 1.0)(photographs()))
    with pytest.raises(gpuaug.ArgumentError, match="threshold"):
        bytes_only(photographs(dtype=torch.float32))


FILLED = {
    "pad": lambda fill: v2.Pad(3, fill=fill),
    "crop": lambda fill: v2.RandomCrop((40, 60), padding=9, fill=fill),
    "zoom out": lambda fill: v2.Compose([v2.RandomZoomOut(fill, p=1.0), v2.CenterCrop((32, 48))]),
    "rotation": lambda fill: v2.RandomRotation((40, 40), fill=fill),
    "affine": lambda fill: v2.RandomAffine((40, 40), interpolation=InterpolationMode.BILINEAR, fill=fill),
    "perspective": lambda fill: v2.RandomPerspective(0.8, p=1.0, fill=fill),
    "a policy": lambda fill: v2.TrivialAugmentWide(fill=fill),
    "chains": lambda fill: v2.AugMix(fill=fill),
    "erasing": lambda fill: v2.RandomErasing(1.0, value=fill),
    "erasing in an order": lambda fill: v2.RandomOrder([v2.RandomErasing(1.0, value=fill), v2.RandomHorizontalFlip()]),
    "in a container": lambda fill: v2.RandomApply([v2.RandomRotation((40, 40), fill=fill)]),
}


@pytest.mark.parametrize("name", FILLED)
def test_fills_that_are_no_bytes_are_refused_for_bytes(name):
    for fill in (256, -1) if "erasing" in name else (256, -1, (0, 300, 0)):
        augment = gpuaug.fuse(FILLED[name](fill))
        with pytest.raises(gpuaug.ArgumentError, match=r"(fill|value) of .* must be in \[0, 255\] for uint8 images"):
            augment(photographs())
        augment(photographs(dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_what_is_padded_holds_the_fill_rounded_once(dtype):
    """Whatever the images are, and where the fill lies half way between two numbers of the type, too."""
    fills = torch.cat([torch.rand(12, generator=torch.Generator().manual_seed(0)), torch.arange(129, 256, 9) / 256 + 2**-9])
    for images in (photographs(1, dtype=torch.uint8), photographs(1, dtype=torch.float32)):
        for fill in fills.tolist():
            made = gpuaug.fuse(K.RandomCrop((40, 60), padding=9, fill=fill), dtype=dtype)(images)
            assert (made[0, :, 0, 0] == torch.tensor(fill).to(dtype)).all()


@pytest.mark.parametrize("fill", [0.0, 0.4, 3.7, 100.5, 254.9, 255.0])
def test_fills_of_bytes_are_cut_off_where_torchvision_cuts_them_off(fill):
    images = photographs(4)
    for transform in (v2.Pad(3, fill=fill), v2.Pad(3, fill=[fill, 0.0, 9.9]), v2.RandomErasing(1.0, value=fill)):
        augment = gpuaug.fuse(transform)
        draws = augment.draw(images.shape, seed=0)
        for image, made, calls in zip(images, augment(images, draws=draws), draws.as_torchvision(), strict=True):
            for function, arguments in calls:
                image = getattr(v2.functional, function)(image, **arguments)
            assert_values(made, image)


BYTES_REFUSED = {
    "a later conversion": v2.Compose([v2.Normalize([0.5], [0.5]), TO_FLOAT]),
    "nothing converts": v2.Normalize([0.5], [0.5]),
    "behind others": v2.Compose([v2.RandomHorizontalFlip(), v2.RandomApply([v2.Normalize([0.5], [0.5])])]),
    "a mix": v2.MixUp(num_classes=3),
    "a mix that may be picked": v2.RandomChoice([v2.CutMix(num_classes=3), v2.MixUp(num_classes=3)]),
    "a mix in a choice of choices": v2.RandomChoice(
        [v2.CutMix(num_classes=3), v2.RandomChoice([v2.CutMix(num_classes=3), v2.MixUp(num_classes=3)])]
    ),
}


@pytest.mark.parametrize("name", BYTES_REFUSED)
def test_bytes_are_refused_where_torchvision_refuses_them(name):
    pipeline, keys, labels = BYTES_REFUSED[name], ["input", "class"], torch.arange(3)
    augment = gpuaug.fuse(pipeline)
    with pytest.raises(gpuaug.ArgumentTypeError, match=r"images must be floating for .*, got torch\.uint8\. Put v2\.ToDtype"):
        augment(photographs(), labels, data_keys=keys)
    augment(photographs(dtype=torch.float32), labels, data_keys=keys)
    assert augment.explain().dtype == torch.float32
    gpuaug.fuse(v2.Compose([TO_FLOAT, pipeline]))(photographs(), labels, data_keys=keys)  # the way out


BEHIND_BYTES = {
    "Kornia's": lambda mean, std: K.Normalize(torch.tensor(mean), torch.tensor(std)),
    "Kornia's behind a flip": lambda mean, std: [K.RandomHorizontalFlip(), K.Normalize(torch.tensor(mean), torch.tensor(std))],
    "torchvision's": lambda mean, std: [TO_FLOAT, v2.Normalize(mean, std)],
    "torchvision's behind a function of torchvision's": lambda mean, std: [
        TO_FLOAT,
        v2.Pad(2, padding_mode="symmetric"),
        v2.Normalize(mean, std),
    ],
    "torchvision's behind Kornia's": lambda mean, std: [K.RandomHorizontalFlip(), v2.Normalize(mean, std)],
}


@pytest.mark.parametrize(("mean", "std"), [([123.675, 116.28, 103.53], [58.395, 57.12, 57.375]), ([0.0] * 3, [255.0] * 3)])
@pytest.mark.parametrize("name", BEHIND_BYTES)
def test_means_of_bytes_are_refused_for_images_in_unit_range(name, mean, std):
    make = BEHIND_BYTES[name]
    with pytest.raises(gpuaug.ArgumentError, match="Divide both by 255"):
        gpuaug.fuse(make(mean, std))(photographs())
    gpuaug.fuse(make([each / 255 for each in mean], [each / 255 for each in std]))(photographs())  # the way out


def test_means_of_bytes_are_taken_for_values_of_bytes():
    images, times, normalize = (
        photographs(dtype=torch.float32),
        v2.Lambda(lambda image: image * 255),
        v2.Normalize([120.0], [60.0]),
    )
    expected = (images * 255 - 120) / 60
    torch.testing.assert_close(gpuaug.fuse(normalize)(images * 255), expected)
    torch.testing.assert_close(gpuaug.fuse([TO_FLOAT, times, normalize])(images), expected)


def test_bytes_cannot_hold_what_is_normalised():
    for normalize in (v2.Compose([TO_FLOAT, v2.Normalize([0.5], [0.5])]), K.Normalize(0.5, 0.5)):
        with pytest.raises(gpuaug.ArgumentError, match=r"dtype must be floating for images that .* takes out of \[0, 1\]"):
            gpuaug.fuse(normalize, dtype=torch.uint8)
    gpuaug.fuse([K.Normalize(0.5, 0.5), K.Denormalize(torch.tensor(0.5), torch.tensor(0.5))], dtype=torch.uint8)


def test_a_function_that_changes_the_type_draws_the_same_in_its_first_batch():
    """The pipeline is lowered again for the type that the function returns, and the first batch run again from its seed."""
    pipeline = [v2.RandomHorizontalFlip(), v2.Lambda(lambda image: image / 255 + torch.rand(1) / 100), v2.RandomInvert()]
    images, results = photographs(8), []
    augment = gpuaug.fuse(v2.Compose(pipeline))
    for each in (augment, augment, gpuaug.fuse(v2.Compose(pipeline))):
        torch.manual_seed(5)
        results.append((each(images), torch.rand(1)))
    for made, drawn in results:
        assert_values(made, results[0][0])
        assert_values(drawn, results[0][1])


def test_types_of_one_batch_must_be_one():
    floats = v2.Lambda(lambda image: image / 255)
    text = (
        "Lambda_0 must return all images of a batch in one type, uint8, uint16, int16 or floating, got torch.float32 for "
        "images of torch.uint8. Make it return the type of its input. To convert, put "
        "v2.ToDtype(torch.float32, scale=True) before it."
    )
    with pytest.raises(gpuaug.ArgumentTypeError, match=re.escape(text)):
        gpuaug.fuse(v2.RandomApply([floats], 0.5))(photographs(16))
    for other in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(gpuaug.ArgumentTypeError, match="int16 or floating"):
            gpuaug.fuse(v2.Compose([lambda image, other=other: image.to(other)]))(photographs())


class Zeroes(nn.Module):
    """Writes into the images that it is given."""

    def forward(self, image):
        image.mul_(0)
        return image + 1


class ZeroesAll(K.IntensityAugmentationBase2D):
    """Writes into the images, masks and keypoints that it is given, as a module of Kornia's could."""

    def apply_transform(self, images, params, flags, transform=None):
        return images.mul_(0)

    def apply_transform_mask(self, masks, params, flags, transform=None):
        return masks.mul_(0)

    def apply_transform_keypoint(self, points, params, flags, transform=None):
        points.data.mul_(0)
        return points


WRITING = {
    "a module": lambda: v2.Compose([Zeroes()]),
    "a function": lambda: v2.Compose([lambda image: image.zero_() + 1]),
    "erasing": lambda: v2.RandomOrder([v2.RandomErasing(1.0, value="random", inplace=True)] * 5),
    "a subclass": lambda: v2.Compose([overriding(v2.RandomErasing)(1.0, value=0, inplace=True)]),
    "in Kornia's": lambda: K.AugmentationSequential(Zeroes()),
    "in a list": lambda: [Zeroes()],
    "by chance": lambda: v2.RandomApply([Zeroes()], 0.5),
}


@pytest.mark.parametrize(
    ("name", "views", "dtype"), sweep(WRITING, [1, 2], [torch.uint8, torch.float32, torch.float64]), ids=str
)
def test_modules_that_write_into_their_images_leave_the_users_alone(name, views, dtype):
    images = batch_of(dtype, 4)
    before = images.clone()
    gpuaug.fuse(WRITING[name](), views=views)(images)
    assert_values(images, before)
    source = [[images]]
    loader = gpuaug.StreamedLoader(source, [gpuaug.TransformStage(gpuaug.fuse(WRITING[name]()), into=1)], device="cpu")
    for _ in range(2):
        for kept, _made in loader:
            assert_values(kept, before)
    assert_values(source[0][0], before)


def test_modules_of_kornia_that_write_into_targets_leave_the_users_alone():
    images, masks, points = photographs(2, dtype=torch.float32), torch.ones(2, 1, 32, 48), torch.ones(2, 5, 2)
    augment = gpuaug.fuse(K.AugmentationSequential(ZeroesAll(p=1.0), data_keys=["input", "mask", "keypoints"]))
    before = images.clone()
    made, _, _ = augment(images, masks, points)
    assert not made.any()
    assert_values(images, before)
    assert masks.all()
    assert points.all()


RESIZING = {
    "nearest": v2.Resize((8, 12), interpolation=InterpolationMode.NEAREST),
    "cubic": v2.RandomResizedCrop((8, 12), interpolation=InterpolationMode.BICUBIC, antialias=False),
    "a subclass": overriding(v2.Resize)((8, 12)),
    "in a container": v2.RandomApply([v2.Resize((8, 12))], p=1.0),
    "one channel": v2.Grayscale(),
    "symmetric": v2.Pad(2, padding_mode="symmetric"),
    "a function": v2.Lambda(lambda image: image[:, :5, :7]),
    "a function that converts": v2.Lambda(lambda image: image[:, :5].float() / 255),
    "turned": v2.RandomRotation((90, 90), expand=True, center=(3, 4)),
    "Kornia's": K.Resize((8, 12), antialias=True),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("name", RESIZING)
def test_empty_batches_have_the_size_of_full_ones(name, dtype):
    for pipeline in ([RESIZING[name]], [v2.RandomHorizontalFlip(), RESIZING[name]]):
        augment, images = gpuaug.fuse(pipeline), batch_of(dtype, 3)
        empty, full = augment(images[:0]), augment(images)
        assert empty.shape == (0, *full.shape[1:])
        assert empty.dtype == full.dtype


def test_empty_batches_get_the_channels_of_full_ones():
    for transform in (v2.RGB(), v2.Compose([TO_FLOAT, v2.Normalize([0.5] * 3, [0.5] * 3)])):
        augment, images = gpuaug.fuse(transform), photographs(2, 1)
        assert augment(images[:0]).shape == (0, *augment(images).shape[1:]) == (0, 3, 32, 48)


CUBIC_LATER = {
    "first": [],
    "behind a flip": [v2.RandomHorizontalFlip()],
    "behind an inversion": [v2.RandomInvert()],
    "behind a grey": [v2.RandomGrayscale()],
    "behind a jitter": [v2.ColorJitter(0.1)],
    "behind a blur": [v2.GaussianBlur(3)],
    "behind a resize": [v2.Resize(36)],
    "behind a module": [Zeroes(), overriding(v2.RandomErasing)(1.0, value="random")],
}


@pytest.mark.parametrize("floats_first", [False, True])
@pytest.mark.parametrize("name", CUBIC_LATER)
def test_cubic_swings_are_clamped_where_images_are_bytes_alone(name, floats_first):
    """In whichever pass the resize stands; floats swing beyond [0, 1], as torchvision's do."""
    edges = (torch.rand(4, 3, 40, 40, generator=torch.Generator().manual_seed(0)) > 0.5).to(torch.uint8) * 255
    resize = v2.RandomResizedCrop(64, interpolation=InterpolationMode.BICUBIC)
    before = CUBIC_LATER[name]
    pipeline = [TO_FLOAT, *before, resize] if floats_first else [*before, resize, TO_FLOAT]
    got = gpuaug.fuse(v2.Compose(pipeline), dtype=torch.float32)(edges)
    assert (got.amin() < -1e-3) == floats_first
    assert (got.amax() > 1 + 1e-3) == floats_first


@pytest.mark.parametrize(
    "first", [K.RandomHorizontalFlip(), K.ColorJitter(0.1), K.RandomGaussianBlur((3, 3), (0.1, 0.2))], ids=repr
)
def test_kornias_cubic_swings_of_bytes_are_clamped_in_every_pass(first):
    edges = (torch.rand(4, 3, 40, 40, generator=torch.Generator().manual_seed(0)) > 0.5).to(torch.uint8) * 255
    crop = K.RandomResizedCrop((64, 64), resample="bicubic")
    got = gpuaug.fuse([first, crop], antialias=True)(edges)
    assert got.amin() >= 0
    assert got.amax() <= 1
    assert gpuaug.fuse([first, crop], antialias=True)(edges.float() / 255).amax() > 1


OTHER_TYPES = {
    **{name: torch.iinfo(getattr(torch, name)).max for name in ("int8", "int32", "int64", "uint32", "uint64")},
    **dict.fromkeys(["bool", "float8_e4m3fn", "float8_e5m2", "complex64"], 1),
}
"""Value of 1, by type of images that are refused."""


@pytest.mark.parametrize("name", OTHER_TYPES)
def test_images_of_other_types_are_images_in_unit_range_by_the_advice(name):
    source = torch.float32 if name.startswith(("float", "complex", "bool")) else torch.uint64
    images = torch.full((2, 3, 4, 4), OTHER_TYPES[name], dtype=source).to(getattr(torch, name))
    augment = gpuaug.fuse(v2.RandomHorizontalFlip(1.0))
    with pytest.raises(gpuaug.ArgumentTypeError, match="images must be uint8, uint16, int16 or floating") as raised:
        augment(images)
    code = str(raised.value).rpartition(": ")[2].removesuffix(".")
    assert_values(augment(eval(code)), torch.ones(2, 3, 4, 4), atol=1e-6)
