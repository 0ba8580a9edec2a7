"""Dropping the boxes that are not valid, with all that is known of them."""

import warnings
from collections import UserDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.comparison.replay import photographs
from support.comparison.values import assert_values
from support.targets.target_records import packed
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug.core.packed_targets import settle_targets, unpack_targets
from gpuaug.core.targets import PER_BOX

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def numbered(valid, sample=0):
    """A dict in which everything that belongs to a box says which."""
    n = len(valid)
    number = torch.arange(n) + 100 * sample
    return {
        "boxes": number[:, None].repeat(1, 4).float(),
        "labels": number.to(torch.int32 if sample == 2 else torch.int64),
        "masks": number[:, None, None].repeat(1, 3, 5),
        "keypoints": number[:, None, None].repeat(1, 2, 3),
        "valid": torch.tensor(valid, dtype=torch.bool),
        "image_id": torch.tensor([sample]),
        "orig_size": torch.tensor([480, 640]),
        "file": "a.jpg",
        "scale": torch.tensor(0.5),
        **({"scores": number.double()} if sample % 2 else {}),
    }


@pytest.mark.parametrize("device", DEVICES)
@given(valid=st.lists(st.lists(st.booleans(), max_size=5), max_size=4))
@settings(derandomize=True)
def test_sanitize_removes_boxes_and_what_belongs_to_them(device, valid):
    records = [numbered(each, sample) for sample, each in enumerate(valid)]
    records = [{key: value.to(device) if torch.is_tensor(value) else value for key, value in each.items()} for each in records]
    got = gpuaug.sanitize(records)
    assert len(got) == len(records)
    for sample, (record, made, each) in enumerate(zip(records, got, valid, strict=True)):
        kept = [100 * sample + index for index, stays in enumerate(each) if stays]
        assert list(made) == list(record)
        for key in {"boxes", "labels", "masks", "keypoints", "scores"} & record.keys():
            assert made[key].device == record[key].device
            assert made[key].shape == (len(kept), *record[key].shape[1:])
            assert made[key].dtype is record[key].dtype
            entries = made[key].reshape(len(kept), record[key][:1].numel() or 1)[:, 0]
            assert_values(entries, torch.tensor(kept, device=device).to(entries.dtype))
            made[key].add_(7)  # which the values of other images do not see
        assert made["valid"].all()
        assert all(made[key] is record[key] for key in ("image_id", "orig_size", "file", "scale"))
    assert [record["valid"].tolist() for record in records] == valid


OF_THE_IMAGE = {
    "tuple": (480, 640),
    "list": [480, 640],
    "tensor": torch.tensor([480, 640]),
    "array": np.array([0.5, 0.25]),
    "strings": ["a.jpg", "b.jpg"],
    "rows": torch.zeros(2, 3),
    "mask": tv_tensors.Mask(torch.zeros(2, 5)),
}


@pytest.mark.parametrize("value", OF_THE_IMAGE.values(), ids=OF_THE_IMAGE)
@pytest.mark.parametrize("counts", [(2,), (2, 2), (2, 3), (0, 2)])
def test_sanitize_keeps_values_of_the_image_whatever_the_number_of_boxes(counts, value):
    records = [{**numbered([True] + [False] * (n - 1) if n else []), "of the image": value} for n in counts]
    for record, made in zip(records, gpuaug.sanitize(records), strict=True):
        assert made["of the image"] is value
        assert len(made["labels"]) == bool(len(record["labels"]))


def test_sanitize_asks_about_unknown_keys_that_go_with_the_boxes():
    records = [{**numbered([True, False]), "poses": ["a", "b"]}, {**numbered([False, False, True]), "poses": ["c", "d", "e"]}]
    with pytest.raises(gpuaug.ArgumentError, match="'poses'"):
        gpuaug.sanitize(records)
    assert [made["poses"] for made in gpuaug.sanitize(records, per_box={*PER_BOX, "poses"})] == [["a"], ["e"]]
    kept = gpuaug.sanitize(records, per_box=["boxes"])
    assert all(made["valid"].tolist() == [True] for made in kept)
    assert [(len(made["boxes"]), len(made["poses"]), len(made["labels"])) for made in kept] == [(1, 2, 2), (1, 3, 3)]


LABEL_KEYS = {
    "labels": ["labels"],
    "capitals": ["Labels"],
    "singular": ["label"],
    "prefix": ["gt_labels"],
    "first of two": ["label_a", "label_b"],
    "labels after another": ["image_label", "labels"],
}


