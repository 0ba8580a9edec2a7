"""RandomIoUCrop: the crop that torchvision takes for the same numbers, and what becomes of images and targets."""

import itertools
import re

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from support import internals
from support.comparison.box_windows import TRANSFORMS, boxes_in, numbers_of, op_of
from support.comparison.replay import photographs
from support.comparison.statistics import apart
from support.comparison.torchvision_replay import BYTES_OFF, scaled
from support.comparison.values import assert_values
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

import gpuaug
from gpuaug.fusion.backends.readers import size_of
from gpuaug.fusion.ops.torchvision.iou_crop import IoUCrop
from gpuaug.fusion.table.on_device import device_crop

KEYS = ["input", "targets"]
RESIZE = v2.Resize((30, 26))


class GivenNumbers:
    """torch's random functions, with the numbers that a sample's trials have; ``option`` is the last one drawn."""

    def __init__(self, op, numbers, width, height):
        numbers = torch.as_tensor(numbers)
        self.shares, self.places = (each[0] for each in op._trials(numbers[None]))
        self.op, self.sides, self.options = op, (width, height), numbers[2:].tolist()
        self.round, self.trial, self.has_sides, self.option = 0, 0, False, None

    def randint(self, low, high, size):
        self.trial, self.has_sides = self.round * self.op.module.trials, False
        self.option = int(np.abs(np.array(self.op.module.options) - self.options[self.round]).argmin())
        self.round += 1
        return torch.tensor([self.option])

    def rand(self, count):
        numbers = (self.places if self.has_sides else self.shares)[:, self.trial]
        if self.has_sides:
            self.has_sides = False
        else:
            its = self.op.module
            shares = its.min_scale + (its.max_scale - its.min_scale) * numbers
            width, height = (int(side * share) for side, share in zip(self.sides, shares, strict=True))
            self.has_sides = its.min_aspect_ratio <= width / height <= its.max_aspect_ratio
        self.trial += not self.has_sides
        return numbers

    def into(self, monkeypatch):
        monkeypatch.setattr(torch, "randint", self.randint)
        monkeypatch.setattr(torch, "rand", self.rand)
        return self


def theirs(transform, boxes, width, height):
    """What torchvision's own ``make_params`` finds: left, top, width, height; and which boxes have their centre within."""
    boxes = tv_tensors.BoundingBoxes(boxes.reshape(-1, 4), format="XYXY", canvas_size=(height, width))
    params = transform.make_params([boxes])
    if not params:
        return [0, 0, width, height], [True] * len(boxes)
    return [params[name] for name in ("left", "top", "width", "height")], params["is_within_crop_area"].tolist()


# In torchvision, the number of rounds is not limited, so that the last round is not one of its rounds.
@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name != "hardly valid"])
def test_crop_is_the_one_that_torchvision_takes_for_the_same_numbers(name, monkeypatch):
    transform = TRANSFORMS[name]()
    op = op_of(transform)
    rng = np.random.default_rng(1)
    sides = torch.tensor(rng.integers(12, 300, (24, 2)), dtype=torch.float32)
    numbers = numbers_of(op, len(sides), seed=3)
    boxes = [boxes_in(*side.tolist(), count=k % 5, seed=k) for k, side in enumerate(sides)]
    owners = torch.arange(len(sides)).repeat_interleave(torch.tensor([len(each) for each in boxes]))
    windows, kept = op.windows(numbers, sides, torch.cat(boxes), owners)
    cropped = 0
    for index, side in enumerate(sides.int().tolist()):
        with monkeypatch.context() as patched:
            GivenNumbers(op, numbers[index], *side).into(patched)
            window, within = theirs(transform, boxes[index], *side)
        assert windows[index].tolist() == window
        assert kept[owners == index].tolist() == within
        cropped += window[2:] != side
    assert 0 < cropped < 24


