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
from support.comparison.replay import assert_replays, both, photographs
from support.comparison.values import assert_values
from support.ops.op_cases import CASES, MEAN, STD, table

import gpuaug
from gpuaug import fusion
from gpuaug.fusion.lower.kornia import LOWERED
from gpuaug.fusion.ops.base import LARGEST_CODE, PointOp
from gpuaug.fusion.policies.one_of import OneOf

PIXELS = table(lambda case: {**case.settings, **case.more_pixels} if case.pointwise else {})


@pytest.mark.parametrize("name", PIXELS)
def test_pointwise_ops_equal_kornia(name):
    case, settings = PIXELS[name]
    pipeline = K.AugmentationSequential(case.kind(**settings, p=0.5))
    batches = [photographs(5), photographs(1, height=7), photographs(4, dtype=torch.float32)]
    if name != "erasing, same":  # with which Kornia takes no empty batch
        batches.append(photographs(0))
    for seed, images in enumerate(batches):
        # A pixel at a threshold may fall on either side of it.
        share = 1e-3 if case.jumps and not case.exact else 0
        assert_replays(pipeline, images, seed, atol=0 if case.exact else case.atol, share=share)


ONE_AND_FOUR = [
    (case.name, channels)
    for case in CASES.values()
    for channels in (1, 4)
    if case.pointwise and LOWERED[case.kind](case.name, case.first()).unsupported_channels(channels) is None
]


@pytest.mark.parametrize(("name", "channels"), ONE_AND_FOUR)
def test_pointwise_ops_on_one_and_four_channels(name, channels):
    module = PIXELS[name][0].first(p=0.7)
    assert_replays(K.AugmentationSequential(module), photographs(5, channels), 1, atol=1e-5, share=1e-3)
    assert "left to Kornia" not in str(gpuaug.fuse(module).explain((5, channels, 8, 8)))


@pytest.mark.parametrize("name", PIXELS)
def test_pointwise_ops_on_values_out_of_range_equal_kornia(name):
    case, settings = PIXELS[name]
    images = photographs(4, dtype=torch.float32) * 3 - 1
    assert_replays(K.AugmentationSequential(case.kind(**settings, p=1.0)), images, atol=2e-5, share=1e-3)


def test_pointwise_ops_keep_nan_where_kornia_does():
    images = photographs(4, dtype=torch.float32)
    images[:, :, 3:5, 6:9] = float("nan")
    made = K.AugmentationSequential(K.RandomBrightness((0.5, 1.5)), K.RandomInvert(p=1.0), K.Normalize(MEAN, STD))
    expected, got = both(made, images)
    assert_values(got.isnan(), expected.isnan())


def point_ops(kind=PointOp):
    """Every kind of pointwise op in the package."""
    for made in kind.__subclasses__():
        yield from (made, *point_ops(made)) if made.__module__.startswith("gpuaug.") else ()


@pytest.fixture(scope="module")
def codes():
    """The code of each kind of op, with all modules that define ops imported."""
    for module in pkgutil.walk_packages(fusion.__path__, "gpuaug.fusion."):
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
        assert code != same, f"{name} and {other} share code {code}; give one of them a code of its own"
    assert max(codes.values()) == OneOf.code == LARGEST_CODE, "the kernel looks for the op that was picked among lower codes"


def branches(tree):
    """The constants that the kernels compare a code with, one for each branch."""
    for part in ast.walk(tree):
        if isinstance(part, ast.Compare) and ast.unparse(part.left) == "PROGRAM[index][0]":
            yield from map(ast.unparse, part.comparators)
        if isinstance(part, ast.FunctionDef) and "CODE" in [argument.arg for argument in part.args.args]:
            for statement in part.body:
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
