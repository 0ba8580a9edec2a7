"""Combined images: validity of objects at the limit of one tenth, draws ahead, and host time."""

import sys
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.comparison.values import assert_values
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug import ArgumentError, ArgumentTypeError, CopyPaste, MixUpBoxes, Mosaic
from gpuaug.core import targets as targets_of_dicts
from gpuaug.core.packed_targets import pack_targets, unpack_targets
from gpuaug.core.rng import next_seed
from gpuaug.core.targets import PackedTargets
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.combine_ops import MosaicOp

KEYS = ["input", "targets"]

JUST_BELOW, JUST_ABOVE = [0, 1.9, 40, 22], [0, 2.1, 40, 22]
"""XYXY boxes with 0.0995 and 0.1005 of their area below row 20."""


def mosaic(run):
    """Return the target dict of a mosaic that does not show the 20 upper rows of its first image."""
    images = [torch.zeros(3, 40, 40, dtype=torch.uint8)] * 4
    targets = [{"boxes": torch.tensor(boxes).view(-1, 4)} for boxes in ([JUST_BELOW, JUST_ABOVE], [], [], [])]
    numbers = {"applies": True, "y": 20.0, "x": 40.0}
    if run == "eager":
        return Mosaic(80)(images, targets, draws={"Mosaic": numbers})[1]
    augment = gpuaug.fuse(Mosaic(80))
    draws = augment.draw((1, 3, 40, 40))
    draws = replace(draws, _drawn=({name: np.array([[number]]) for name, number in numbers.items()} | {"apply_mask": [True]},))
    return augment([image[None] for image in images], [targets], data_keys=KEYS, draws=draws)[1][0]


@pytest.mark.parametrize("run", ["eager", "fused"])
def test_boxes_of_a_mosaic_are_valid_from_one_tenth_of_their_area_on(run):
    target = mosaic(run)
    assert target["boxes"].tolist() == [[0, 0, 40, 2]] * 2
    assert target["valid"].tolist() == [False, True]


@pytest.mark.parametrize("run", ["eager", "fused"])
@pytest.mark.parametrize(("seen", "valid"), [(98, False), (99, False), (100, True), (101, True)])
def test_objects_under_pasted_ones_are_valid_from_one_tenth_of_their_pixels_on(run, seen, valid):
    images = torch.zeros(2, 1, 1, 1000, dtype=torch.uint8)
    masks = torch.ones(2, 1, 1, 1000, dtype=torch.bool)
    masks[1, :, :, :seen] = False
    targets = [{"boxes": torch.zeros(1, 4), "masks": mask} for mask in masks]
    if run == "eager":
        records = [CopyPaste()([*images], targets)[1] for _ in range(20)]
    else:
        batch = [image.expand(20, 1, 1, 1000) for image in images]
        records = gpuaug.fuse(CopyPaste())(batch, [targets] * 20, data_keys=KEYS)[1]
    pasted = [record for record in records if record["masks"][1].any()]
    assert 0 < len(pasted) < 20
    for record in pasted:
        assert record["masks"].sum((1, 2)).tolist() == [seen, 1000 - seen]
        assert record["valid"].tolist() == [valid, True]
        assert record["boxes"].tolist() == [[0, 0, seen * valid, valid], [seen, 0, 1000, 1]]
    assert all(record["valid"].tolist() == [True, False] for record in records if not record["masks"][1].any())


def prepared(batch, *transforms):
    """A fused pipeline, and packed inputs of four images of 8x8 pixels per sample."""
    images = [torch.zeros(batch, 3, 8, 8, dtype=torch.uint8) for _ in range(4)]
    targets = [[{"boxes": torch.tensor([[1.0, 1, 7, 7]]), "labels": torch.ones(1)} for _ in range(4)] for _ in range(batch)]
    packed = pack_targets({"target": targets}, lambda shape, dtype: None)["target"]
    return gpuaug.fuse(list(transforms)), images, packed


@pytest.mark.parametrize("has_targets", [False, True])
def test_crops_of_combined_images_are_views(has_targets):
    augment, images, packed = prepared(3, Mosaic(16), v2.RandomRotation(30), v2.FiveCrop(8))
    images = [torch.randint_like(image, 256) for image in images]
    inputs = [images, packed.unpacked()] if has_targets else [images]
    keys = KEYS[: len(inputs)]
    torch.manual_seed(3)
    seeds = [next_seed() for _ in range(5)]
    torch.manual_seed(3)
    results = [augment(*inputs, data_keys=keys) for _ in seeds]  # all but the first are drawn ahead
    for seed, result in zip(seeds, results, strict=True):
        expected = augment(*inputs, data_keys=keys, draws=augment.draw((3, 3, 8, 8), seed))
        if has_targets:
            (result, targets), (expected, expected_targets) = result, expected
            assert len(targets) == len(expected_targets) == 5 * 3
            for target, other in zip(targets, expected_targets, strict=True):
                assert_values(target["boxes"], other["boxes"])
        assert len(result) == 5 * 3
        assert_values(result, expected)


