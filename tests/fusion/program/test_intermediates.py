"""Images between passes have 16 bits a value only where nothing is lost that the result could hold."""

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from support import internals
from support.ops.op_cases import CASES
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug.fusion.lower.kornia import LOWERED
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.program.intermediates import UINT16_UNIT, blurs_in_strips, gives_unit_range, may_store_16_bits, types_written

HALF, FLOAT, BYTES = torch.bfloat16, torch.float32, torch.uint8
CROP, BLUR, TURN = K.RandomResizedCrop((16, 16)), K.RandomGaussianBlur((3, 3), (0.1, 2.0)), K.RandomRotation(30.0)
PADDED = K.RandomCrop((16, 16), padding=2, fill=2.0)
FILLED = v2.RandomRotation(30, fill={torch.Tensor: 512, tv_tensors.Mask: 0})
CUBIC = v2.RandomResizedCrop(16, interpolation=v2.InterpolationMode.BICUBIC)
UNSCALED = v2.ToDtype(torch.float32)
PIPELINES = {
    "self-supervised": ([CROP, K.ColorJitter(0.4, 0.4, 0.4, 0.1), K.RandomGrayscale(), BLUR, K.Normalize(0.5, 0.25)], "16"),
    "three passes": ([CROP, BLUR, TURN], "16 16"),
    "cubic of bytes": ([CUBIC, BLUR], "8"),
    "bytes, then floats": ([v2.GaussianBlur(3), CUBIC, BLUR, TURN], "8 8 16"),
    "cubic of 16 bits, which swings": ([BLUR, CUBIC, TURN], "16 32"),
    "normalised": ([CROP, K.Normalize(0.5, 0.25), BLUR, TURN], "32 32"),
    "padded with more than white": ([PADDED, BLUR], "32"),
    "turned before more than white": ([BLUR, FILLED, BLUR, v2.ToDtype(FLOAT, scale=True)], "16 32"),
    "floats of bytes": ([v2.RandomResizedCrop(16), UNSCALED, v2.GaussianBlur(3), v2.RandomRotation(30, fill=100)], "8 32"),
    "floats of bytes, normalised": ([UNSCALED, v2.GaussianBlur(3), v2.Normalize([114.0], [57.0]), TURN], "32"),
    "heavy grey": ([CROP, K.RandomGrayscale(rgb_weights=torch.ones(3)), BLUR], "32"),
    "levels": ([CROP, K.RandomEqualize(), BLUR], "32 32"),
    "levels of bytes": ([K.RandomEqualize(), BLUR], "16"),
    "mixed": ([K.RandomMixUpV2(), BLUR], "32"),
    "skipped, all clean": ([CROP, K.RandomSharpness(), BLUR], "16 16"),
    "skipped, with levels": ([CROP, K.RandomSharpness(), K.RandomEqualize(), BLUR], "32 32 32"),
}


def types(modules, given, dtype):
    plan = internals.program(gpuaug.fuse(modules)).segments.at(0, Size(2, 3, 24, 24), masks=False).plan
    return types_written(plan.passes, given, dtype)


@pytest.mark.parametrize("name", PIPELINES)
def test_half_precision_keeps_16_bits_between_passes_that_stay_in_range(name):
    """Bytes stay bytes for any precision."""
    modules, bits = PIPELINES[name]
    expected = [{"8": BYTES, "16": UINT16_UNIT, "32": FLOAT}[each] for each in bits.split()]
    assert types(modules, BYTES, HALF) == (*expected, HALF)
    assert types(modules, BYTES, FLOAT) == (*(BYTES if each is BYTES else FLOAT for each in expected), FLOAT)


@pytest.mark.parametrize("fill", [-1.0, 0.0, 0.5, 2.0, (0.0, 2.0, 0.5), (0.0, 0.5, 1.0)], ids=str)
def test_a_warp_is_clean_by_its_fill(fill):
    """As Python's bool, which becomes a constant of kernels: Triton compiles none of NumPy's."""
    augment = gpuaug.fuse([v2.ToDtype(FLOAT, scale=True), v2.RandomAffine(20, fill=fill)])
    (step,) = internals.program(augment).segments.at(0, Size(2, 3, 24, 24), masks=False).plan.passes
    assert gives_unit_range(step.front, BYTES) is (
        min(np.atleast_1d(fill)).item() >= 0 and max(np.atleast_1d(fill)).item() <= 1
    )
    assert gives_unit_range(step.front, FLOAT) is False


