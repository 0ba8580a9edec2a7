"""Target dicts, as detection models take them, against Kornia and torchvision on the same draws."""

import itertools
from collections import OrderedDict

import kornia.augmentation as K
import pytest
import torch
from support.batches.pairwise import sweep
from support.comparison.replay import left_to_kornia, photographs
from support.comparison.values import assert_values
from support.targets.detection import PIPELINES, boxes_of, corners, follow_targets, masks, records_of, through_kornia, upright

import gpuaug

tv_tensors = pytest.importorskip("torchvision.tv_tensors")

KEYS = ["input", "targets"]


@pytest.mark.parametrize(("name", "p"), sweep(PIPELINES, [0.5, 0.0, 1.0]))
@left_to_kornia
def test_target_boxes_and_keypoints_equal_kornia(name, p):
    for seed in range(3):
        modules, records = PIPELINES[name](p), records_of(seed=seed)
        size, got, draws = follow_targets(modules, records, seed)
        known, points = through_kornia(modules, photographs(5), draws.as_kornia(), [corners(r["boxes"]) for r in records])
        assert size == known
        _, spots = through_kornia(modules, photographs(5), draws.as_kornia(), [r["keypoints"][..., :2] for r in records])
        for record, made, four, spot in zip(records, got, points, spots, strict=True):
            torch.testing.assert_close(made["boxes"], upright(four, size), atol=1e-3, rtol=1e-6)
            torch.testing.assert_close(made["keypoints"][..., :2], spot, atol=1e-3, rtol=1e-6)
            assert_values(made["keypoints"][..., 2], record["keypoints"][..., 2])
            sides = made["boxes"][:, 2:] - made["boxes"][:, :2]
            near = ((sides - 1).abs() < 1e-3).any(1)
            assert_values(made["valid"] | near, (sides >= 1).all(1) | near)


def in_form(boxes, form):
    """Corners in another form, in an image of 32 x 48; with the way back."""
    if form == "xyxy":
        return boxes
    sides = boxes[:, 2:] - boxes[:, :2]
    made = torch.cat((boxes[:, :2] if form == "xywh" else (boxes[:, :2] + boxes[:, 2:]) / 2, sides), 1)
    return made / torch.tensor([48.0, 32.0] * 2) if form == "cxcywh_share" else made


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


@pytest.mark.parametrize("name", PIPELINES)
@left_to_kornia
def test_target_dicts_without_boxes_and_empty_batches(name):
    empty = {"boxes": torch.zeros(0, 4), "masks": torch.zeros(0, 32, 48), "keypoints": torch.zeros(0, 7, 3)}
    size, got, _ = follow_targets(PIPELINES[name](0.5), [empty, empty])
    for record in got:
        assert [tuple(value.shape) for value in record.values()] == [(0, 4), (0, *size), (0, 7, 3), (0,)]
    assert follow_targets(PIPELINES[name](0.5), [])[1] == []


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
    with pytest.raises(gpuaug.ArgumentError, match="boxes of sample 2 must have the format of boxes of sample 1, got xyxy"):
        augment(torch.rand(3, 3, 20, 30), records, data_keys=["input", "targets"])


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("order", [(0, 0, 2), (0, 2, 0), (2, 0, 1)], ids=str)
def test_images_without_masks_may_have_masks_of_another_type(order, dtype, ragged):
    sizes = [(21, 37), (30, 18), (40, 52)] if ragged else [(32, 48)] * 3
    images = [torch.zeros(3, *size) for size in sizes]
    batch = gpuaug.collate_ragged([image.byte() for image in images]) if ragged else torch.stack(images)
    given = [masks(n, *size, dtype=dtype, seed=n) if n else torch.zeros(0, *size) for n, size in zip(order, sizes, strict=True)]
    augment = gpuaug.fuse([K.RandomHorizontalFlip(p=1.0), K.CenterCrop((16, 16))], ragged=ragged)
    _, got = augment(batch, [{"masks": mask} for mask in given], data_keys=["input", "targets"])
    _, expected = augment(batch, [{"masks": mask.to(dtype)} for mask in given], data_keys=["input", "targets"])
    for record, other in zip(got, expected, strict=True):
        assert record["masks"].dtype is dtype
        assert_values(record["masks"], other["masks"])