@pytest.mark.parametrize("p", [1, 0.6])
@pytest.mark.parametrize("has_targets", [False, True])
def test_draws_ahead_are_the_draws_of_the_seeds(has_targets, p, monkeypatch):
    augment, images, packed = prepared(3, Mosaic(16, p=p), v2.RandomHorizontalFlip())
    images = [torch.randint_like(image, 256) for image in images]
    inputs = [images, packed] if has_targets else [images]
    keys = KEYS[: len(inputs)]
    torch.manual_seed(3)
    seeds = [next_seed() for _ in range(12)]
    counts = []
    draw = MosaicOp.draw_parameters
    monkeypatch.setattr(MosaicOp, "draw_parameters", lambda *arguments: counts.append(arguments[1].samples) or draw(*arguments))
    torch.manual_seed(3)
    results = [augment(*inputs, data_keys=keys) for _ in range(12)]
    # The draws of 1, 2, 4 and 8 calls are made at once.
    assert [count for count in counts if count >= 3] == [3, 6, 12, 24]
    for seed, result in zip(seeds, results, strict=True):
        expected = augment(*inputs, data_keys=keys, draws=augment.draw((3, 3, 8, 8), seed))
        if has_targets:
            (result, targets), (expected, expected_targets) = result, expected
            for target, other in zip(targets.unpacked(), expected_targets.unpacked(), strict=True):
                assert target["valid"].tolist() == other["valid"].tolist()
                assert_values(target["boxes"], other["boxes"], atol=1e-3)
        assert_values(result, expected)


