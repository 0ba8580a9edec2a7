"""Pointwise ops, against Kornia on the same draws; and the codes that choose their branch of a kernel."""

import ast
import importlib
import inspect
import itertools
import pkgutil
from collections import Counter
from contextlib import suppress

import kornia.augmentation as K
import pytest
import torch
from support.replay import as_kornia_takes_them, assert_replays, both, photographs
from support.values import assert_values

import gpuaug
from gpuaug.fusion.ops.base import PointCode, PointOp
from gpuaug.fusion.policies.one_of import OneOf

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])

EXACT = {
    "invert": lambda p: K.RandomInvert(p=p),
    "invert, of two": lambda p: K.RandomInvert(max_val=2.0, p=p),
    "posterize": lambda p: K.RandomPosterize(3, p=p),
    "posterize, few bits": lambda p: K.RandomPosterize((0.0, 8.0), p=p),
    "shuffle": lambda p: K.RandomChannelShuffle(p=p),
    "dropout": lambda p: K.RandomChannelDropout(p=p),
    "dropout of two": lambda p: K.RandomChannelDropout(num_drop_channels=2, fill_value=0.5, p=p),
    "erasing": lambda p: K.RandomErasing(p=p),
    "erasing, wide": lambda p: K.RandomErasing(scale=(0.1, 0.9), ratio=(2.0, 4.0), value=0.5, p=p),
    "erasing, same": lambda p: K.RandomErasing(p=p, same_on_batch=True),
}
CLOSE = {
    "brightness": lambda p: K.RandomBrightness((0.5, 1.5), p=p),
    "brightness, not clipped": lambda p: K.RandomBrightness((0.5, 1.5), clip_output=False, p=p),
    "contrast": lambda p: K.RandomContrast((0.5, 1.5), p=p),
    "contrast, not clipped": lambda p: K.RandomContrast((0.5, 1.5), clip_output=False, p=p),
    "saturation": lambda p: K.RandomSaturation((0.2, 1.8), p=p),
    "hue": lambda p: K.RandomHue((-0.5, 0.5), p=p),
    "gamma": lambda p: K.RandomGamma((0.3, 2.5), (0.5, 1.5), p=p),
    "solarize": lambda p: K.RandomSolarize(0.3, 0.2, p=p),
    "snow": lambda p: K.RandomSnow((0.2, 0.8), (1.0, 3.0), p=p),
    "grey": lambda p: K.RandomGrayscale(p=p),
    "grey, weighted": lambda p: K.RandomGrayscale(rgb_weights=torch.tensor([0.5, 0.25, 0.25]), p=p),
    "noise": lambda p: K.RandomGaussianNoise(0.1, 0.3, p=p),
    "noise, same": lambda p: K.RandomGaussianNoise(0.1, 0.3, p=p, same_on_batch=True),
    "normalize": lambda p: K.Normalize(MEAN, STD, p=p),
    "normalize, one": lambda p: K.Normalize(0.5, 0.25, p=p),
    "denormalize": lambda p: K.Denormalize(MEAN, STD, p=p),
    "jitter": lambda p: K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=p),
    "jitter, no hue": lambda p: K.ColorJitter(0.4, 0.4, 0.4, p=p),
    "jitter, contrast": lambda p: K.ColorJitter(contrast=(0.2, 3.0), p=p),
    "jitter, nothing": lambda p: K.ColorJitter(p=p),
    "jitter, ordered": lambda p: K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=p, order=(3, 1, 0)),
    "jitter, same": lambda p: K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=p, same_on_batch=True),
    "jiggle": lambda p: K.ColorJiggle(0.4, 0.4, 0.4, 0.1, p=p),
    "jiggle, ordered": lambda p: K.ColorJiggle(0.4, 0.4, 0.4, 0.1, p=p, order=(2, 0)),
}
GREY_TOO = [
    "brightness",
    "contrast",
    "gamma",
    "solarize",
    "invert",
    "posterize",
    "dropout",
    "erasing",
    "noise",
    "normalize, one",
]
JUMPS = {"hue", "solarize", "posterize", "jitter", "jiggle", "saturation"}
"""Ops of which 0.1 % of the values may be wrong. Leave a name out unless the test fails without it."""


def compared(module, images, seed, tolerance, jumps=False):
    # A pixel at a threshold may fall on either side of it.
    assert_replays(K.AugmentationSequential(module), images, seed, atol=tolerance, share=1e-3 if jumps and tolerance else 0)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", [*EXACT, *CLOSE])
def test_pointwise_ops_equal_kornia(name, p):
    module = (EXACT.get(name) or CLOSE[name])(p)
    exact = name in EXACT or p == 0
    batches = [photographs(5), photographs(1, height=7), photographs(4, dtype=torch.float32)]
    if name != "erasing, same":  # with which Kornia takes no empty batch
        batches.append(photographs(0))
    for seed, images in enumerate(batches):
        compared(module, images, seed, 0 if exact else 2e-6 / (0.22 if "normalize" in name else 1), name.split(",")[0] in JUMPS)


