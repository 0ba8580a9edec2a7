"""Ops that give images a size, skipped by chance: a skipped sample comes out bit for bit as it went in, as in Kornia."""

import re

import kornia.augmentation as K
import pytest
import torch
from support import internals
from support.batches.pairwise import sweep
from support.comparison.replay import as_kornia_takes_them, assert_replays, left_to_kornia, photographs
from support.comparison.values import assert_values
from support.ops.skipped import ANTIALIASED, SKIPPING, fault
from support.targets.detection import annotations, masks

import gpuaug
from gpuaug.fusion.ops.base import ANY_SIDES

SIZE = (32, 48)
BATCH = 6

CROPS = {
    "resized crop": lambda: K.RandomResizedCrop(SIZE),
    "resized crop, squares": lambda: K.RandomResizedCrop(SIZE, align_corners=False),
    "resized crop, nearest": lambda: K.RandomResizedCrop(SIZE, resample="nearest"),
    "resized crop, narrow": lambda: K.RandomResizedCrop(SIZE, scale=(0.9, 1.0), ratio=(3.0, 4.0)),
    "crop": lambda: K.RandomCrop(SIZE),
    "crop, padded": lambda: K.RandomCrop(SIZE, padding=(3, 5, 2, 7), fill=0.25),
    "crop, reflected": lambda: K.RandomCrop(SIZE, padding=7, padding_mode="reflect"),
    "crop, replicated": lambda: K.RandomCrop(SIZE, padding=(2, 9), padding_mode="replicate"),
    "crop, padded if needed": lambda: K.RandomCrop(SIZE, padding=4, pad_if_needed=True),
    "centre": lambda: K.CenterCrop(SIZE),
    "resize": lambda: K.Resize(SIZE),
    "resize, squares": lambda: K.Resize(SIZE, align_corners=False),
    "resize, nearest": lambda: K.Resize(SIZE, resample="nearest"),
    "resize, short side": lambda: K.Resize(SIZE[0]),
    "pad": lambda: K.PadTo(SIZE, pad_value=0.25),
}
MOVING = [name for name in CROPS if name.startswith(("resized", "crop,"))]
"""Those that move pixels of images that have their size."""

KEYS = ["input", "mask", "bbox_xyxy", "keypoints"]


def by_chance(module, by, p, same=False):
    """The module, run with ``p`` for the batch, which is what ``p=`` of all these modules means, or for each sample."""
    setattr(module, "p_batch" if by == "batch" else "p", p)
    module.same_on_batch = same
    return module


def inputs(dtype=torch.uint8, seed=0):
    return (
        photographs(BATCH, 3, *SIZE, dtype=dtype, seed=seed),
        masks(BATCH, 2, *SIZE, seed=seed),
        annotations("bbox_xyxy", BATCH, seed=seed),
        annotations("keypoints", BATCH, seed=seed),
    )


def apply_mask_of(draws):
    return torch.tensor([bool(draws.of(index)) for index in range(len(draws))])


@pytest.mark.parametrize(("name", "by", "p", "same"), sweep(CROPS, ["batch", "sample"], [0.5, 0.0], [False, True]))
@pytest.mark.every(2)
def test_skipped_crops_are_unchanged_and_others_equal_kornia(name, by, p, same):
    pipeline = K.AugmentationSequential(by_chance(CROPS[name](), by, p, same), data_keys=KEYS)
    augment = gpuaug.fuse(pipeline)
    assert "left to Kornia" not in str(augment.explain((BATCH, 3, *SIZE)))
    apply_masks = []
    for seed in range(3, 8 if p else 5):  # where nothing is drawn, seeds change images alone
        given = inputs((torch.uint8, torch.float32)[seed % 2], seed)
        draws = augment.draw(given[0].shape, seed=seed)
        open_ = apply_mask_of(draws)
        apply_masks.append(open_)
        # Kornia moves boxes in place.
        expected = pipeline(as_kornia_takes_them(given[0]), *(each.clone() for each in given[1:]), params=draws.as_kornia())
        got = augment(*given, draws=draws)
        for made, theirs, tolerance in zip(got, expected, (5e-5, 0, 1e-3, 1e-3), strict=True):
            torch.testing.assert_close(made, theirs, atol=tolerance, rtol=1e-6 if tolerance == 1e-3 else 0)
        for made, left in zip(got, (as_kornia_takes_them(given[0]), *given[1:]), strict=True):
            assert_values(made[~open_], left[~open_])
            assert name not in MOVING or not open_.any() or not torch.equal(made[open_], left[open_])
    apply_masks = torch.stack(apply_masks)
    assert apply_masks.any() == (p > 0)
    assert not apply_masks.all()
    assert (apply_masks == apply_masks[:, :1]).all() == (by == "batch" or same or p == 0)


