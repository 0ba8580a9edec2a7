"""One form inside: the same targets give the same values in every form, by one list of kinds and few changes of file."""

import ast
import gc
import itertools
import sys
import weakref
from collections import OrderedDict
from itertools import cycle
from pathlib import Path

import kornia.augmentation as K
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.comparison.values import assert_values
from support.messages.finder import nodes, sources
from support.targets.target_records import packed
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug.core import batch as batches
from gpuaug.core.packed_targets import unpack_targets
from gpuaug.core.targets import DATA_KEYS, PER_BOX, TARGET_KEYS

PACKAGE = Path(gpuaug.__file__).parent
SIDES = (20, 28)
KEYS = ("boxes", "masks", "keypoints", "valid")

PIPELINES = {
    "flip": v2.Compose([v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]),
    "crop": v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop((14, 30), padding=4, pad_if_needed=True)]),
    "resized crop, affine": v2.Compose([v2.RandomResizedCrop((16, 18)), v2.RandomAffine(20, (0.1, 0.1))]),
    "Kornia's": K.AugmentationSequential(K.RandomResizedCrop((16, 18)), K.RandomRotation(30.0), K.RandomErasing((0.1, 0.4))),
    "a policy": K.AugmentationSequential(
        K.RandomResizedCrop((14, 30)), K.auto.RandAugment(2, 10, [[("shear_x", -0.3, 0.3)], [("translate_y", -0.4, 0.4)]])
    ),
}


def records_of(counts, sizes, seed):
    """Target dicts of plain tensors, with ``counts`` boxes, masks and pairs of keypoints."""
    numbers = torch.Generator().manual_seed(seed)
    records = []
    for count, size in zip(counts, sizes, strict=True):
        first = torch.rand(count, 2, generator=numbers) * 18 - 2
        boxes = torch.cat((first, first + torch.rand(count, 2, generator=numbers) * 12 + 1), 1)
        masks = torch.randint(0, 9, (count, *size), generator=numbers, dtype=torch.uint8)
        points = torch.rand(count, 2, 2, generator=numbers) * 20
        valid = torch.rand(count, generator=numbers) < 0.7
        records.append(dict(zip(KEYS, (boxes, masks, points, valid), strict=True)))
    return records


def typed(records, box_format="XYXY"):
    made = []
    for record in records:
        canvas = {"canvas_size": record["masks"].shape[1:]}
        boxes = tv_tensors.BoundingBoxes(record["boxes"], format="XYXY", **canvas)
        boxes = v2.functional.convert_bounding_box_format(boxes, new_format=box_format)
        points = tv_tensors.KeyPoints(record["keypoints"], **canvas)
        typed_record = {"boxes": boxes, "masks": tv_tensors.Mask(record["masks"]), "keypoints": points}
        made.append({**record, **typed_record})
    return made


def renamed(records):
    """Other keys, in another container per image."""
    return [
        ({"a": record["boxes"], "valid": record["valid"]}, [record["masks"]], {"c": {"d": record["keypoints"]}})
        for record in records
    ]


def named_again(values):
    return [
        {"boxes": first["a"], "valid": first["valid"], "masks": masks[0], "keypoints": third["c"]["d"]}
        for first, masks, third in values
    ]


def beside_plain_boxes(records):
    """Boxes by key, and masks and keypoints by class under other keys."""
    return [
        {"boxes": plain["boxes"], "valid": plain["valid"], "m": each["masks"], "deep": {"k": each["keypoints"]}}
        for plain, each in zip(records, typed(records), strict=True)
    ]


def named_plain(values):
    return [
        {"boxes": each["boxes"], "valid": each["valid"], "masks": each["m"], "keypoints": each["deep"]["k"]} for each in values
    ]


def corners(values):
    """Target dicts whose boxes are typed as XYWH, as XYXY."""
    convert = v2.functional.convert_bounding_box_format
    return [{**each, "boxes": convert(each["boxes"], new_format="XYXY")} for each in values]