def test_crop_that_cannot_fit_leaves_the_image_whole():
    op, sides = op_of(v2.RandomIoUCrop(sampler_options=[0.9])), torch.tensor([[40.0, 30.0]] * 4)
    boxes = torch.tensor([[4.0, 4.0, 6.0, 6.0]] * 4)
    windows, kept = op.windows(numbers_of(op, 4, seed=0), sides, boxes, torch.arange(4))
    assert windows.tolist() == [[0, 0, 40, 30]] * 4
    assert kept.all()


@pytest.mark.parametrize(("count", "ours"), [(40, 500), pytest.param(1500, 20_000, marks=pytest.mark.slow)])
def test_crops_have_torchvisions_distribution(count, ours, monkeypatch):
    transform, (width, height) = v2.RandomIoUCrop(), (64, 48)
    op = op_of(transform)
    boxes = torch.tensor([[4.0, 6.0, 50.0, 44.0], [30.0, 2.0, 62.0, 30.0]])
    numbers = numbers_of(op, ours, seed=5)
    owners, sides = torch.arange(ours).repeat_interleave(2), torch.tensor([[float(width), float(height)]])
    windows, _ = op.windows(numbers, sides.repeat(ours, 1), boxes.repeat(ours, 1), owners)
    options, others, drawn = [], [], torch.randint

    def recorded(*args, **options_of_call):
        options.append(int(drawn(*args, **options_of_call)))
        return torch.tensor(options[-1:])

    torch.manual_seed(0)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "randint", recorded)
        for _ in range(count):
            del options[:-1]
            others.append([*theirs(transform, boxes, width, height)[0], options[-1]])
    accepted = []
    for each in numbers[:count]:
        with monkeypatch.context() as patched:
            given = GivenNumbers(op, each, width, height).into(patched)
            theirs(transform, boxes, width, height)
            accepted.append(given.option)
    others = np.array(others)
    for place, name in enumerate(("left", "top", "width", "height")):
        assert apart(windows[:, place].numpy(), others[:, place]) < 1, name
    assert apart(np.array(accepted), others[:, 4]) < 1


ZOOM_OUT = v2.RandomZoomOut({tv_tensors.Image: 51, "others": 0}, (1.0, 2.0))
MODULES = [
    v2.RandomHorizontalFlip(),
    ZOOM_OUT,
    v2.RandomIoUCrop(),
    RESIZE,
    v2.RandomVerticalFlip(),
]
SIDES = [(40, 56), (60, 33), (37, 37), (28, 90), (45, 50), (64, 40), (33, 48), (52, 52)]


def batch_of(ragged):
    """Images and targets: (a batch, images, target dicts)."""
    sides = SIDES if ragged else [SIDES[0]] * len(SIDES)
    images = [photographs(1, 3, *side, seed=seed)[0] for seed, side in enumerate(sides)]
    targets = []
    for seed, (height, width) in enumerate(sides):
        boxes = boxes_in(width, height, seed % 4, seed, least=8).round()
        masks = torch.randint(1, 9, (len(boxes), height, width), generator=torch.Generator().manual_seed(seed))
        targets.append(
            {
                "boxes": tv_tensors.BoundingBoxes(boxes.reshape(-1, 4), format="XYXY", canvas_size=(height, width)),
                "masks": tv_tensors.Mask(masks.to(torch.uint8)),
                "labels": torch.arange(len(boxes)),
            }
        )
    return gpuaug.collate_ragged(images) if ragged else torch.stack(images), images, targets


JUDGE = v2.SanitizeBoundingBoxes(min_size=6.0, min_area=60.0)
PIPELINES = {
    "every time": MODULES,
    "by chance": [
        v2.RandomApply([v2.RandomIoUCrop(sampler_options=[0.3] * 4 + [1.0])], p=0.6),
        v2.RandomHorizontalFlip(),
        RESIZE,
    ],
    "RT-DETR": [
        v2.RandomApply([ZOOM_OUT], p=0.5),
        v2.RandomApply([v2.RandomIoUCrop(sampler_options=[0.3] * 4 + [1.0])], p=0.8),
        JUDGE,
        v2.RandomHorizontalFlip(),
        v2.RandomVerticalFlip(),
        RESIZE,
    ],
}


