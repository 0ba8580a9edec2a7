"""Parameters drawn by fuse and by torchvision's own ``make_params``, for every transform that draws."""

from unittest import mock

import numpy as np
import pytest
import torch
from support import internals
from support.comparison.statistics import apart, related, together_apart
from support.ops.other_arguments import made as changeable
from torchvision.transforms import v2
from torchvision.transforms.v2 import _geometry

import gpuaug
from gpuaug.fusion.lower.torchvision import LOWERED
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.sampler import ArraySampler
from gpuaug.fusion.policies.torchvision import TorchvisionPolicy

COUNT, OURS = 1500, 2000
"""Samples of torchvision's, which draws one by one, and of ours."""

HEIGHT, WIDTH = 24, 40

DISTRIBUTION_CASES = {
    "resized crop": lambda: v2.RandomResizedCrop(16),
    "resized crop, misses": lambda: v2.RandomResizedCrop(16, scale=(0.6, 1.0), ratio=(0.5, 3.0)),
    "resized crop, none fits": lambda: v2.RandomResizedCrop(16, scale=(0.8, 1.0), ratio=(3.0, 6.0)),
    "resized crop, narrow": lambda: v2.RandomResizedCrop(16, scale=(0.5, 1.0), ratio=(0.4, 0.9)),
    "crop": lambda: v2.RandomCrop((12, 40)),
    "crop, padded": lambda: v2.RandomCrop((24, 40), padding=[3, 5, 2, 7]),
    "crop, padded if needed": lambda: v2.RandomCrop((30, 50), padding=1, pad_if_needed=True),
    "resize": lambda: v2.RandomResize(20, 36),
    "shortest size": lambda: v2.RandomShortestSize((20, 25, 30, 31), max_size=50),
    "scale": lambda: v2.ScaleJitter((90, 80)),
    "zoom out": lambda: v2.RandomZoomOut(p=1.0),
    "rotation": lambda: v2.RandomRotation(45),
    "rotation, one way": lambda: v2.RandomRotation((10, 80)),
    "affine": lambda: v2.RandomAffine(30, (0.2, 0.1), (0.7, 1.3), (5, 20, -8, 3)),
    "affine, sheared across": lambda: v2.RandomAffine((-10, 40), shear=(-10, 20)),
    "perspective": lambda: v2.RandomPerspective(0.5, p=1.0, fill=None),
    "perspective, far": lambda: v2.RandomPerspective(0.9, p=1.0, fill=None),
    "jitter": lambda: v2.ColorJitter(0.4, (0.2, 3.0), 0.7, 0.1),
    "permutation": lambda: v2.RandomChannelPermutation(),
    "blur": lambda: v2.GaussianBlur(3, (0.1, 2.0)),
    "jpeg": lambda: v2.JPEG((60, 75)),
    "erasing": lambda: v2.RandomErasing(1.0),
    "erasing, wide": lambda: v2.RandomErasing(1.0, scale=(0.1, 0.9), ratio=(2.0, 4.0)),
    "erasing, misses": lambda: v2.RandomErasing(1.0, scale=(0.8, 1.0), ratio=(0.2, 6.0)),
    "erasing, small": lambda: v2.RandomErasing(1.0, scale=(0.0, 0.01), ratio=(0.1, 10.0)),
}

NOT_DRAWN = {
    *(v2.CenterCrop, v2.FiveCrop, v2.Grayscale, v2.LinearTransformation, v2.Normalize, v2.Pad, v2.Resize, v2.RGB, v2.TenCrop),
    *(v2.RandomAdjustSharpness, v2.RandomGrayscale, v2.RandomHorizontalFlip, v2.RandomInvert, v2.RandomPosterize),
    *(v2.RandomAutocontrast, v2.RandomEqualize, v2.RandomSolarize, v2.RandomVerticalFlip, v2.UniformTemporalSubsample),
}
"""Nothing but a chance, where there is one."""

ELSEWHERE = {
    v2.ElasticTransform,
    v2.GaussianNoise,
    v2.RandomPhotometricDistort,
    v2.RandomIoUCrop,
    gpuaug.FixedSizeCrop,
    gpuaug.PadIfSmaller,
    *TorchvisionPolicy.lowers,
    v2.AugMix,
}
"""Transforms that other files compare: test_elastic, test_noise, test_photometric, test_iou_crop, fusion/test_transforms and
policies/test_torchvision.
"""