def in_format(boxes, name, size, *, back=False):
    """Corners in another format of plain boxes, or ``back`` to corners."""
    scale = torch.tensor([size[1], size[0]] * 2) if name.endswith("_share") else 1
    names = ["XYXY", name.removesuffix("_share").upper()]
    old, new = reversed(names) if back else names
    converted = v2.functional.convert_bounding_box_format(boxes * scale if back else boxes, old_format=old, new_format=new)
    return converted if back else converted / scale


def as_coco(records, *, back=False):
    """Target dicts with boxes as top left corner, width and height under the key ``bbox``; or ``back``."""
    old, new = ("bbox", "boxes") if back else ("boxes", "bbox")
    boxes = [in_format(record[old], "xywh", SIDES, back=back) for record in records]
    others = [{key: value for key, value in record.items() if key != old} for record in records]
    return [{**record, new: value} for record, value in zip(others, boxes, strict=True)]


def same(values):
    return list(values)


FORMS = {
    "a tuple of dicts": ("targets", tuple, same),
    "COCO's boxes": ("targets", as_coco, lambda made: as_coco(made, back=True)),
    "other mappings": ("targets", lambda records: list(map(OrderedDict, records)), same),
    "typed target dicts": ("targets", typed, same),
    "typed as XYWH": ("targets", lambda records: typed(records, "XYWH"), corners),
    "typed under other keys": ("targets", beside_plain_boxes, named_plain),
    "typed tensors": ("tv_tensors", typed, same),
    "packed dicts": ("targets", packed, unpack_targets),
    "packed typed": ("tv_tensors", lambda records: packed(typed(records)), unpack_targets),
    "other containers": ("tv_tensors", lambda records: renamed(typed(records)), named_again),
}
"""Data key, function from target dicts to the form, and function back. A value of a form holds all targets of an image."""


def assert_records(got, expected, about):
    """Compare target dicts: boxes and keypoints to 1e-4 of a pixel, because formats and pixel centres are converted."""
    for one, other in zip(got, expected, strict=True):
        assert one.keys() == other.keys(), about
        for key, value in one.items():
            tolerance = 0 if key in ("masks", "valid") else 1e-4
            assert_values(value.as_subclass(torch.Tensor), other[key], atol=tolerance, about=f"{about}, {key}")


def without(records, absent):
    """Target dicts without some keys, the same in each view."""
    names = [keys | ({"valid"} if "boxes" in keys else set()) for keys in absent]
    pairs = zip(records, cycle(names), strict=False)
    return [{key: record[key] for key in record if key not in keys} for record, keys in pairs]


def assert_values_of(key, values, expected):
    """Compare a list of the values of one key."""
    assert_records([{key: value} for value in values], [{key: record[key]} for record in expected], f"list of {key}")


def padded(values):
    return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True)


CASES = {
    "name": st.sampled_from(sorted(PIPELINES)),
    "counts": st.lists(st.integers(0, 3), min_size=1, max_size=4),
    "absent": st.lists(st.sets(st.sampled_from(KEYS[:3])), min_size=4, max_size=4),
    "kind": st.sampled_from(["images", "ragged", "clips"]),
    "views": st.integers(1, 2),
    "seed": st.integers(0, 99),
}


def batch_of(kind, batch):
    """(images, sizes): zeros, because only targets are compared."""
    sizes = [(SIDES[0] + 3 * index, SIDES[1] + 2 * index) if kind == "ragged" else SIDES for index in range(batch)]
    images = [torch.zeros(*((2,) if kind == "clips" else ()), 3, *size, dtype=torch.uint8) for size in sizes]
    return gpuaug.collate_ragged(images) if kind == "ragged" else torch.stack(images), sizes