@pytest.mark.parametrize("name", GREY_TOO)
def test_pointwise_ops_on_one_and_four_channels(name):
    module = (EXACT.get(name) or CLOSE[name])(0.7)
    for channels in (1, 4):
        compared(module, photographs(5, channels), 1, 1e-5, jumps=True)
    assert "left to Kornia" not in str(gpuaug.fuse(module).explain((5, 4, 8, 8)))


@pytest.mark.parametrize("name", sorted(set(CLOSE) - {"noise", "noise, same"} | {"posterize"}))
def test_pointwise_ops_on_values_out_of_range_equal_kornia(name):
    module = (EXACT.get(name) or CLOSE[name])(1.0)
    images = photographs(4, dtype=torch.float32) * 3 - 1
    compared(module, images, 0, 2e-5, jumps=True)


def test_pointwise_ops_keep_nan_where_kornia_does():
    images = photographs(4, dtype=torch.float32)
    images[:, :, 3:5, 6:9] = float("nan")
    made = K.AugmentationSequential(K.RandomBrightness((0.5, 1.5)), K.RandomInvert(p=1.0), K.Normalize(MEAN, STD))
    expected, got = both(made, images)
    assert_values(got.isnan(), expected.isnan())


def test_pointwise_ops_keep_their_order_and_clamps():
    made = K.AugmentationSequential(
        K.RandomBrightness((1.3, 1.8)),
        K.RandomContrast((0.3, 1.9)),
        K.RandomInvert(p=0.5),
        K.RandomGamma((0.5, 2.0)),
        K.RandomSaturation((0.2, 1.8)),
        K.Normalize(MEAN, STD),
    )
    for seed in range(4):
        assert_replays(made, photographs(5), seed, atol=2e-5)


def test_two_color_jitters_each_use_the_mean_of_their_own_input():
    made = K.AugmentationSequential(
        K.ColorJitter(0.4, 0.9), K.RandomHorizontalFlip(), K.ColorJitter(0.4, 0.9), K.RandomResizedCrop((16, 16))
    )
    assert_replays(made, photographs(5), atol=5e-5)
    assert len(gpuaug.fuse(made).explain((5, 3, 32, 48)).lines) == 3


def test_gaussian_noise_has_its_mean_and_std_and_differs_between_samples_and_channels():
    images = torch.zeros(8, 3, 64, 64)
    field = gpuaug.fuse(K.RandomGaussianNoise(0.5, 2.0, p=1.0))(images)
    assert abs(field.mean().item() - 0.5) < 0.02
    assert abs(field.std().item() - 2.0) < 0.02
    flat = field.reshape(24, -1)
    assert_values(torch.corrcoef(flat), torch.eye(24), atol=0.08)


def test_samples_skipped_by_p_are_unchanged_bit_for_bit():
    images = photographs(64)
    augment = gpuaug.fuse(K.AugmentationSequential(K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.5), K.RandomGamma((0.5, 2.0), p=0.5)))
    draws = augment.draw(images.shape, seed=0)
    skipped = ~(draws._drawn[0]["apply_mask"] | draws._drawn[1]["apply_mask"])
    assert skipped.any()
    assert_values(augment(images, draws=draws)[skipped], as_kornia_takes_them(images)[skipped])


def point_ops(kind=PointOp):
    """Every kind of pointwise op in the package."""
    for made in kind.__subclasses__():
        yield from (made, *point_ops(made)) if made.__module__.startswith("gpuaug.") else ()


@pytest.fixture(scope="module")
def codes():
    """The code of each kind of op, with all modules of the package imported."""
    for module in pkgutil.walk_packages(gpuaug.__path__, "gpuaug."):
        with suppress(ModuleNotFoundError):  # what is there only with Triton holds kernels, and no op
            importlib.import_module(module.name)
    found = set(point_ops())
    # A base whose subclasses have the codes is no op by itself, and what inherits a code is that op with other settings.
    return {
        f"{op.__module__}.{op.__name__}": vars(op).get("code")
        for op in found
        if "code" in vars(op) or not (op.__subclasses__() or hasattr(op, "code"))
    }


def test_each_op_has_a_code_of_its_own(codes):
    for (name, code), (other, same) in itertools.combinations(codes.items(), 2):
        assert code != same, f"{name} and {other} share code {code}; give one of them a PointCode of its own"
    assert set(codes.values()) == set(PointCode), "each PointCode is the code of one op"
    assert max(PointCode) == OneOf.code, "the kernel looks for the op that was picked among the codes below OneOf's"


def branches(tree):
    """The constants that the kernels compare a code with, one for each branch."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and "CODE" in [argument.arg for argument in function.args.args]:
            for statement in function.body:
                while isinstance(statement, ast.If):
                    for node in ast.walk(statement.test):
                        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "CODE":
                            yield from map(ast.unparse, node.comparators)
                    statement = next(iter(statement.orelse), None)


def test_each_code_has_one_branch_of_the_kernels(codes):
    pytest.importorskip("triton")
    from gpuaug.fusion.backends.triton import points

    there = Counter(getattr(points, name).value for name in branches(ast.parse(inspect.getsource(points))))
    for name, code in codes.items():
        assert there[code] == 1, f"{there[code]} branches for {name} in point() of triton/points.py; code {int(code)} needs one"