@pytest.mark.parametrize(("by", "p", "same"), sweep(["batch", "sample"], [0.2, 0.5], [False, True]))
def test_crops_change_a_share_p_of_the_samples(p, by, same):
    """In calls, whose draws are made for many batches at once."""
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    augment = gpuaug.fuse(by_chance(K.RandomResizedCrop((8, 8), scale=(0.1, 0.5)), by, p, same))
    calls = 250
    torch.manual_seed(0)
    changed = torch.stack([(augment(images) != images).flatten(1).any(1) for _ in range(calls)]).double()
    alike = by == "batch" or same
    if alike:
        assert_values(changed, changed[:, :1].expand(-1, 4))
    trials = calls * (1 if alike else 4)
    assert abs(changed.mean() - p) < 5 * (p * (1 - p) / trials) ** 0.5


def skipping(p=0.5, **options):
    return by_chance(K.RandomResizedCrop(SIZE, **options), "sample", p)


TOGETHER = {
    "between flips": lambda: [K.RandomHorizontalFlip(), skipping(), K.RandomVerticalFlip()],
    "after a padded crop": lambda: [K.RandomCrop(SIZE, padding=6, fill=0.5), skipping(), K.Normalize(0.5, 0.25)],
    "after one of its own": lambda: [K.RandomResizedCrop(SIZE), skipping(align_corners=False)],
    "after a warp": lambda: [K.RandomRotation(30.0), skipping(), K.RandomErasing()],
    "before a padded crop that is skipped": lambda: [
        skipping(),
        by_chance(K.RandomCrop(SIZE, padding=6, fill=0.5), "sample", 0.5),
    ],
}


@pytest.mark.parametrize("name", TOGETHER)
def test_ops_around_skipped_crops_equal_kornia(name):
    pipeline, images = K.AugmentationSequential(*TOGETHER[name]()), photographs(BATCH, 3, *SIZE)
    for seed in range(4):
        assert_replays(pipeline, images, seed, atol=4e-4 if "warp" in name or "own" in name else 2e-4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("module", [skipping, lambda **options: by_chance(K.Resize(SIZE, **options), "sample", 0.5)])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialias_leaves_skipped_crops_unchanged(mode, module, dtype):
    images = photographs(BATCH, 3, *SIZE, dtype=dtype)
    augment = gpuaug.fuse(module(resample=mode), antialias=True)
    draws = augment.draw(images.shape, seed=1)
    open_, got = apply_mask_of(draws), augment(images, draws=draws)
    assert 0 < open_.sum() < BATCH
    assert_values(got[~open_], as_kornia_takes_them(images)[~open_])
    certain = module(resample=mode)
    certain.p = 1.0
    applied = gpuaug.fuse(certain, antialias=True)
    expected = applied(
        images, draws=type(draws)(draws.shape, internals.program(applied).tree, internals.drawn(draws), internals.sizes(draws))
    )
    assert_values(got[open_], expected[open_])


OTHER = (2, 3, 40, 50)


@pytest.mark.parametrize("name", CROPS)
@left_to_kornia
def test_crops_with_p_that_change_the_size_are_left_to_kornia(name):
    pipeline = K.AugmentationSequential(by_chance(CROPS[name](), "batch", 0.5))
    reason = "left to Kornia: with p=0.5 the size of the output depends on the draw"
    assert reason in str(gpuaug.fuse(pipeline).explain(OTHER))
    shapes = set()
    for seed in range(5):
        got = assert_replays(pipeline, photographs(*OTHER), seed)
        shapes.add(got.shape[2:])
    assert shapes > {OTHER[2:]}


@pytest.mark.parametrize("name", ["resized crop", "crop", "centre", "resize", "pad"])
@left_to_kornia
def test_crops_with_p_that_give_two_sizes_raise_kornias_error(name):
    pipeline = K.AugmentationSequential(by_chance(CROPS[name](), "sample", 0.25))
    augment = gpuaug.fuse(pipeline)
    assert "left to Kornia: with p=0.25 the size of the output depends on the draw" in str(augment.explain(OTHER))
    draws = next(each for seed in range(99) if apply_mask_of(each := augment.draw(OTHER, seed=seed)).sum() == 1)
    with pytest.raises(ValueError, match="skipped rows cannot keep their shape"):
        augment(photographs(*OTHER), draws=draws)


@pytest.mark.parametrize("by", ["batch", "sample"])
@pytest.mark.parametrize("size", [(8, 8), tuple(int(side[0]) for side in ANY_SIDES)], ids=str)
@pytest.mark.parametrize("kind", [K.RandomResizedCrop, K.RandomCrop, K.CenterCrop, K.Resize, K.PadTo])
def test_ragged_pipeline_may_not_begin_with_a_crop_that_may_be_skipped(kind, size, by):
    text = f"got {kind.__name__}_0: with p=0.5 the size of the output depends on the draw. Put a transform"
    with pytest.raises(gpuaug.ArgumentError, match=re.escape(text)):
        gpuaug.fuse([by_chance(kind(size), by, 0.5)], ragged=True)


@pytest.mark.parametrize("name", SKIPPING)
def test_skipped_samples_keep_every_bit(name):
    assert not fault(SKIPPING[name])


@pytest.mark.parametrize("name", ANTIALIASED)
def test_antialias_leaves_every_bit_of_skipped_samples(name):
    assert not fault(ANTIALIASED[name], antialias=True)