@given(**CASES)
@settings(max_examples=16)
def test_all_forms_of_the_same_targets_give_the_same_values(name, counts, absent, kind, views, seed):
    name = name if kind != "ragged" or name != "flip" else "crop"
    batch, options = len(counts), {"ragged": kind == "ragged", "views": views}
    images, sizes = batch_of(kind, batch)
    records = records_of(counts, sizes, seed)
    augment = gpuaug.fuse(PIPELINES[name], **options)
    draws = augment.draw(images if kind == "ragged" else images.shape, seed=seed)

    def followed(value, key, by=augment):
        return by(images, value, data_keys=["input", key], draws=draws)[1]

    expected = followed(records, "targets")
    assert len(expected) == batch * views
    for form, (key, build, read) in FORMS.items():
        assert_records(read(followed(build(records), key)), expected, form)
    some = followed(without(records, absent[:batch]), "targets")
    assert_records(some, without(expected, absent[:batch]), "some keys")

    # Values of one kind per list
    assert_values_of("masks", followed([record["masks"] for record in records], "mask"), expected)
    for key, values in followed({key: [each[key] for each in typed(records)] for key in KEYS[:3]}, "tv_tensors").items():
        if key != "valid":
            assert_values_of(key, values, expected)

    # Other formats, under two keys
    for form in ("xywh", "cxcywh", "cxcywh_share"):
        keys = ["bbox" if form == "xywh" and index % 2 else "boxes" for index in range(batch)]
        values = [
            {key: in_format(record["boxes"], form, size), "valid": record["valid"]}
            for key, record, size in zip(keys, records, sizes, strict=True)
        ]
        made = followed(values, "targets", gpuaug.fuse(PIPELINES[name], boxes=form, **options))
        for key, got, wanted in zip(keys * views, made, expected, strict=True):
            size = wanted["masks"].shape[1:]
            got = {"boxes": in_format(got[key], form, size, back=True), "valid": got["valid"]}
            assert_records([got], [{key: wanted[key] for key in got}], form)

    # All input boxes are valid in dicts without ``valid``
    unmarked = [{"boxes": each["boxes"]} if keys else each for each, keys in zip(records, absent, strict=False)]
    for got, record, wanted in zip(followed(unmarked, "targets"), records * views, expected, strict=True):
        assert_values(got["valid"] & record["valid"], wanted["valid"])

    # Kornia's data keys. Their coordinates refer to pixel centres, and the last pixel is within the box.
    keys = ["input", "bbox_xyxy", "keypoints"]
    boxes, points = (padded(record[key] - 0.5 for record in records) for key in ("boxes", "keypoints"))
    _, boxes, points = augment(images, boxes, points.flatten(1, 2), data_keys=keys, draws=draws)
    for got, got_points, wanted in zip(boxes + 0.5, points + 0.5, expected, strict=True):
        count = len(wanted["boxes"])
        out = torch.tensor(wanted["masks"].shape[:0:-1] * 2)
        assert_values(got[:count].clamp(min=0).minimum(out), wanted["boxes"], atol=1e-4)
        assert_values(got_points[: 2 * count], wanted["keypoints"].flatten(0, 1), atol=1e-4)
    if kind != "ragged":
        masks = padded(record["masks"] for record in records)
        result = followed(masks[:, None].repeat(1, 2, 1, 1, 1) if kind == "clips" else masks, "mask")
        for got, wanted in zip(result[:, 1] if kind == "clips" else result, expected, strict=True):
            assert_values(got[: len(wanted["masks"])], wanted["masks"])


def flat(clips):
    return [record for clip in clips for record in clip]


FRAMES = 2
FORMS_OF_FRAMES = {
    "a list of all frames": ("targets", flat, same),
    "tuples": ("targets", lambda clips: tuple(map(tuple, clips)), flat),
    "typed": ("targets", lambda clips: list(map(typed, clips)), flat),
    "typed tensors": ("tv_tensors", lambda clips: {"deep": list(map(typed, clips))}, lambda made: flat(made["deep"])),
    "containers": ("tv_tensors", lambda clips: [renamed(typed(c)) for c in clips], lambda made: named_again(flat(made))),
}
"""As ``FORMS``, for a list of target dicts for each clip."""


@given(st.sampled_from(sorted(PIPELINES)), st.integers(1, 3), st.integers(0, 3), st.integers(0, 99))
@settings(max_examples=8)
def test_targets_of_frames_follow_their_clip_in_all_forms(name, batch, count, seed):
    images, _ = batch_of("clips", batch)
    counts = [(count + index) % 4 for index in range(batch * FRAMES)]
    records = records_of(counts, [SIDES] * len(counts), seed)
    clips = [records[start : start + FRAMES] for start in range(0, len(records), FRAMES)]
    augment = gpuaug.fuse(PIPELINES[name])
    draws = augment.draw(images.shape, seed=seed)
    _, made = augment(images, clips, data_keys=["input", "targets"], draws=draws)
    for frame in range(FRAMES):
        one = augment.draw(images[:, 0].shape, seed=seed)
        _, expected = augment(images[:, 0], [clip[frame] for clip in clips], data_keys=["input", "targets"], draws=one)
        assert_records([clip[frame] for clip in made], expected, f"frame {frame}")
    expected = flat(made)
    for form, (key, build, read) in FORMS_OF_FRAMES.items():
        value = build(clips)
        _, got = augment(images, value, data_keys=["input", key], draws=draws)
        assert type(got) is type(value)
        assert_records(read(got), expected, form)


