"""One form inside: the same targets give the same values in every form, by one list of kinds and few changes of file."""

import ast
import itertools
import sys
from pathlib import Path

import kornia.augmentation as K
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.comparison.values import assert_values
from support.messages.finder import nodes, sources
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug.core import packed_targets
from gpuaug.core.packed_targets import pack_targets, unpack_targets
from gpuaug.core.targets import DATA_KEYS, PER_BOX, TARGET_KEYS, PackedTargets

PACKAGE = Path(gpuaug.__file__).parent
SIDES = (20, 28)
NUMBER = 3
"""Boxes of each image, so that they fit into padded tensors without padding."""

PIPELINES = {
    "flip": v2.Compose([v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]),
    "crop": v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop((14, 30), padding=4)]),
    "resized crop, affine": v2.Compose([v2.RandomResizedCrop((16, 18)), v2.RandomAffine(20, (0.1, 0.1))]),
    "Kornia's": K.AugmentationSequential(K.RandomResizedCrop((16, 18)), K.RandomRotation(30.0), K.RandomErasing((0.1, 0.4))),
    "a policy": K.AugmentationSequential(
        K.RandomCrop((14, 30), padding=4), K.auto.RandAugment(2, 10, [[("shear_x", -0.3, 0.3)], [("translate_y", -0.4, 0.4)]])
    ),
}


def targets_of(batch, seed):
    """(boxes XYXY, masks, points, flags of valid boxes), each of all images."""
    numbers = torch.Generator().manual_seed(seed)
    first = torch.rand(batch, NUMBER, 2, generator=numbers) * 18 - 2
    boxes = torch.cat((first, first + torch.rand(batch, NUMBER, 2, generator=numbers) * 12 + 1), 2)
    masks = torch.randint(0, 9, (batch, NUMBER, *SIDES), generator=numbers, dtype=torch.uint8)
    return boxes, masks, torch.rand(batch, NUMBER, 2, 2, generator=numbers) * 20, torch.rand(batch, NUMBER) < 0.7


def dicts(boxes, masks, points, valid):
    names = ("boxes", "masks", "keypoints", "valid")
    return [dict(zip(names, values, strict=True)) for values in zip(boxes, masks, points, valid, strict=True)]


def typed(records):
    return [
        {
            "boxes": tv_tensors.BoundingBoxes(record["boxes"], format="XYXY", canvas_size=SIDES),
            "masks": tv_tensors.Mask(record["masks"]),
            "keypoints": tv_tensors.KeyPoints(record["keypoints"], canvas_size=SIDES),
            "valid": record["valid"],
        }
        for record in records
    ]


def packed(records):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_targets, "MIN_PACKED_TENSORS", 1)
        made = pack_targets([records], lambda shape, dtype: None)[0]
    assert type(made) is PackedTargets
    return made


def stacked(records):
    """(boxes, masks, points, flags) of dicts, as plain tensors of all images."""
    plain = [{name: value.as_subclass(torch.Tensor) for name, value in record.items()} for record in records]
    return [torch.stack([record[name] for record in plain]) for name in ("boxes", "masks", "keypoints", "valid")]


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


FORMS = {
    "target dicts": (dicts, "targets", stacked),
    "typed target dicts": (lambda *values: typed(dicts(*values)), "targets", stacked),
    "typed tensors": (lambda *values: typed(dicts(*values)), "tv_tensors", stacked),
    "a tuple of dicts": (lambda *values: tuple(dicts(*values)), "targets", stacked),
    "packed dicts": (lambda *values: packed(dicts(*values)), "targets", lambda made: stacked(unpack_targets(made))),
    "packed typed": (lambda *v: packed(typed(dicts(*v))), "tv_tensors", lambda made: stacked(unpack_targets(made))),
    "other containers": (lambda *v: renamed(typed(dicts(*v))), "tv_tensors", lambda made: stacked(named_again(made))),
}


def in_format(boxes, name, size, *, back=False):
    """Corners in another format of plain boxes, or ``back`` to corners."""
    scale = torch.tensor([size[1], size[0]] * 2) if name.endswith("_share") else 1
    names = ["XYXY", name.removesuffix("_share").upper()]
    old, new = reversed(names) if back else names
    converted = v2.functional.convert_bounding_box_format(boxes * scale if back else boxes, old_format=old, new_format=new)
    return converted if back else converted / scale


@given(st.sampled_from(sorted(PIPELINES)), st.integers(1, 4), st.integers(0, 99), st.booleans(), st.booleans())
@settings(max_examples=16)
def test_all_forms_of_the_same_targets_give_the_same_values(name, batch, seed, is_ragged, of_clips):
    boxes, masks, points, valid = targets_of(batch, seed)
    augment = gpuaug.fuse(PIPELINES[name], ragged=is_ragged and name != "flip")
    images = torch.zeros(batch, *((2,) if of_clips else ()), 3, *SIDES, dtype=torch.uint8)
    if is_ragged and name != "flip":
        images = gpuaug.collate_ragged(list(images))
    draws = augment.draw(images if isinstance(images, gpuaug.Ragged) else images.shape, seed=seed)
    results = {}
    for form, (build, key, read) in FORMS.items():
        values = build(boxes, masks, points, valid)
        results[form] = read(augment(images, values, data_keys=["input", key], draws=draws)[1])
    _, mask_list = augment(images, list(masks), data_keys=["input", "mask"], draws=draws)
    # Coordinates of Kornia's keys refer to pixel centres, and the last pixel is within the box.
    centred = boxes - torch.tensor([0.5, 0.5, 0.5, 0.5])
    keys = ["input", "bbox_xyxy", "keypoints"]
    _, padded, padded_points = augment(images, centred, points.flatten(1, 2) - 0.5, data_keys=keys, draws=draws)
    expected = results["target dicts"]
    for form, values in results.items():
        for one, other in zip(values, expected, strict=True):
            assert_values(one, other, about=form)
    assert_values(torch.stack(mask_list), expected[1])
    for form in ("xywh", "cxcywh", "cxcywh_share"):
        key = "bbox" if form == "xywh" else "boxes"
        other = gpuaug.fuse(PIPELINES[name], ragged=is_ragged and name != "flip", boxes=form)
        values = [{key: in_format(each, form, SIDES), "valid": flags} for each, flags in zip(boxes, valid, strict=True)]
        for index, made in enumerate(other(images, values, data_keys=["input", "targets"], draws=draws)[1]):
            corners = in_format(made[key], form, expected[1].shape[2:], back=True)
            torch.testing.assert_close(corners, expected[0][index], atol=1e-4, rtol=0)
            assert_values(made["valid"], expected[3][index])
    if isinstance(images, torch.Tensor):
        frames = masks[:, None].repeat(1, 2, 1, 1, 1) if of_clips else masks
        _, dense_masks = augment(images, frames, data_keys=["input", "mask"], draws=draws)
        assert_values(dense_masks[:, 1] if of_clips else dense_masks, expected[1])
    all_valid = [{"boxes": each} for each in boxes]
    _, unmarked = augment(images, all_valid, data_keys=["input", "targets"], draws=draws)
    assert_values(expected[3], torch.stack([record["valid"] for record in unmarked]) & valid)
    out = torch.tensor([expected[1].shape[3], expected[1].shape[2]] * 2)
    torch.testing.assert_close((padded + 0.5).clamp(min=0).minimum(out), expected[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(padded_points + 0.5, expected[2].flatten(1, 2), atol=1e-4, rtol=0)


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