def corners(startpoints, endpoints):
    """The drawn corners, in place of coefficients, which take a least squares problem per sample."""
    assert np.ravel(startpoints).tolist() == [0, 0, WIDTH - 1, 0, WIDTH - 1, HEIGHT - 1, 0, HEIGHT - 1]
    return np.ravel(endpoints)


def theirs(transform, count, seed):
    """Columns of what torchvision draws, {name: (N,)}."""
    torch.manual_seed(seed)
    image = torch.empty(3, HEIGHT, WIDTH, dtype=torch.uint8)
    with mock.patch.object(_geometry, "_get_perspective_coeffs", corners):
        return columns(transform, [transform.make_params([image]) for _ in range(count)])


def ours(transform, count, seed):
    """Columns of what fuse draws, told by its calls."""
    behind = [v2.RandomCrop(8, pad_if_needed=True)] if isinstance(transform, DRAWING_SIZES) else []
    augment = gpuaug.fuse([transform, *behind])
    calls = augment.draw((count, 3, HEIGHT, WIDTH), seed=seed).as_torchvision()
    return columns(transform, [as_params(transform, each) for each in calls])


def as_params(transform, calls):
    """A sample's calls as ``make_params`` gives them."""
    if isinstance(transform, v2.ColorJitter):
        names = [name.removeprefix("adjust_") for name, _ in calls]
        factors = {key: value for _, arguments in calls for key, value in arguments.items()}
        return {**factors, "fn_idx": [("brightness", "contrast", "saturation", "hue").index(name) for name in names]}
    if isinstance(transform, DRAWING_SIZES):
        arguments = calls[0][1]
        return {"size": min(arguments["size"])} if isinstance(transform, v2.RandomResize) else arguments
    arguments = calls[-1][1] if calls else {"i": 0, "j": 0, "h": 0, "w": 0}
    if isinstance(transform, v2.RandomPerspective):
        return {"coefficients": corners(arguments["startpoints"], arguments["endpoints"])}
    return arguments


DRAWING_SIZES = (v2.RandomResize, v2.RandomShortestSize, v2.ScaleJitter, v2.RandomZoomOut)
DRAWN = ("top", "left", "height", "width", "angle", "translate", "scale", "shear", "sigma", "permutation", "quality", *"ijhw")


def columns(transform, params):
    found = {}
    for key in params[0]:
        drawn = ("size", "padding") if isinstance(transform, DRAWING_SIZES) else ("coefficients", *DRAWN)
        if key in drawn or key.endswith("_factor"):
            values = np.array([each[key] for each in params], dtype=np.float64).reshape(len(params), -1)
            found.update({f"{key} {index}": values[:, index] for index in range(values.shape[1])})
    if isinstance(transform, v2.ColorJitter):
        found["order"] = np.array([np.asarray(each["fn_idx"]) @ [64, 16, 4, 1] for each in params])
    if isinstance(transform, v2.RandomErasing):
        # Where no rectangle is small enough torchvision names the whole image, and erases nothing; and one without pixels.
        nothing = (found["h 0"] == 0) | (found["w 0"] == 0) | (found["h 0"] == HEIGHT)
        found = {key: np.where(nothing, -1, values) for key, values in found.items()}
    return found


@pytest.mark.parametrize("name", DISTRIBUTION_CASES)
def test_parameters_have_torchvisions_distribution(name):
    right, found = theirs(DISTRIBUTION_CASES[name](), COUNT, 0), ours(DISTRIBUTION_CASES[name](), OURS, 1)
    assert right.keys() == found.keys()
    for key in right:
        assert apart(right[key], found[key]) < 1, key
    if len(right) > 1:
        assert together_apart(right, found) < 1
    if name in OFF:
        make, key = OFF[name]
        assert apart(right[key], ours(make(), OURS, 1)[key]) > 1, "settings that are off are told apart"