def through_torchvision(image, target, augment, draws, sample, monkeypatch):
    """What torchvision's transforms make of a sample for its draws."""
    judged = any(getattr(transform, "min_area", None) == JUDGE.min_area for transform in augment.pipeline[0])
    sample_of, sample = sample, (tv_tensors.Image(image), {**target})
    kinds = (tv_tensors.Image, tv_tensors.BoundingBoxes, tv_tensors.Mask)

    def on_all(function, *args, **options):
        image, target = sample
        made = {key: function(value, *args, **options) if isinstance(value, kinds) else value for key, value in target.items()}
        return function(image, *args, fill=51, **options) if "padding" in options else function(image, *args), made

    for op, drawn in zip(internals.program(augment).ops, internals.drawn(draws), strict=True):
        height, width = sample[0].shape[1:]
        if drawn["apply_mask"][sample_of]:
            if isinstance(op.module, v2.RandomHorizontalFlip):
                sample = on_all(functional.horizontal_flip)
            elif isinstance(op.module, v2.RandomVerticalFlip):
                sample = on_all(functional.vertical_flip)
            elif isinstance(op.module, v2.RandomZoomOut):
                scale, left, top = (drawn[name][sample_of] for name in ("scale", "x", "y"))
                right, below = (int(np.float32(side) * np.float32(scale)) - side for side in (width, height))
                sample = on_all(functional.pad, padding=[int(left), int(top), right - int(left), below - int(top)])
            elif isinstance(op, IoUCrop):
                with monkeypatch.context() as patched:
                    GivenNumbers(op, drawn["numbers"][sample_of], width, height).into(patched)
                    sample = op.module(*sample)
            else:
                sample = op.module(*sample)
        if isinstance(op, IoUCrop) and judged:
            sample = JUDGE(*sample)
    return sample


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", PIPELINES)
def test_images_and_targets_are_those_of_torchvision_for_the_same_numbers(name, ragged, monkeypatch):
    augment = gpuaug.fuse([*PIPELINES[name], v2.SanitizeBoundingBoxes()], dtype=torch.float32, ragged=ragged)
    batch, images, targets = batch_of(ragged)
    cropped = dropped = skipped = 0
    draws = augment.draw(batch if ragged else batch.shape, seed=6)
    made, followed = augment(batch, targets, data_keys=KEYS, draws=draws)
    skipped += any((~drawn["apply_mask"]).sum() for drawn in internals.drawn(draws) if "numbers" in drawn)
    for index, (image, target) in enumerate(zip(images, targets, strict=True)):
        expected = through_torchvision(image, target, augment, draws, index, monkeypatch)
        assert_values(made[index], scaled(expected[0]), atol=1e-6, share=BYTES_OFF)
        # A flip of torchvision's takes boxes out of the frame by a rounding error.
        kept = v2.SanitizeBoundingBoxes()(v2.ClampBoundingBoxes()(*expected))[1]
        (got,) = gpuaug.sanitize([followed[index]])
        torch.testing.assert_close(got["boxes"], kept["boxes"], atol=1e-3, rtol=0)
        assert_values(got["labels"], kept["labels"])
        assert_values(got["masks"], kept["masks"])
        gone = followed[index]["boxes"][~followed[index]["valid"]]
        dropped += len(gone)
        cropped += bool(len(kept["labels"])) and not torch.equal(kept["labels"], target["labels"])
        if name == "every time":
            assert (gone[:, 2:] - gone[:, :2] < 1).any(1).all()
    assert cropped > 0 < dropped
    assert skipped or name == "every time"