@pytest.mark.parametrize("form", ["list", "padded", "packed"])
@pytest.mark.parametrize("names", LABEL_KEYS.values(), ids=LABEL_KEYS)
def test_sanitize_finds_the_labels_that_torchvision_finds(names, form):
    boxes = tv_tensors.BoundingBoxes([[5, 5, 5, 7], [1, 1, 6, 7]], format="XYXY", canvas_size=(8, 8))
    target = {name: torch.tensor([3, 4]) for name in names} | {"boxes": boxes}
    expected = v2.SanitizeBoundingBoxes()(target)
    targets = [{**target, "valid": torch.tensor([False, True])}] * 8
    if form == "padded":
        targets = {name: torch.stack([record[name] for record in targets]) for name in targets[0]}
    if form == "packed":
        batch = torch.zeros(8), [dict(record) for record in targets]
        ((_, targets),) = gpuaug.StreamedLoader([batch], [gpuaug.TransformStage(gpuaug.sanitize, on=1)])
    for got in targets if form == "packed" else gpuaug.sanitize(targets):
        assert [got[name].tolist() for name in names] == [expected[name].tolist() for name in names]
        assert got["boxes"].tolist() == expected["boxes"].tolist()


@pytest.mark.parametrize(
    ("getter", "told"),
    [(lambda sample: sample[1]["labels"], True), ("default", False), (None, False)],
    ids=["function", "default", "None"],
)
def test_a_function_as_labels_getter_is_told_of(getter, told):
    pipeline = [v2.RandomHorizontalFlip(), v2.SanitizeBoundingBoxes(labels_getter=getter)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gpuaug.fuse(pipeline)
    assert {"labels_getter of" in str(warning.message) for warning in caught} == ({True} if told else set())


ENTRIES = {
    "tensor": torch.arange,
    "array": np.arange,
    "list": lambda n: list(range(n)),
    "tuple": lambda n: tuple(range(n)),
    "scalar": lambda n: torch.tensor(n) if n != 2 else torch.arange(n),
}


def in_list(records):
    return records


def in_mappings(records):
    return tuple(map(UserDict, records))


def in_padded(records):
    batch = {name: torch.stack([record[name] for record in records]) for name in ("boxes", "labels", "valid")}
    return {**batch, "tracks": [record["tracks"] for record in records]}


@pytest.mark.parametrize("entries", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize("form", [in_list, in_mappings, packed, in_padded])
@pytest.mark.parametrize("other", [0, 1, 3])
def test_sanitize_refuses_keys_of_per_box_with_another_number_of_entries_in_any_dict(other, form, entries):
    records = [numbered([True, False], sample) | {"tracks": entries(n)} for sample, n in enumerate((2, other, 2))]
    with pytest.raises(gpuaug.ArgumentError, match="tracks of sample 1 must hold one entry for each of the 2 boxes"):
        gpuaug.sanitize(form(records), per_box=["boxes", "labels", "tracks"])
    got = settle_targets(gpuaug.sanitize(form(records), per_box=["boxes", "labels"]))
    assert [(len(record["boxes"]), len(record["labels"])) for record in unpack_targets(got)] == [(1, 1)] * 3
    right = [record | {"tracks": entries(2)} for record in records]
    got = unpack_targets(settle_targets(gpuaug.sanitize(form(right), per_box=["boxes", "tracks"])))
    assert [list(record["tracks"]) for record in got] == [[0]] * 3


@pytest.mark.parametrize(
    "value", [torch.zeros(2), torch.zeros(2, 2), torch.zeros(3, 3), [[1, 2, 3]], (1, 2, 3), np.zeros((3, 3))]
)
def test_sanitize_refuses_keys_of_per_box_that_are_not_padded(value):
    batch = {"boxes": torch.zeros(2, 3, 4), "valid": torch.tensor([[True, False, True]] * 2), "tracks": value}
    with pytest.raises(gpuaug.ArgumentError, match=r"tracks (of sample 0 must hold|must have) one entry for each of the"):
        gpuaug.sanitize(batch, per_box=["boxes", "tracks"])
    assert [len(record["boxes"]) for record in gpuaug.sanitize(batch, per_box=["boxes"])] == [2, 2]
    for convert in (torch.tensor, np.array, list):
        converted = gpuaug.sanitize({**batch, "tracks": convert([[0, 1, 2]] * 2)}, per_box=["boxes", "tracks"])
        assert [list(map(int, record["tracks"])) for record in converted] == [[0, 2]] * 2


def test_sanitize_knows_boxes_and_keypoints_of_any_key_by_their_type():
    record = numbered([False, True])
    record["others"] = tv_tensors.BoundingBoxes(record["boxes"], format="XYXY", canvas_size=(8, 8))
    record["joints"] = tv_tensors.KeyPoints(torch.zeros(2, 5, 2), canvas_size=(8, 8))
    (made,) = gpuaug.sanitize([record])
    assert made["others"].tolist() == [[1.0] * 4]
    assert made["joints"].shape == (1, 5, 2)


@pytest.mark.parametrize("form", [list, tuple])
def test_frames_of_clips_lose_the_boxes_that_they_lose_in_a_flat_list(form):
    valid = [[[True, False], [], [False]], [[True] * 3, [False, True], [True]], []]
    clips = [form(numbered(flags, frame) for frame, flags in enumerate(frames)) for frames in valid]
    expected = iter(gpuaug.sanitize([record for frames in clips for record in frames]))
    batches = [clips] * 2
    stage = gpuaug.TransformStage(gpuaug.sanitize, on=None)
    for sanitized in (gpuaug.sanitize(clips), *gpuaug.StreamedLoader(batches, [stage], device="cpu")):
        assert [[len(record["boxes"]) for record in frames] for frames in sanitized] == [[1, 0, 0], [3, 1, 1], []]
    for record in (record for frames in gpuaug.sanitize(clips) for record in frames):
        expected_record = next(expected)
        for key in ("boxes", "labels", "masks", "keypoints", "valid"):
            assert_values(record[key], expected_record[key])


def test_sanitize_keeps_images_without_annotations():
    bare = {"image_id": 7, "size": torch.tensor([4, 5])}
    kept = gpuaug.sanitize([numbered([True, False]), bare])
    assert list(kept[1]) == ["image_id", "size"]
    assert kept[1]["size"] is bare["size"]
    assert len(kept[0]["valid"]) == 1
    records = [{"boxes": torch.zeros(2, 4), "valid": torch.ones(2).bool(), "size": torch.tensor([4, 5])}, bare]
    sanitized = gpuaug.sanitize(packed(records))
    assert [each["size"].tolist() for each in unpack_targets(settle_targets(sanitized))] == [[4, 5]] * 2
    (alone,) = gpuaug.sanitize([bare])
    assert alone == bare
    assert alone is not bare
    boxes = torch.zeros(1, 4)
    may_have_boxes = {
        "boxes": boxes,
        "labels": torch.zeros(1),
        "bboxes": boxes,
        "rois": boxes.numpy(),
        "corners": [[0, 0, 4, 4]],
    }
    for key, value in {**may_have_boxes, "parts": [boxes], "annotations": [{"box": boxes}], "objects": {"box": boxes}}.items():
        with pytest.raises(gpuaug.ArgumentError, match="targets of sample 0 must have the key 'valid'"):
            gpuaug.sanitize([{**bare, key: value}])


@pytest.mark.parametrize("key", ["boxes", "bbox"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_mask_of_another_length_than_the_boxes_is_refused(key, count):
    records = [numbered([True, False]), {key: torch.zeros(2, 4), "valid": torch.ones(count, dtype=torch.bool)}]
    text = f"valid of sample 1 must be one bool for each of its 2 boxes, got {count}"
    with pytest.raises(gpuaug.ArgumentError, match=text):
        gpuaug.sanitize(records)
    named = [{"poses": [*"ab"], **records[0]}, {"poses": [*range(count)], **records[1]}]
    with pytest.raises(gpuaug.ArgumentError, match=text):
        gpuaug.sanitize(named)
    boxes = {key: torch.tensor([[0.0, 0, 2, 2], [9, 9, 9, 9]])}
    _, fused = gpuaug.fuse(v2.RandomHorizontalFlip())(torch.zeros(1, 3, 4, 4), [boxes], data_keys=["input", "targets"])
    assert len(gpuaug.sanitize(fused)[0][key]) == 1, "as the error advises"
    records = [records[1]] * 2
    given_packed = packed([{name: value.clone() for name, value in record.items()} for record in records * 4])
    with pytest.raises(gpuaug.ArgumentError, match="valid of sample 0 must be one bool for each of its 2 boxes"):
        gpuaug.sanitize(given_packed)
    padded = {key: torch.zeros(1, 2, 4), "valid": torch.ones(1, count, dtype=torch.bool)}
    with pytest.raises(gpuaug.ArgumentError, match=f"valid of sample 0 must be one bool for each of its 2 boxes, got {count}"):
        gpuaug.sanitize(padded)
    with pytest.raises(gpuaug.ArgumentError, match=f"{key} must have one entry for each of the 3 images, as valid has, got 1"):
        gpuaug.sanitize({**padded, "valid": torch.ones(3, count, dtype=torch.bool)})


FORMS_OF_ROWS = {
    "labels": torch.tensor,
    "ids": lambda rows: list(map(torch.tensor, rows)),
    "names": lambda rows: [list(map(str, row)) for row in rows],
    "classes": lambda rows: tuple(map(tuple, rows)),
    "scores": lambda rows: list(map(np.array, rows)),
}
"""Forms of a value of a padded dict, (B, N), under keys that hold one entry per box."""


@settings(max_examples=20)
@given(st.data())
def test_every_form_of_a_padded_value_loses_the_entries_of_the_same_boxes(data):
    batch, count = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4))
    valid = data.draw(st.lists(st.lists(st.booleans(), min_size=count, max_size=count), min_size=batch, max_size=batch))
    rows = [[10 * sample + index for index in range(count)] for sample in range(batch)]
    of_image = {"paths": ["a" * count] * batch, "sizes": rows}  # keys of the image
    padded = {
        **{key: form(rows) for key, form in FORMS_OF_ROWS.items()},
        **of_image,
        "valid": torch.tensor(valid).view(batch, count).bool(),
    }
    records = gpuaug.sanitize(padded)
    assert len(records) == batch
    for sample, record in enumerate(records):
        left = [number for number, is_valid in zip(rows[sample], valid[sample], strict=True) if is_valid]
        assert {key: list(map(int, record[key])) for key in FORMS_OF_ROWS} == dict.fromkeys(FORMS_OF_ROWS, left)
        assert {key: record[key] for key in of_image} == {key: values[sample] for key, values in of_image.items()}


def test_lists_of_other_lengths_in_a_padded_dict_are_unchanged():
    padded = {"boxes": torch.zeros(2, 3, 4), "valid": torch.zeros(2, 3, dtype=torch.bool), "names": [["a"], ["b", "c", "d"]]}
    assert [record["names"] for record in gpuaug.sanitize(padded)] == padded["names"]


BEFORE_THE_FILTER = {
    "nothing": [],
    "flip": [v2.RandomHorizontalFlip(1.0)],
    "colours": [v2.RandomInvert(1.0)],
    "resize": [v2.Resize((40, 48))],
    "crop": [v2.CenterCrop((14, 17))],
    "pad": [v2.Pad(3)],
    "RandomOrder of five": [v2.RandomOrder([v2.RandomInvert(1.0)] * 5)],
}


@pytest.mark.filterwarnings("ignore:RandomOrder_0 is not fused")
@pytest.mark.parametrize("name", BEFORE_THE_FILTER)
@pytest.mark.parametrize("min_size", [1, 3])
def test_sanitize_keeps_the_boxes_that_torchvision_keeps_after_a_clamp(name, min_size):
    """Boxes within the image, across each edge by less and by more than a pixel, outside, and too small."""
    spans = [(2.0, 12.0), (-0.5, 9.0), (-7.0, 4.0), (11.0, 20.4), (17.5, 31.0), (-9.0, -1.0), (18.5, 40.0), (5.0, 7.0)]
    boxes = torch.tensor([(x[0], y[0], x[1], y[1]) for x in spans for y in spans])
    boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(20, 20))
    target = {"boxes": boxes, "labels": torch.arange(len(boxes))}
    filter_ = v2.SanitizeBoundingBoxes(min_size=min_size)
    image = photographs(1, 3, 20, 20)
    _, targets = gpuaug.fuse([*BEFORE_THE_FILTER[name], filter_])(image, [target], data_keys=["input", "targets"])
    (got,) = gpuaug.sanitize(targets)
    theirs = v2.Compose([*BEFORE_THE_FILTER[name], v2.ClampBoundingBoxes(), filter_])
    _, expected = theirs(tv_tensors.Image(image[0]), target)
    assert got["labels"].tolist() == expected["labels"].tolist()
    assert_values(got["boxes"].as_subclass(torch.Tensor), expected["boxes"].as_subclass(torch.Tensor), atol=1e-5)
