"""Target dicts: their types, keys, forms of boxes, and which boxes stay valid."""

import itertools
from collections import OrderedDict

import kornia.augmentation as K
import pytest
import torch
from support.comparison.replay import left_to_kornia, photographs
from support.comparison.values import assert_values
from support.targets.detection import PIPELINES, boxes_of, follow_targets, records_of

import gpuaug

tv_tensors = pytest.importorskip("torchvision.tv_tensors")
F = pytest.importorskip("torchvision.transforms.v2.functional")

KEYS = ["input", "targets"]


def in_form(boxes, form):
    """Corners in another form, in an image of 32 x 48; with the way back."""
    if form == "xyxy":
        return boxes
    sides = boxes[:, 2:] - boxes[:, :2]
    made = torch.cat((boxes[:, :2] if form == "xywh" else (boxes[:, :2] + boxes[:, 2:]) / 2, sides), 1)
    return made / torch.tensor([48.0, 32.0] * 2) if form == "cxcywh_share" else made


def as_corners(boxes, form, size):
    if form == "xyxy":
        return boxes
    if form == "cxcywh_share":
        boxes = boxes * torch.tensor([size[1], size[0]] * 2)
    first = boxes[:, :2] if form == "xywh" else boxes[:, :2] - boxes[:, 2:] / 2
    return torch.cat((first, first + boxes[:, 2:]), 1)


@pytest.mark.parametrize("name", ["rotation", "DETR", "crop"])
@pytest.mark.parametrize("form", ["xywh", "cxcywh", "cxcywh_share", "bbox"])
def test_box_forms_equal_xyxy_boxes(form, name):
    modules, records = PIPELINES[name](0.5), records_of()
    size, expected, _ = follow_targets(modules, records)
    key, form, options = ("bbox", "xywh", {}) if form == "bbox" else ("boxes", form, {"boxes": form})
    given_records = [{key: in_form(record["boxes"], form), "class_labels": record["labels"]} for record in records]
    _, got, _ = follow_targets(modules, given_records, **options)
    for record, other, before in zip(got, expected, given_records, strict=True):
        torch.testing.assert_close(as_corners(record[key], form, size), other["boxes"], atol=1e-4, rtol=0)
        assert_values(record["valid"], other["valid"])
        assert record["class_labels"] is before["class_labels"]
        assert list(record) == [key, "class_labels", "valid"]


@pytest.mark.parametrize("form", ["XYXY", "XYWH", "CXCYWH"])
def test_tv_tensors_keep_their_type_format_and_canvas_size(form):
    modules, records = PIPELINES["DETR"](0.5), records_of()
    size, expected, _ = follow_targets(modules, records)
    dressed = [
        {
            "boxes": tv_tensors.BoundingBoxes(in_form(r["boxes"], form.lower()), format=form, canvas_size=(32, 48)),
            "masks": tv_tensors.Mask(r["masks"]),
            "keypoints": tv_tensors.KeyPoints(r["keypoints"][..., :2], canvas_size=(32, 48)),
        }
        for r in records
    ]
    _, got, _ = follow_targets(modules, dressed, boxes="cxcywh_share")
    for record, other in zip(got, expected, strict=True):
        assert [type(value) for value in record.values()] == [
            tv_tensors.BoundingBoxes,
            tv_tensors.Mask,
            tv_tensors.KeyPoints,
            torch.Tensor,
        ]
        assert record["boxes"].canvas_size == record["keypoints"].canvas_size == size
        assert record["boxes"].format is tv_tensors.BoundingBoxFormat[form]
        plain = record["boxes"].as_subclass(torch.Tensor)
        torch.testing.assert_close(as_corners(plain, form.lower(), size), other["boxes"], atol=1e-4, rtol=0)
        assert_values(record["masks"].as_subclass(torch.Tensor), other["masks"])
        assert_values(record["keypoints"].as_subclass(torch.Tensor), other["keypoints"][..., :2])
    assert dressed[0]["boxes"].canvas_size == (32, 48)