class Operations(TorchDispatchMode):
    """Number of operations of torch."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def host_work(batch, form, *transforms):
    """Numbers of calls in Python, and of operations of torch, of a mosaic with target dicts."""
    augment, images, targets = prepared(batch, Mosaic(16), *transforms)
    if form == "lists":
        targets = unpack_targets(targets)
    for _ in range(3):
        augment(images, targets, data_keys=KEYS)
    calls = 0

    def called(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        augment(images, targets, data_keys=KEYS)
    finally:
        sys.setprofile(None)
    with Operations() as operations:
        augment(images, targets, data_keys=KEYS)
    return calls, operations.count


@pytest.mark.parametrize("transforms", [[], [v2.RandomHorizontalFlip()]])
@pytest.mark.parametrize(("form", "most_calls"), [("packed", 0), ("lists", 2.5)])
def test_host_work_hardly_grows_with_the_batch(form, most_calls, transforms, monkeypatch):
    monkeypatch.setattr(dispatch, "write_tiles", lambda *arguments, **options: None)
    monkeypatch.setattr(dispatch, "run", lambda plan, images, *arguments: images)
    calls, operations = host_work(40, form, *transforms)
    few_calls, few_operations = host_work(4, form, *transforms)
    assert calls - few_calls <= most_calls * 4 * (40 - 4), "calls per target dict"
    assert few_calls < 1800
    assert operations == few_operations


@pytest.mark.parametrize(
    ("arguments", "has_pass"),
    [
        ({"pipeline": [Mosaic(16)]}, False),
        ({"pipeline": [Mosaic(16), gpuaug.MixUpBoxes(), v2.Identity()]}, False),
        ({"pipeline": [Mosaic(16), v2.RandomHorizontalFlip(0.0)]}, True),
        ({"pipeline": [Mosaic(16), v2.ToDtype(torch.float32, scale=True)]}, True),
        ({"pipeline": [Mosaic(16), v2.SanitizeBoundingBoxes(min_size=3)]}, True),
        ({"pipeline": [Mosaic(16)], "dtype": torch.float16}, True),
        ({"pipeline": [Mosaic(16)], "memory_format": torch.channels_last}, True),
    ],
)
def test_combined_images_that_nothing_follows_need_no_pass(arguments, has_pass, monkeypatch):
    runs = []
    run = dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda *arguments: runs.append(1) or run(*arguments))
    count = 8 if len(arguments["pipeline"]) > 2 else 4
    images = [torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8) for _ in range(count)]
    targets = [[{"boxes": torch.tensor([[1.0, 1, 7, 7]]), "labels": torch.ones(1)} for _ in images] for _ in range(2)]
    augment = gpuaug.fuse(**arguments)
    results = [augment(images, targets, data_keys=KEYS) for _ in range(2)] + [augment(images)]
    assert bool(runs) == has_pass
    passes = [line for line in augment.explain((2, 3, 8, 8)).lines if "read" in line.what or "flip" in line.what]
    assert bool(passes) == has_pass
    for result, target in results[:2]:
        assert result.shape == results[2].shape == (2, 3, 16, 16)
        assert [record.keys() for record in target] == [{"boxes", "labels", "valid", *(["weight"] if count == 8 else [])}] * 2


PER_BOX = {
    "labels": torch.zeros(3, dtype=torch.int64),
    "labels of another dtype": torch.zeros(3),
    "masks": torch.zeros(3, 30, 40, dtype=torch.bool),
    "keypoints": torch.zeros(3, 5, 2),
    "area": torch.zeros(3),
    "names": ["a", "b", "c"],
    "mask_of_torchvision": tv_tensors.Mask(torch.zeros(3, 30, 40, dtype=torch.bool)),
}
"""Key → value for three boxes. One entry or all of them are then removed."""


MOSAIC = Mosaic(64)
FUSED_MOSAIC = gpuaug.fuse(MOSAIC)


def combined(run, targets):
    """Target dict of the mosaic of one sample."""
    images = [torch.zeros(3, 30, 40, dtype=torch.uint8) for _ in targets]
    if run == "eager":
        return MOSAIC(images, targets)[1]
    samples = [deepcopy(targets) for _ in range(8)]  # a tensor that occurs twice is not packed, nor are a few tensors
    if run == "packed":
        samples = pack_targets({"target": samples}, lambda shape, dtype: None)["target"]
        assert isinstance(samples, PackedTargets)
    batches = [image.expand(8, -1, -1, -1) for image in images]
    return unpack_targets(FUSED_MOSAIC(batches, samples, data_keys=KEYS))[1][0]


@pytest.mark.parametrize("run", ["eager", "fused", "packed"])
@pytest.mark.parametrize("key", PER_BOX)
def test_a_key_with_another_number_of_entries_than_boxes_is_refused(run, key):
    name, value = key.partition(" ")[0], PER_BOX[key]
    whole = {"boxes": torch.tensor([[1.0, 2, 20, 22]] * 3), "labels": torch.arange(3), name: value}
    targets = [deepcopy(whole) for _ in range(4)]
    combined(run, targets)
    for count in (0, 2):
        targets[1][name] = tv_tensors.wrap(value[:count], like=value) if isinstance(value, Tensor) else value[:count]
        with pytest.raises(ArgumentError, match=rf"{name} of image 1 of sample 0 must have one entry per box, 3, got {count}"):
            combined(run, targets)
    for single in (1, "a", torch.tensor(1), np.array(1)) if name in targets_of_dicts.PER_BOX else ():
        targets[1][name] = single
        with pytest.raises(ArgumentError, match=rf"{name} of image 1 .* must have one entry per box, 3, got a single value"):
            combined(run, targets)
    targets[1] = {name: value for name, value in whole.items() if name != "boxes"}
    with pytest.raises(ArgumentError, match=r"of image 1 of sample 0 must have one entry per box, 0, got 3"):
        combined(run, targets)


@pytest.mark.parametrize("run", ["eager", "fused", "packed"])
@pytest.mark.parametrize("convert", [torch.tensor, list, np.array])
def test_labels_are_found_by_the_rule_of_sanitize(run, convert):
    targets = [{"boxes": torch.tensor([[1.0, 2, 20, 22]] * n).view(-1, 4), "gt_labels": convert([n] * n)} for n in (3, 0, 1, 2)]
    labels = combined(run, targets)["gt_labels"]
    assert [*map(int, labels)] == [3, 3, 3, 1, 2, 2]
    for target in targets:
        target["gt_labels"] = convert([7, 8])
    assert [*map(int, combined(run, targets)["gt_labels"])] == [7, 8], "a value of the image"


COUNTS = (1, 2, 0, 1)
"""Number of boxes of each image."""

WHOLE = {
    "labels": torch.tensor([3, 4]),
    "ids": torch.tensor([900100581904, 900100581905]),  # not representable in float32
    "area": torch.tensor([0.5, 1.5], dtype=torch.float64),
    "masks": torch.ones(2, 30, 40, dtype=torch.bool),
    "masks of torchvision": tv_tensors.Mask(torch.ones(2, 30, 40, dtype=torch.bool)),
    "names": ["a", "b"],
    "scores": np.array([0.1, 0.9]),
    "track_ids": np.array([900100581904, 900100581905]),
}
"""Key → value for two boxes."""

NOTHING = {
    "tensor": torch.tensor([]),
    "list": [],
    "array": np.zeros(0),
    "mask": tv_tensors.Mask(torch.zeros(0, 30, 40, dtype=torch.bool)),
    "masks": torch.zeros(0, 30, 40, dtype=torch.bool),
}
"""Values of an image without boxes, as data sets return them."""


def differing(name, value, nothing):
    """Target dicts with ``COUNTS`` boxes, in which an image without boxes has the value ``nothing``."""
    boxes = torch.tensor([[1.0, 2, 20, 22], [3, 4, 30, 24]])
    return [{"boxes": boxes[:count], name: deepcopy(value[:count] if count else nothing)} for count in COUNTS]


@pytest.mark.parametrize("run", ["eager", "fused", "packed"])
@pytest.mark.parametrize(
    ("key", "nothing"),
    [(key, nothing) for key in WHOLE for nothing in NOTHING if key.startswith("masks") == nothing.startswith("mask")],
)
def test_a_value_without_entries_does_not_decide_on_the_type(run, key, nothing):
    name, value = key.partition(" ")[0], WHOLE[key]
    got = combined(run, differing(name, value, NOTHING[nothing]))[name]
    if name == "masks":
        assert got.shape == (4, 64, 64)
    else:
        wanted = [entry for count in COUNTS for entry in value[:count]]
        assert type(got) is type(value)
        assert getattr(got, "dtype", None) == getattr(value, "dtype", None)
        assert all(np.array_equal(entry, other) for entry, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("run", ["eager", "fused", "packed"])
@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("ids", [3, 4]),
        ("ids", np.array([3, 4])),
        ("ids", torch.tensor([3.0, 4.0])),
        ("track_ids", np.array([3.0, 4.0])),
        ("track_ids", [3, 4]),
    ],
    ids=str,
)
def test_entries_of_different_types_are_refused(run, key, other):
    targets = differing(key, WHOLE[key], other[:0])
    targets[1][key] = other
    with pytest.raises(ArgumentError, match=rf"{key} must have the same type in all images of a sample, got .* of .*int64 and"):
        combined(run, targets)


@pytest.mark.parametrize("run", ["fused", "packed"])
def test_a_key_that_only_its_numbers_show_to_have_one_entry_per_box_is_refused(run):
    targets = differing("poses", torch.rand(2, 3), torch.rand(0, 3))
    assert len(combined("eager", targets)["poses"]) == 1, "in four images, equal numbers may be a coincidence"
    with pytest.raises(ArgumentError, match=r"'poses' must be a key that is known .* Rename it to such a key, for inst"):
        combined(run, targets)
    renamed = [{"boxes": target["boxes"], "ids": target["poses"]} for target in targets]
    assert_values(combined(run, renamed)["ids"], torch.cat([target["poses"] for target in targets]))


@pytest.mark.parametrize("run", ["eager", "fused"])
@pytest.mark.parametrize("form", [torch.tensor, list, np.array], ids=["tensor", "list", "array"])
@pytest.mark.parametrize("objects", ["boxes", "boxes of two dtypes", "boxes of torchvision", "labels"])
def test_objects_have_the_weight_of_their_image(run, form, objects):
    boxes = torch.tensor([[1.0, 2, 20, 22], [3, 4, 30, 24]])
    targets = []
    for count in (1, 2):
        target = {"boxes": boxes[:count].double() if objects.endswith("dtypes") and count == 2 else boxes[:count]}
        if objects.endswith("torchvision"):
            target = {"found": tv_tensors.BoundingBoxes(boxes[:count], format="XYXY", canvas_size=(30, 40))}
            target["keypoints"] = torch.zeros(5, 2)  # of the image
        if objects == "labels":
            target = {"labels": torch.arange(count)}
        targets.append(target)
    images = [torch.zeros(3, 30, 40, dtype=torch.uint8)] * 2
    numbers = {"applies": True, "weight": 0.25}
    for weights in (None, [None, None], [[0.5], [1.0, 2.0]]):
        for target, values in zip(targets, weights or (), strict=False):
            target["weight"] = None if values is None else form(values)
        if run == "eager":
            got = MixUpBoxes()(images, targets, draws={"MixUpBoxes": numbers})[1]["weight"]
        else:
            augment = gpuaug.fuse(MixUpBoxes())
            draws = augment.draw((1, 3, 30, 40))
            drawn = {name: np.array([[number]]) for name, number in numbers.items()} | {"apply_mask": [True]}
            draws = replace(draws, _drawn=(drawn,))
            got = augment([image[None] for image in images], [deepcopy(targets)], data_keys=KEYS, draws=draws)[1][0]["weight"]
        assert got.tolist() == ([0.125, 0.75, 1.5] if weights and weights[0] else [0.25, 0.75, 0.75])
        assert got.dtype == (torch.float64 if form is np.array and weights and weights[0] else torch.float32)
    for wrong in (torch.ones(1, 1), ["a"], [None], [[1.0]], np.array(["a"])):
        targets[0]["weight"] = wrong
        with pytest.raises(ArgumentError, match=r"weight must be one number per object, \(n,\), got "):
            MixUpBoxes()(images, targets)


def test_entries_of_different_shapes_are_refused():
    targets = [{"boxes": torch.tensor([[1.0, 2, 20, 22]]), "keypoints": torch.zeros(1, 5 + index % 2, 2)} for index in range(4)]
    with pytest.raises(ArgumentError, match="keypoints of the images of a sample must have one shape after the first axis"):
        combined("eager", targets)


@pytest.mark.parametrize("run", ["eager", "fused", "packed"])
def test_values_of_an_image_need_not_have_one_entry_per_box(run):
    targets = [
        {
            "boxes": torch.tensor([[1.0, 2, 20, 22]] * count).view(-1, 4),
            "keypoints": torch.rand(5, 2),  # points, of no object
            "segmentation": None,
            "image_id": count,
            "orig_id": torch.tensor(count),
            "size": torch.tensor([30, 40, 3]),
        }
        for count in (3, 0, 1, 2)
    ]
    target = combined(run, targets)
    assert [len(target[key]) for key in ("boxes", "valid", "keypoints", "size")] == [6, 6, 20, 3]
    assert (target["orig_id"], target["image_id"]) == (3, 3)


@pytest.mark.parametrize(
    "image", [b"file", np.zeros((3, 8, 8)), torch.zeros(8, 8), torch.zeros(1, 3, 8, 8), torch.zeros(3, 0, 8)]
)
def test_images_of_a_module_are_tensors_with_pixels(image):
    with pytest.raises(ArgumentTypeError, match=r"images must be tensors \(C, H, W\) with pixels for Mosaic, .* at index 3"):
        MOSAIC([torch.zeros(3, 8, 8)] * 3 + [image])


@pytest.mark.parametrize("p", [0, 0.5, 1])
@pytest.mark.parametrize("next_p", [0, 0.5, 1])
@pytest.mark.parametrize("first", [Mosaic, MixUpBoxes, CopyPaste])
def test_only_visible_images_are_written(first, p, next_p, monkeypatch):
    """Images that no result shows have no pixels in memory if only windows are decoded."""
    arguments = (32,) if first is Mosaic else ()
    transforms = [first(*arguments, p=p), MixUpBoxes(p=next_p) if first is Mosaic else Mosaic(32, p=next_p)]
    batch, group, groups = 6, transforms[0].op_class.count, transforms[1].op_class.count
    augment = gpuaug.fuse(transforms)
    draws = augment.draw((batch, 3, 16, 16), seed=3)
    applies, next_applies = (op_draws["applies"] for op_draws in draws._drawn[:2])
    visible = {
        (sample * groups + canvas) * group + image
        for sample, canvas, image in np.ndindex(batch, groups, group)
        if (canvas == 0 or next_applies[sample, 0]) and (image == 0 or applies[sample, canvas])
    }
    tables, write_tiles = [], dispatch.write_tiles

    def recording(out, pixels, tiles, *arguments, **options):
        if pixels.channels == 3:
            tables.append(tiles[:, 11])
        write_tiles(out, pixels, tiles, *arguments, **options)

    monkeypatch.setattr(dispatch, "write_tiles", recording)
    images = [torch.zeros(batch, 3, 16, 16, dtype=torch.uint8)] * (group * groups)
    target = {"boxes": torch.tensor([[2.0, 2, 9, 9]]), "masks": torch.ones(1, 16, 16, dtype=torch.bool)}
    augment(images, [[target] * (group * groups)] * batch, data_keys=KEYS, draws=draws)
    calls_of_first = 1 if first is Mosaic else 2
    assert set(np.concatenate(tables[:calls_of_first]).tolist()) == visible
