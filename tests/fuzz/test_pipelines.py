"""Whatever is in a sample, others of its batch come out as they would, and errors are ours or name Kornia's module."""

from dataclasses import replace

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from support import internals
from support.comparison.replay import left_to_kornia
from support.ops.fuzzed_pipelines import COORDINATES, batches, fused
from support.ops.random_pipelines import MIXES, RANDOM_STEPS
from support.ops.skipped import VALUES, same_bits, strewn
from support.public.fuzzing import cases, outcome

import gpuaug

pytestmark = [pytest.mark.timeout(1800), left_to_kornia]

RAGGED_SIDES = st.tuples(st.integers(1, 40), st.integers(1, 40)) | st.sampled_from([(1, 1), (1, 300), (2000, 10), (20_000, 1)])
SIZING = (K.RandomResizedCrop, K.Resize, K.CenterCrop, K.RandomCrop, K.PadTo)


def mixed_with(draws, index):
    """Samples that have something of a sample: itself, and those that it was mixed into."""
    found = {index}
    for drawn in (drawn for drawn in internals.drawn(draws) if isinstance(drawn, dict)):
        if "partner" in drawn and drawn["apply_mask"].all():
            found |= {sample for sample, partner in enumerate(drawn["partner"]) if partner in found}
        if "images" in drawn:  # of a mosaic
            found |= {sample for sample, images in enumerate(drawn["images"].tolist()) if found & set(images)}
    return found


@cases(25)
@given(batches(dtype=torch.float32), st.sampled_from(VALUES), st.sampled_from([0.05, 1.0]), st.booleans())
def test_hostile_pixels_stay_in_their_sample_and_skipped_samples_as_they_are(batch, value, share, antialias):
    case, hostile = batch
    augment, images = fused(case, antialias=antialias), case.images()
    others = images.clone()
    others[hostile] = strewn(images[hostile], [value], share)
    draws = outcome(augment.draw, images.shape, seed=case.seed)
    if isinstance(draws, Exception):
        event(f"not drawn: {type(draws).__name__}")
        return
    made, again = outcome(augment, images, draws=draws), outcome(augment, others, draws=draws)
    event(type(made).__name__)
    assert isinstance(made, Exception) == isinstance(again, Exception)
    if isinstance(made, Exception):
        return  # pixels may keep Kornia from getting as far as that error
    for sample in set(range(len(images))) - mixed_with(draws, hostile):
        assert same_bits(made[sample], again[sample])
    for sample in (sample for sample in range(len(images)) if not draws.of(sample)):
        event("skipped")
        assert same_bits(made[sample], images[sample])
        assert same_bits(again[sample], others[sample])


def ragged_image(size, seed):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


@st.composite
def ragged_pipelines(draw):
    """Modules of which the first gives images of any size one size."""
    first = draw(RANDOM_STEPS[draw(st.sampled_from(SIZING))])
    first = replace(first, options={key: 1.0 if key == "p" else value for key, value in first.options.items()})
    kinds = draw(st.lists(st.sampled_from([kind for kind in RANDOM_STEPS if kind not in MIXES]), max_size=3))
    return [first, *(draw(RANDOM_STEPS[kind]) for kind in kinds)]


@cases(20)
@given(
    ragged_pipelines(),
    st.lists(RAGGED_SIDES, min_size=2, max_size=4),
    RAGGED_SIDES,
    st.fixed_dictionaries({"antialias": st.booleans(), "views": st.sampled_from([1, 1, 2])}),
)
def test_images_of_any_size_stay_in_their_sample(steps, sizes, size, options):
    augment = outcome(gpuaug.fuse, [step.make() for step in steps], ragged=True, **options)
    if isinstance(augment, Exception):
        event("not fused")
        return
    images = [ragged_image(each, seed) for seed, each in enumerate(sizes)]
    made = []
    for first in (images[0], ragged_image(size, 99)):
        torch.manual_seed(0)
        made.append(outcome(augment, gpuaug.collate_ragged([first, *images[1:]])))
        event(type(made[-1]).__name__)
        if isinstance(made[-1], Exception):
            return
    one, other = (each.unflatten(0, (options["views"], -1))[:, 1:] for each in made)
    assert same_bits(one, other)


@st.composite
def records(draw, size):
    """A target dict with boxes and points that may be anywhere, or nowhere."""
    count = draw(st.integers(0, 3))

    def numbers(*shape):
        return torch.tensor(draw(st.lists(COORDINATES, min_size=4 * count, max_size=4 * count))).view(count, *shape)

    made = {"boxes": numbers(4), "keypoints": numbers(2, 2), "labels": torch.arange(count)}
    made["valid"] = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=torch.bool)
    made["masks"] = torch.full((count, *size), draw(COORDINATES))
    return {key: made[key] for key in draw(st.sets(st.sampled_from(sorted(made)))) if key != "valid" or "boxes" in made}


@cases(20)
@given(batches(), st.sampled_from(["xyxy", "xywh", "cxcywh", "cxcywh_share"]), st.data())
def test_targets_without_sense_stay_in_their_sample(batch, form, data):
    case, hostile = batch
    case = replace(case, steps=tuple(step for step in case.steps if step.kind not in MIXES) or case.steps)
    augment, images = fused(case, boxes=form), case.images()
    draws = outcome(augment.draw, images.shape, seed=case.seed)
    if isinstance(draws, Exception):
        return
    given_records = [data.draw(records(images.shape[2:])) for _ in images]
    others = list(given_records)
    others[hostile] = data.draw(records(images.shape[2:]))
    keys = ["input", "targets"]
    made, again = (outcome(augment, images, each, data_keys=keys, draws=draws) for each in (given_records, others))
    event(type(made).__name__)
    if isinstance(made, Exception) or isinstance(again, Exception):
        return
    assert same_bits(made[0], again[0])
    for sample, (one, other) in enumerate(zip(made[1], again[1], strict=True)):
        assert sample == hostile or one.keys() == other.keys()
        for key in one if sample != hostile else ():
            torch.testing.assert_close(one[key], other[key], rtol=0, atol=0, equal_nan=True)
        for record in (one, other):
            assert "valid" not in record or "boxes" not in record or record["boxes"][record["valid"]].isfinite().all()