def test_sanitize_equals_torchvision_sanitize_bounding_boxes():
    _, got, _ = follow_targets(PIPELINES["crop"](1.0), [
        {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(32, 48)),
            "labels": torch.arange(len(boxes)),
        }
        for boxes in boxes_of(seed=2)
    ])  # fmt: skip
    sanitize = pytest.importorskip("torchvision.transforms.v2").SanitizeBoundingBoxes()
    assert sum(len(record["labels"]) for record in got) > sum(int(record["valid"].sum()) for record in got)
    for record, mine in zip(got, gpuaug.sanitize(got), strict=True):
        theirs = sanitize(record)
        assert_values(theirs["labels"], mine["labels"])
        assert_values(theirs["boxes"], mine["boxes"])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32], ids=str
)
def test_target_dtypes_are_kept_and_integers_become_float32(dtype):
    records = [{"boxes": boxes.to(dtype), "keypoints": boxes[:, None, :2].to(dtype)} for boxes in boxes_of()]
    plain = [{key: value.float() for key, value in record.items()} for record in records]
    _, got, _ = follow_targets(PIPELINES["rotation"](1.0), records)
    _, expected, _ = follow_targets(PIPELINES["rotation"](1.0), plain)
    wanted = dtype if dtype.is_floating_point else torch.float32
    for record, other in zip(got, expected, strict=True):
        for key in ("boxes", "keypoints"):
            assert record[key].dtype is wanted
            tolerance = 1e-4 if wanted is torch.float64 else 0
            torch.testing.assert_close(record[key], other[key].to(wanted), atol=tolerance, rtol=0)