def test_boxes_are_judged_by_their_size_in_the_crop():
    """Behind a crop they are small, behind the resize large."""
    boxes = torch.tensor([[10.0, 10.0, 15.0, 20.0], [10.0, 10.0, 17.0, 20.0]])
    targets = [{"boxes": boxes, "labels": torch.arange(2)}]
    pipeline = [v2.RandomIoUCrop(sampler_options=[1.0]), JUDGE, v2.Resize((400, 400)), v2.SanitizeBoundingBoxes()]
    _, (found,) = gpuaug.fuse(pipeline)(torch.zeros(1, 3, 40, 40, dtype=torch.uint8), targets, data_keys=KEYS)
    assert found["valid"].tolist() == [False, True]


FILTERS = [v2.SanitizeBoundingBoxes(), v2.SanitizeBoundingBoxes(min_size=20), v2.SanitizeBoundingBoxes(min_area=700)]


@pytest.mark.parametrize("filters", [*itertools.product(FILTERS, repeat=2), *itertools.permutations(FILTERS)])
@pytest.mark.parametrize("between", [[], [v2.RandomHorizontalFlip(0.0)]], ids=["adjacent", "with flips between"])
def test_boxes_pass_every_filter_after_the_crop_as_in_torchvision(between, filters):
    boxes = torch.tensor([[5.0, 5, 10, 10], [5, 5, 50, 50], [5, 5, 30, 30], [5, 5, 20, 55]])
    pipeline = [v2.RandomIoUCrop(sampler_options=[2.0])]  # never crops
    for box_filter in filters:
        pipeline += [box_filter, *between]
    pipeline.append(v2.Resize((60, 60)))
    image = torch.zeros(3, 60, 60, dtype=torch.uint8)
    target = {"boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(60, 60)), "labels": torch.arange(4)}
    _, (got,) = gpuaug.fuse(pipeline)(image[None], [target], data_keys=KEYS)
    assert_values(got["labels"][got["valid"]], v2.Compose(pipeline)(tv_tensors.Image(image), target)[1]["labels"])


def test_boxes_end_at_the_frame_of_the_image_that_is_cropped(monkeypatch):
    middle, transform = v2.CenterCrop((24, 20)), v2.RandomIoUCrop()
    augment, (batch, _, targets) = gpuaug.fuse([middle, transform, RESIZE], dtype=torch.float32), batch_of(False)
    draws = augment.draw(batch.shape, seed=1)
    images, _ = augment(batch, targets, data_keys=KEYS, draws=draws)
    whole, numbers = middle(batch), internals.drawn(draws)[1]["numbers"]
    for index, target in enumerate(targets):
        with monkeypatch.context() as patched:
            GivenNumbers(internals.program(augment).box_crop, numbers[index], 20, 24).into(patched)
            (left, top, width, height), _ = theirs(transform, middle(target["boxes"]), 20, 24)
        expected = functional.resized_crop(whole[index], top, left, height, width, [30, 26], antialias=True)
        assert_values(images[index], scaled(expected), atol=1e-6, share=BYTES_OFF)


AFTER_A_CROP = [v2.RandomResizedCrop((40, 36)), v2.RandomIoUCrop(), RESIZE]


@pytest.mark.parametrize(("modules", "ragged"), [(MODULES, False), (MODULES, True), (AFTER_A_CROP, True)])
def test_call_is_repeated_by_its_draws(modules, ragged):
    augment = gpuaug.fuse(modules, ragged=ragged)
    batch, _, targets = batch_of(ragged)
    for seed in (1, 1):
        torch.manual_seed(seed)
        images, followed = augment(batch, targets, data_keys=KEYS)
        torch.manual_seed(seed)
        draws = augment.draw(batch if ragged else batch.shape)
        again, repeated = augment(batch, targets, data_keys=KEYS, draws=draws)
        assert_values(images, again)
        for one, other in zip(followed, repeated, strict=True):
            torch.testing.assert_close(one["boxes"], other["boxes"], atol=1e-4, rtol=0)
            assert_values(one["valid"], other["valid"])


def test_crop_in_front_is_not_fitted_by_the_device():
    batch, _, _ = batch_of(True)
    planned = internals.program(gpuaug.fuse(AFTER_A_CROP, ragged=True)).segments.at(0, size_of(batch), masks=False).plan
    assert device_crop(planned) is None


def test_views_have_crops_of_their_own():
    augment, (batch, _, targets) = gpuaug.fuse(MODULES, views=2), batch_of(False)
    images, followed = augment(batch, targets, data_keys=KEYS)
    assert images.shape == (2 * len(batch), 3, 30, 26)
    assert not all(torch.equal(one["boxes"], two["boxes"]) for one, two in zip(followed, followed[len(batch) :], strict=False))


CROP_ONLY = [v2.RandomIoUCrop(sampler_options=[0.3] * 9 + [1.0]), RESIZE]
"""Crops nearly all images that have a box to crop."""


@pytest.mark.parametrize("boxes", [[[0, 0, 56, 40]], [[torch.nan, 0, 56, 40]], [[9, 5, 9, 5]], []])
def test_boxes_that_are_none_leave_images_whole(boxes):
    augment, (batch, _, _) = gpuaug.fuse(CROP_ONLY), batch_of(False)
    boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    targets = [{"boxes": boxes, "valid": torch.zeros(len(boxes), dtype=torch.bool)} for _ in batch]
    images, followed = augment(batch, targets, data_keys=KEYS)
    assert_values(images, gpuaug.fuse([RESIZE])(batch))
    assert not any(each["valid"].any() for each in followed)


@pytest.mark.parametrize("target", [{"labels": 3}, {"masks": torch.ones(2, 40, 56)}, {"keypoints": torch.ones(1, 2, 2)}])
def test_targets_without_boxes_leave_images_whole(target):
    augment, (batch, _, _) = gpuaug.fuse(CROP_ONLY), batch_of(False)
    images, _ = augment(batch, [target] * len(batch), data_keys=KEYS)
    assert_values(images, gpuaug.fuse([RESIZE])(batch))


def test_keypoints_go_with_the_crop():
    augment, (batch, _, _) = gpuaug.fuse(CROP_ONLY), batch_of(False)
    box = torch.tensor([[10.0, 8.0, 44.0, 36.0]])
    targets = [{"boxes": box, "keypoints": box.view(1, 2, 2)} for _ in batch]
    _, followed = augment(batch, targets, data_keys=KEYS)
    frame, moved = torch.tensor([26.0, 30.0]), 0
    for each in followed:
        corners = each["keypoints"][0].clamp(min=0).minimum(frame).flatten()
        torch.testing.assert_close(corners, each["boxes"][0], atol=1e-4, rtol=0)
        moved += not torch.allclose(corners, box[0] * torch.tensor([26 / 56, 30 / 40] * 2))
    assert moved > len(batch) // 2


def test_matrix_of_passes_before_the_crop_counts():
    turned, augment = v2.RandomRotation((90, 90)), [*CROP_ONLY, v2.SanitizeBoundingBoxes()]
    batch, targets = photographs(6, 3, 40, 40), [{"boxes": torch.tensor([[2.0, 3.0, 20.0, 15.0]])}] * 6
    whole = gpuaug.fuse([turned, *augment])
    draws = whole.draw(batch.shape, seed=2)
    images, followed = whole(batch, targets, data_keys=KEYS, draws=draws)
    before = torch.rot90(batch, 1, (2, 3)), [{"boxes": torch.tensor([[3.0, 20.0, 15.0, 38.0]])}] * 6
    apart_from_it = gpuaug.fuse([v2.RandomRotation((0, 0)), *augment])
    expected, others = apart_from_it(*before, data_keys=KEYS, draws=apart_from_it.draw(batch.shape, seed=2))
    torch.testing.assert_close(images, expected, atol=1e-4, rtol=0)
    for one, other in zip(followed, others, strict=True):
        torch.testing.assert_close(one["boxes"], other["boxes"], atol=1e-3, rtol=0)


@pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")
def test_boxes_are_where_an_earlier_plan_has_taken_them():
    left = v2.RandomOrder([v2.RandomErasing()] * 5)  # which torchvision runs, between two plans
    modules = [v2.RandomHorizontalFlip(p=1.0), left, v2.RandomIoUCrop(sampler_options=[0.5, 1.0]), RESIZE]
    batch = photographs(16, 3, 40, 56)
    targets = [{"boxes": torch.tensor([[0.0, 8.0, 20.0, 32.0]])} for _ in batch]
    _, followed = gpuaug.fuse(modules)(batch, targets, data_keys=KEYS)
    boxes = torch.cat([each["boxes"] for each in followed])
    shares = (boxes[:, 2:] - boxes[:, :2]).prod(1) / (30 * 26)
    whole = (shares - 20 * 24 / (40 * 56)).abs() < 1e-4
    assert 0 < whole.sum() < len(batch)
    torch.testing.assert_close(boxes[whole, 2], torch.full_like(boxes[whole, 2], 26))
    assert (shares[~whole] > 0.499).all()  # of the window, which overlaps with the box by half at least


BEHIND = (
    "pipeline must only move and recolour pixels until images have one size after RandomIoUCrop_0, got {}: only flips and a "
    "v2.Resize to two sides may follow a crop by boxes. Put v2.Resize((300, 300)) directly after it, or keep RandomIoUCrop_0 "
    "in the dataset."
)
OWN_SIZES = "RandomIoUCrop_0 must be a transform that gpuaug.fuse lowers, as it draws a size per image, got {}. Keep it"
REFUSED = {
    "colour": ([v2.RandomInvert(), RESIZE], BEHIND.format("RandomInvert_1")),
    "flip": ([v2.RandomHorizontalFlip()], "got RandomHorizontalFlip_1 at the end. Put v2.Resize"),
    "one side": ([v2.Resize(30)], BEHIND.format("Resize_1")),
    "Kornia's": ([K.Resize((30, 26))], BEHIND.format("Resize_1")),
    "crop": ([v2.RandomResizedCrop(30)], BEHIND.format("RandomResizedCrop_1")),
    "end": ([], "got RandomIoUCrop_0 at the end. Put v2.Resize((300, 300)) directly after it"),
    "two": (
        [RESIZE, v2.RandomIoUCrop(), RESIZE],
        "pipeline must hold at most one crop by boxes, got RandomIoUCrop_0 and RandomIoUCrop_2. Leave the others out.",
    ),
}


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_crop_is_refused_without_its_resize(name, ragged):
    behind, text = REFUSED[name]
    with pytest.raises(gpuaug.ArgumentError, match=re.escape(text)):
        gpuaug.fuse([v2.RandomIoUCrop(), *behind], ragged=ragged)


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (v2.RandomIoUCrop(max_scale=1.5), "max_scale=1.5, with which crops are larger than the image"),
        (v2.RandomIoUCrop(trials=0), "no trials, or no options"),
    ],
)
def test_setting_that_cannot_be_lowered_is_refused(transform, reason):
    with pytest.raises(gpuaug.ArgumentTypeError, match=re.escape(OWN_SIZES.format(reason))):
        gpuaug.fuse([transform, RESIZE])


def test_explain_lists_the_launches_that_choose_crops():
    explanation = gpuaug.fuse(MODULES).explain((2, 3, 40, 56))
    assert explanation.launches == 1
    text = "RandomIoUCrop_2: about twenty more small launches, which choose crops by boxes (without Triton a hundred)."
    assert explanation.notes == (text,)