OFF = {
    "resized crop": (lambda: v2.RandomResizedCrop(16, scale=(0.2, 1.0)), "height 0"),
    "crop, padded": (lambda: v2.RandomCrop((24, 40), padding=[3, 6, 2, 7]), "top 0"),
    "rotation": (lambda: v2.RandomRotation(54), "angle 0"),
    "affine": (lambda: v2.RandomAffine(30, (0.25, 0.1), (0.7, 1.3), (5, 20, -8, 3)), "translate 0"),
    "jitter": (lambda: v2.ColorJitter(0.48, (0.2, 3.0), 0.7, 0.1), "brightness_factor 0"),
    "perspective": (lambda: v2.RandomPerspective(0.6, p=1.0, fill=None), "coefficients 2"),
    "resize": (lambda: v2.RandomResize(20, 38), "size 0"),
    "shortest size": (lambda: v2.RandomShortestSize((20, 20, 25, 31, 30), max_size=50), "size 0"),
    "scale": (lambda: v2.ScaleJitter((90, 80), (0.1, 2.2)), "size 1"),
    "zoom out": (lambda: v2.RandomZoomOut(side_range=(1.0, 4.8), p=1.0), "padding 0"),
    "erasing": (lambda: v2.RandomErasing(1.0, scale=(0.02, 0.4)), "w 0"),
    "blur": (lambda: v2.GaussianBlur(3, (0.1, 2.3)), "sigma 0"),
    "jpeg": (lambda: v2.JPEG((60, 76)), "quality 0"),
}
"""Transforms with one argument a tenth to a fifth off ``DISTRIBUTION_CASES``, and the parameter whose distribution shows it."""


@pytest.mark.parametrize("name", ["resize", "shortest size", "scale", "zoom out"])
def test_drawn_sizes_equal_torchvisions_for_the_same_numbers(name, monkeypatch):
    """To the pixel, for images of all sizes."""
    transform, rng = DISTRIBUTION_CASES[name](), np.random.default_rng(0)
    op = LOWERED[type(transform)]("", transform, torch.uint8)
    for height, width in rng.integers(1, 400, (100, 2)).tolist():
        numbers = rng.random(3, np.float32)
        turns = iter([numbers[:1], numbers[1:]])
        monkeypatch.setattr(torch, "rand", lambda count, turns=turns: torch.from_numpy(next(turns)))
        monkeypatch.setattr(torch, "randint", lambda *bounds, number=numbers[0]: torch.tensor(whole(number, *bounds[:-1])))
        size = Size(1, 3, height, width)
        ((_, mine),) = op.calls(op.draw(ArraySampler(numbers[:, None]), size), 0, size)
        theirs = transform.make_params([torch.empty(3, height, width)])
        if name == "resize":
            theirs["size"] = v2.functional.resize(torch.empty(1, height, width), theirs["size"]).shape[1:]
        assert [list(mine[key]) for key in theirs] == [list(value) for value in theirs.values()]


def whole(number, *bounds):
    """As ``torch.randint`` with this number in [0, 1)."""
    low, high = (0, *bounds)[-2:]
    return low + int(number * (high - low))


def test_crops_that_fall_back_are_in_the_middle_as_torchvisions():
    """Kornia's lie anywhere, which the comparison above tells apart."""
    right = theirs(DISTRIBUTION_CASES["resized crop, none fits"](), COUNT, 0)
    assert len(np.unique(right["top 0"])) < HEIGHT
    augment = gpuaug.fuse(DISTRIBUTION_CASES["resized crop, none fits"]())
    internals.program(augment).ops[0].centred = False
    calls = augment.draw((OURS, 3, HEIGHT, WIDTH), seed=1).as_torchvision()
    assert apart(right["top 0"], np.array([each[0][1]["top"] for each in calls])) > 1


@pytest.mark.parametrize("name", sorted(kind.__name__ for kind in NOT_DRAWN if kind.__name__.startswith("Random")))
def test_chances_are_those_of_the_transform(name):
    augment = gpuaug.fuse([changeable(getattr(v2, name), p=0.3), v2.ToDtype(torch.float32, scale=True)])
    applied = [len(calls) - 1 for calls in augment.draw((OURS, 3, HEIGHT, WIDTH), seed=0).as_torchvision()]
    assert abs(np.mean(applied) - 0.3) < 5 * (0.21 / OURS) ** 0.5


def test_every_lowered_transform_is_compared():
    assert {type(make()) for make in DISTRIBUTION_CASES.values()} | NOT_DRAWN | ELSEWHERE == set(LOWERED)


def test_factors_and_their_order_are_independent():
    found = ours(DISTRIBUTION_CASES["jitter"](), OURS, 5)
    for key in found:
        assert key == "order" or related(found[key], found["order"]) < 1