VALUE_DTYPES = [
    *(torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]


@pytest.mark.parametrize("key", ["boxes", "keypoints"])
@pytest.mark.parametrize("dtypes", list(itertools.combinations(VALUE_DTYPES, 2)), ids=str)
def test_values_are_those_of_their_own_dtype_whatever_the_other_images_have(dtypes, key):
    corners = [[201, 1, 203, 5] if dtype == torch.uint8 else [3001, 1, 3203, 5] for dtype in dtypes]
    values = [torch.tensor([row]).to(dtype) for row, dtype in zip(corners, dtypes, strict=True)]
    values = [value if key == "boxes" else value.view(1, 2, 2) for value in values]
    augment, images = gpuaug.fuse(K.RandomInvert()), torch.zeros(2, 1, 8, 4000)
    _, got = augment(images, [{key: value} for value in values], data_keys=KEYS)
    for record, value in zip(got, values, strict=True):
        assert record[key].dtype == (value.dtype if value.is_floating_point() else torch.float32)
        assert record[key].tolist() == value.tolist()


def test_target_dtypes_may_differ_within_a_batch():
    records = [{"boxes": torch.ones(2, 4, dtype=dtype)} for dtype in (torch.int64, torch.float16, torch.float64)]
    _, got, _ = follow_targets(PIPELINES["flips"](1.0), records)
    assert [record["boxes"].dtype for record in got] == [torch.float32, torch.float16, torch.float64]


def test_target_dicts_keep_their_type_and_are_not_modified():
    records = records_of(3)
    records[0] = OrderedDict(records[0])
    before = [dict(record) for record in records]
    copies = [{key: value.clone() for key, value in record.items() if key != "image_id"} for record in records]
    for kind in (list, tuple):
        _, got, _ = follow_targets(PIPELINES["rotation"](1.0), kind(records))
        assert type(got) is kind
        assert [type(record) for record in got] == [OrderedDict, dict, dict]
        for record, given_record, copy in zip(got, records, copies, strict=True):
            assert list(record) == ["boxes", "labels", "masks", "keypoints", "image_id", "valid"]
            assert record["labels"] is given_record["labels"]
            for key, value in copy.items():
                assert_values(given_record[key], value)
    assert [dict(record).keys() for record in records] == [record.keys() for record in before]


def test_target_dicts_may_have_different_keys():
    records = [{"boxes": torch.tensor([[1.0, 2.0, 9.0, 9.0]])}, {}, {"image_id": 3}, {"masks": torch.ones(2, 32, 48)}]
    _, got, _ = follow_targets(PIPELINES["flips"](1.0), records)
    assert [list(record) for record in got] == [["boxes", "valid"], [], ["image_id"], ["masks"]]
    assert_values(got[0]["boxes"], torch.tensor([[39.0, 23.0, 47.0, 30.0]]))


def test_target_dicts_without_a_key_do_not_shift_the_others():
    modules, records = PIPELINES["rotation"](1.0), records_of()
    _, expected, _ = follow_targets(modules, records)
    for key in ("boxes", "keypoints", "masks"):
        some = [record if sample not in (0, 2) else {"image_id": 1} for sample, record in enumerate(records)]
        _, got, _ = follow_targets(modules, [{name: value for name, value in each.items() if name == key} for each in some])
        for sample in (1, 3, 4):
            assert_values(got[sample][key], expected[sample][key])


def test_target_masks_and_boxes_may_differ_in_number():
    modules, records = PIPELINES["rotation"](1.0), records_of()
    _, expected, _ = follow_targets(modules, records)
    kinds = [["masks"], [], ["masks"], ["boxes"], ["boxes"]]
    apart = [{key: record[key][:1] for key in keys} for keys, record in zip(kinds, records, strict=True)]
    fewer = [{"boxes": record["boxes"], "masks": record["masks"][:1]} for record in records]
    for given_records in (apart, fewer):
        _, got, _ = follow_targets(modules, given_records)
        for record, made, whole in zip(given_records, got, expected, strict=True):
            for key, value in record.items():
                assert_values(made[key], whole[key][: len(value)])


@pytest.mark.parametrize("name", PIPELINES)
@left_to_kornia
def test_target_dicts_without_boxes_and_empty_batches(name):
    empty = {"boxes": torch.zeros(0, 4), "masks": torch.zeros(0, 32, 48), "keypoints": torch.zeros(0, 7, 3)}
    size, got, _ = follow_targets(PIPELINES[name](0.5), [empty, empty])
    for record in got:
        assert [tuple(value.shape) for value in record.values()] == [(0, 4), (0, *size), (0, 7, 3), (0,)]
    assert follow_targets(PIPELINES[name](0.5), [])[1] == []


def test_single_image_takes_a_list_of_one_target_dict():
    augment, records = gpuaug.fuse(PIPELINES["flips"](1.0)), records_of(1)
    _, got = augment(photographs(1)[0], records, data_keys=KEYS)
    _, expected = augment(photographs(1), records, data_keys=KEYS)
    assert_values(got[0]["masks"], expected[0]["masks"])


def test_nan_inf_and_empty_boxes_are_not_valid():
    nan, inf = float("nan"), float("inf")
    strange = torch.tensor(
        [
            [5, 5, 20, 20],
            [nan, 5, 9, 9],
            [9, 5, 5, 9],
            [5, 5, 5, 9],
            [5, 9, 9, 5],
            [5, 5, inf, 9],
            [-90, -90, -50, -50],
            [0, 0, 0, 0],
        ]
    )
    records = [{"boxes": boxes} for boxes in boxes_of(3)]
    for form in ("xyxy", "xywh", "cxcywh", "cxcywh_share"):
        given_boxes = in_form(strange, form)
        for name in ("flips", "rotation"):
            modules = PIPELINES[name](1.0)
            _, got, _ = follow_targets(modules, [records[0], {"boxes": given_boxes}, records[2]], boxes=form)
            _, plain, _ = follow_targets(modules, [records[0], {"boxes": given_boxes[:1]}, records[2]], boxes=form)
            assert got[1]["valid"].tolist() == [True] + [False] * 7
            assert_values(got[1]["boxes"][0], plain[1]["boxes"][0])
            assert got[1]["boxes"][1].isnan().all()
            for sample in (0, 2):
                assert_values(got[sample]["boxes"], plain[sample]["boxes"])


def test_invalid_boxes_stay_invalid():
    boxes = torch.tensor([[5.0, 5.0, 20.0, 20.0]] * 3)
    records = [{"boxes": boxes, "valid": torch.tensor([True, False, True])}, {"boxes": boxes}]
    _, got, _ = follow_targets(PIPELINES["flips"](1.0), records)
    assert [record["valid"].tolist() for record in got] == [[True, False, True], [True, True, True]]
    assert list(got[0]) == ["boxes", "valid"]
    assert records[0]["valid"].tolist() == [True, False, True]


def test_boxes_are_valid_from_one_pixel_within_the_image():
    boxes = torch.tensor([[-9.0, 4.0, 1.0, 9.0], [-9.0, 4.0, 0.9, 9.0], [4.0, 31.0, 9.0, 40.0], [47.5, 4.0, 60.0, 9.0]])
    _, got, _ = follow_targets([K.RandomHorizontalFlip(p=0.0)], [{"boxes": boxes}])
    assert got[0]["valid"].tolist() == [True, False, True, False]


def test_empty_boxes_take_any_form():
    boxes = tv_tensors.BoundingBoxes([[2.0, 3.0, 10.0, 8.0]], format="XYWH", canvas_size=(20, 30))
    augment = gpuaug.fuse([K.RandomHorizontalFlip(p=1.0)])
    for records in ([{"boxes": boxes}, {"boxes": torch.zeros(0, 4)}], [{"boxes": torch.zeros(0, 4)}, {"boxes": boxes}]):
        _, done = augment(torch.rand(2, 3, 20, 30), records, data_keys=["input", "targets"])
        found = next(record["boxes"] for record in done if len(record["boxes"]))
        assert found.tolist() == [[18.0, 3.0, 10.0, 8.0]]
    _, done = augment(torch.rand(1, 3, 20, 30), [{"boxes": torch.zeros(0, 4)}], data_keys=["input", "targets"])
    assert done[0]["boxes"].shape == (0, 4)
    records = [{"boxes": torch.zeros(0, 4)}, {"boxes": boxes}, {"boxes": torch.ones(1, 4)}]
    with pytest.raises(gpuaug.ArgumentError, match="boxes of sample 2 must have the box format of sample 1, got xyxy"):
        augment(torch.rand(3, 3, 20, 30), records, data_keys=["input", "targets"])
