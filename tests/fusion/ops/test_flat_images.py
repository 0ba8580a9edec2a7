"""Images of one value, such as paper, sky and letterboxes: a rounding error is not stretched to noise."""

from itertools import product

import kornia.augmentation as K
import pytest
import torch
from support import internals
from support.batches.pairwise import pairwise, sweep
from support.comparison.torchvision_replay import both
from support.comparison.values import assert_values
from support.ops.flat_images import FIRST, FORMS, LAST, TO_FLOAT, flat, off
from torchvision.transforms import v2

import gpuaug
from gpuaug.fusion.ops.filters import LEVEL_TOLERANCE

LEVELS = [*range(256), 128, 7]
ALL = list(product(FIRST, LAST, FORMS))
CASES = list(pairwise(ALL))


def worst(number, case):
    """How far an op is off; all levels pass through it in one pipeline or another."""
    return off(*case, flat(LEVELS).roll(11 * number, 0)[:12])


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(", ".join, CASES))
@pytest.mark.every(5)
def test_images_of_one_value_are_so_to_ops_that_measure_them(number):
    assert worst(number, CASES[number]) < 2e-6


@pytest.mark.slow
def test_images_of_one_value_are_so_to_every_composition():
    assert {case: size for number, case in enumerate(ALL) if (size := worst(number, case)) >= 2e-6} == {}


@pytest.mark.parametrize("policy", [v2.TrivialAugmentWide, v2.RandAugment, v2.AutoAugment, v2.AugMix])
def test_policies_leave_paper_and_sky_as_torchvision_does(policy):
    images = flat([255] * 12 + [201, 3, 64] * 8, 40, 40)
    for first in (v2.RandomResizedCrop(24), v2.Resize(23)):
        expected, got = both(v2.Compose([first, policy(), TO_FLOAT]), images)
        # Where a warp blends the black outside with the value, a byte may be rounded to the next and stretched.
        assert_values(got, expected, atol=3.5 / 255, share=0.01)


@pytest.mark.parametrize("names", [["equalize"], ["equalize", "auto_contrast"]], ids=str)
def test_operations_of_kornias_policies_leave_images_of_one_value_so(names):
    """The op that stands for them counts levels with the tolerance that the sharpening before asks for."""
    policy = K.auto.TrivialAugment([[(name, 0, 1)] for name in names])
    augment, images = gpuaug.fuse([K.RandomSharpness(2.0, p=1.0), policy], pick="sample"), flat(LEVELS * 4)
    (part,) = internals.program(augment).ops[1].plan_ops
    assert part.to_levels[1] == LEVEL_TOLERANCE
    got = augment(images, draws=augment.draw(images.shape, seed=0))
    assert (got.amax((2, 3)) - got.amin((2, 3))).max() < 2e-6


@pytest.mark.parametrize(
    ("first", "spread"),
    sweep([v2.RandomResizedCrop(24, antialias=False), v2.Resize(30), v2.CenterCrop(20)], [1, 2, 3, 8]),
    ids=str,
)
def test_few_levels_are_stretched_as_torchvision_stretches_them(first, spread):
    generator = torch.Generator().manual_seed(spread)
    images = torch.randint(0, spread + 1, (32, 3, 6, 6), generator=generator).repeat_interleave(8, 2).repeat_interleave(8, 3)
    images = (images + torch.randint(0, 255 - spread, (32, 3, 1, 1), generator=generator)).to(torch.uint8)
    before, cropped = both(v2.Compose([first, TO_FLOAT]), images)
    expected, got = both(v2.Compose([first, v2.RandomAutocontrast(1.0), TO_FLOAT]), images)
    bytes_before, ours = (before * 255).round(), (cropped * 255 + 0.5 + LEVEL_TOLERANCE).floor()
    # A resize may round a byte to the next one: what is stretched from it is another value.
    alike = ours == bytes_before
    for bound in (torch.amin, torch.amax):
        alike &= bound(ours, (2, 3), keepdim=True) == bound(bytes_before, (2, 3), keepdim=True)
    assert alike.float().mean() > 0.8
    assert_values(got.where(alike, expected), expected, atol=1.001 / 255)
