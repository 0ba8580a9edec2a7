"""Segments of a pipeline: which ops share a plan, which stand alone, and what is kept by image size."""

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from support import internals
from support.comparison.replay import left_to_kornia
from torchvision.transforms import v2

import gpuaug
from gpuaug.fusion.ops.base import ANY_SIDES, Size
from gpuaug.fusion.program import segments as module

SIZE = Size(4, 3, 32, 32)


def segments_of(*modules, **options):
    return internals.program(gpuaug.fuse(list(modules), **options)).segments


def names(segment):
    return [op.name for op in segment.all_ops]


@left_to_kornia
def test_a_module_left_to_kornia_stands_alone_between_two_plans():
    segments = segments_of(K.RandomHorizontalFlip(), K.RandomInvert(), K.RandomMedianBlur(7), K.RandomVerticalFlip())
    found = segments.all_segments(SIZE)
    assert [names(segment) for segment in found] == [
        ["RandomHorizontalFlip_0", "RandomInvert_1"],
        ["RandomMedianBlur_2"],
        ["RandomVerticalFlip_3"],
    ]
    assert [segment.stop for segment in found] == [2, 3, 4]
    assert [segment.plan is None for segment in found] == [False, True, False]


@left_to_kornia
@pytest.mark.parametrize(
    ("modules", "views", "whole"),
    [
        ([K.RandomInvert(), K.RandomGaussianBlur((3, 3), (0.5, 1.0))], 2, True),
        ([K.RandomInvert(), K.RandomMedianBlur(7)], 1, False),
        ([K.RandomMedianBlur(7)], 1, False),
        ([K.RandomInvert(), K.RandomMixUpV2()], 1, True),
        ([K.RandomInvert(), K.RandomMixUpV2()], 2, False),
        ([K.auto.RandAugment(1, 10)], 2, True),
        ([K.ImageSequential(K.RandomInvert(), random_apply=1)], 1, False),
    ],
)
def test_one_plan_runs_everything_unless_something_stands_alone_or_views_would_mix(modules, views, whole):
    segments = segments_of(*modules)
    found = segments.whole_plan(SIZE, masks=False, views=views)
    assert found is (segments.all_segments(SIZE)[0].plan if whole else None)


@left_to_kornia
def test_an_op_stands_alone_for_images_of_an_unsupported_size_only():
    segments = segments_of(K.RandomInvert(), K.RandomGaussianBlur((9, 9), (0.5, 1.0)))
    assert [names(segment) for segment in segments.all_segments(SIZE)] == [["RandomInvert_0", "RandomGaussianBlur_1"]]
    small = segments.all_segments(Size(4, 3, 4, 4))
    assert [names(segment) for segment in small] == [["RandomInvert_0"], ["RandomGaussianBlur_1"]]
    assert small[1].fallback.reason


@left_to_kornia
def test_a_segment_sees_the_size_that_the_one_before_it_gives():
    first, _, last = segments_of(K.CenterCrop((20, 24)), K.RandomMedianBlur(7), K.RandomInvert()).all_segments(SIZE)
    assert (first.plan.source.height, first.plan.out.height, first.plan.out.width) == (32, 20, 24)
    assert (last.plan.source.height, last.plan.source.width) == (20, 24)


@pytest.mark.parametrize(
    ("size", "masks", "same"),
    [
        (Size(9, 3, 32, 32), False, True),
        (Size(4, 3, 32, 33), False, False),
        (Size(4, 1, 32, 32), False, False),
        (Size(4, 3, 32, 32), True, False),
    ],
    ids=["batch size", "width", "channels", "masks"],
)
def test_a_plan_is_kept_by_channels_sides_and_masks(size, masks, same):
    segments = segments_of(K.RandomHorizontalFlip())
    assert (segments.at(0, size, masks=masks) is segments.at(0, SIZE, masks=False)) is same


def test_one_plan_serves_images_that_differ_in_size():
    segments = segments_of(K.RandomResizedCrop((8, 8)), ragged=True)
    two, three = (np.arange(20, 20 + count) for count in (2, 3))
    segment = segments.at(0, Size(2, 3, two, two), masks=False)
    assert segments.at(0, Size(3, 3, three, three), masks=False) is segment
    assert segment.plan.source == Size(1, 3, *ANY_SIDES)


def test_plans_of_many_image_sizes_are_dropped_in_the_end(monkeypatch):
    monkeypatch.setattr(module, "_CACHE_SIZE", 3)
    segments = segments_of(K.RandomHorizontalFlip())
    for side in range(8, 20):
        segments.at(0, Size(1, 3, side, side), masks=False)
        assert len(segments._cached) <= 3


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    "module",
    [
        v2.CenterCrop(-1),
        v2.RandomCrop((4, -3)),
        v2.RandomResizedCrop(-3),
        v2.Resize((-3, 4)),
        v2.Pad(-20),
        v2.FiveCrop(-2),
        K.RandomCrop((-3, 4)),
        K.CenterCrop((3, -1)),
        K.Resize((3, -4)),
        K.PadTo((-3, 4)),
        K.SmallestMaxSize(-2),
    ],
    ids=lambda module: type(module).__name__,
)
def test_output_sides_are_not_negative(module, ragged):
    images = gpuaug.collate_ragged([torch.zeros(3, 16, 16, dtype=torch.uint8)] * 2) if ragged else torch.zeros(2, 3, 16, 16)
    with pytest.raises(gpuaug.ArgumentError, match=type(module).__name__):
        gpuaug.fuse([module], ragged=ragged)(images)