@pytest.mark.parametrize("name", ["flip", "a policy"])
def test_tensors_of_a_call_are_freed_when_it_returns(name):
    """A reference cycle would keep them in memory until Python's garbage collector runs."""
    augment = gpuaug.fuse(PIPELINES[name])

    def references(kind, build, key):
        images, sizes = batch_of(kind, 2)
        value = build(records_of([2, 3], sizes, 0))
        outputs = augment(images, value, data_keys=["input", key])
        return [weakref.ref(leaf) for leaf in batches.tensors(unpack_targets([images, value, outputs]))]

    forms = {**{form: (key, build) for form, (key, build, _) in FORMS.items()}, "dicts": ("targets", same)}
    forms["masks"] = "mask", lambda records: [record["masks"] for record in records]
    forms["maps"] = "tv_tensors", lambda records: {"m": tv_tensors.Mask(torch.zeros(2, *SIDES)), "b": [typed(records)[0]] * 2}
    forms["padded"] = "bbox_xyxy", lambda records: padded(record["boxes"] for record in records)
    forms["labels"] = "class", lambda records: torch.arange(len(records))
    gc.collect()
    gc.disable()
    try:
        for kind in ("images", "clips"):
            for form, (key, build) in forms.items():
                if (kind, form) != ("clips", "maps"):
                    found = references(kind, build, key)
                    assert found
                    assert not [reference for reference in found if reference() is not None], (kind, form)
    finally:
        gc.enable()


def entered(call):
    """(files of gpuaug that a call enters, changes of file), at the fewest of some warm calls: others draw ahead."""
    counts = []
    for _ in range(8):
        files = []

        def note(frame, event, _, files=files):
            if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
                files.append(frame.f_code.co_filename)

        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
        counts.append((len(set(files)), sum(one != other for one, other in itertools.pairwise(files))))
    return min(counts[3:])


def test_call_with_targets_enters_few_files():
    images, masks = torch.zeros(4, 3, *SIDES, dtype=torch.uint8), torch.zeros(4, 1, *SIDES, dtype=torch.uint8)
    records = [{"boxes": torch.ones(5, 4), "labels": torch.arange(5)} for _ in range(4)]
    boxes = [tv_tensors.BoundingBoxes(torch.ones(5, 4), format="XYXY", canvas_size=SIDES) for _ in range(4)]
    typed_records = [{**record, "boxes": each} for record, each in zip(records, boxes, strict=True)]
    augment = gpuaug.fuse([v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])
    calls = {
        "images": lambda: augment(images),
        "masks": lambda: augment(images, masks, data_keys=["input", "mask"]),
        "target dicts": lambda: augment(images, records, data_keys=["input", "targets"]),
        "typed tensors": lambda: augment(images, typed_records),
    }
    most = {"images": (18, 49)}
    for name, call in calls.items():
        files, changes = entered(call)
        most_files, most_changes = most.get(name, (23, 75))
        assert files <= most_files, name
        assert changes <= most_changes, name


def test_keys_of_targets_are_listed_once():
    """No literal beside the table names two keys of targets."""
    keys = {*TARGET_KEYS, *DATA_KEYS, *PER_BOX}
    lists = []
    for path, tree in sources("gpuaug"):
        if path.as_posix().endswith("core/targets.py") or "backends/triton" in path.as_posix():  # names of arguments
            continue
        for node in nodes(tree):
            elements = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
            names = {element.value for element in elements if isinstance(element, ast.Constant)} & keys
            if len(names) > 1:
                lists.append(f"{path}:{node.lineno} {sorted(names)}")
    assert not lists