@pytest.mark.parametrize(
    ("side", "given", "dtype", "strips", "launches"),
    [
        (3, BYTES, HALF, False, 1),
        (5, BYTES, HALF, True, 1),
        (33, BYTES, HALF, True, 1),
        (35, BYTES, HALF, False, 2),
        (23, FLOAT, HALF, False, 2),
        (23, BYTES, torch.float16, False, 2),
        (23, BYTES, FLOAT, False, 2),
    ],
)
def test_blurs_are_in_strips_where_the_result_is_bfloat16(side, given, dtype, strips, launches):
    augment = gpuaug.fuse(K.RandomGaussianBlur((3, side), (0.1, 2.0)), dtype=dtype)
    assert (
        blurs_in_strips(
            internals.program(augment).segments.at(0, Size(2, 3, 48, 48), masks=False).plan.passes[0].front, given, dtype
        )
        == strips
    )
    if given == BYTES:
        assert augment.explain((2, 3, 48, 48)).launches == launches


def test_images_that_may_be_anything_stay_float32():
    assert types([CROP, BLUR], HALF, HALF) == (FLOAT, HALF)
    assert types([CROP, BLUR], torch.int16, HALF) == (FLOAT, HALF)


@pytest.mark.parametrize(("weights", "clean"), [(None, True), (torch.ones(4) / 4, True), (torch.ones(4), False)])
def test_greys_of_many_channels_are_clean_by_their_weights(weights, clean):
    assert gives_unit_range(LOWERED[K.RandomGrayscale]("grey", K.RandomGrayscale(rgb_weights=weights)), BYTES) is clean


def test_whole_numbers_of_16_bits_are_rounded_once():
    assert types([CROP, BLUR], UINT16_UNIT, HALF) == (UINT16_UNIT, HALF)
    assert types([CROP, BLUR], UINT16_UNIT, UINT16_UNIT) == (FLOAT, UINT16_UNIT)
    first, second = internals.program(gpuaug.fuse([CROP, BLUR])).segments.at(0, Size(2, 3, 24, 24), masks=False).plan.passes
    assert may_store_16_bits(first, UINT16_UNIT, HALF)
    assert may_store_16_bits(first, BYTES, UINT16_UNIT)
    assert may_store_16_bits(second, UINT16_UNIT, UINT16_UNIT)
    assert not may_store_16_bits(first, UINT16_UNIT, UINT16_UNIT)
    assert not may_store_16_bits(first, BYTES, FLOAT)


RANGES = [
    pytest.param(case, name, id=f"{case.kind.__name__}-{name}")
    for case in CASES.values()
    if case.pointwise
    for name in {**case.settings, **case.more_pixels, **case.more_draws}
]
UNBOUNDED = {"Normalize", "Denormalize", "RandomGaussianNoise"}
"""Modules whose results may leave [0, 1] by their purpose."""


@pytest.mark.parametrize(("case", "name"), RANGES)
def test_an_op_keeps_the_unit_range_if_it_says_so(case, name):
    op = LOWERED[case.kind]("op", case.kind(**{**case.settings, **case.more_pixels, **case.more_draws}[name]))
    images = torch.rand(64, 3, 6, 6)
    images[0], images[1], images[2] = 0.0, 1.0, images[2].round()
    rows = np.zeros((64, op.row_width(3)), np.float32)
    drawn = op.draw(Sampler((1,), 64), Size(64, 3, 6, 6))
    op.write_rows({**drawn, "apply_mask": np.ones(64, bool)}, Size(64, 3, 6, 6), rows)
    out = op.apply(images, torch.from_numpy(rows))
    # 16 bits hold shares of 65535, and rounding to them is all that may happen.
    inside = bool((out > -0.5 / 65535).all() and (out < 1 + 0.5 / 65535).all())
    if op.keeps_unit_range:
        assert inside
    else:
        assert case.kind.__name__ in UNBOUNDED or not inside, "a result in [0, 1] takes half of the bytes"
