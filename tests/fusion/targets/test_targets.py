"""Target dicts, as detection models take them, against Kornia and torchvision on the same draws."""

from collections import OrderedDict

import kornia.augmentation as K
import pytest
import torch
from fusion.targets.test_boxes import Launches
from hypothesis import given, settings
from hypothesis import strategies as st
from support.detection import PIPELINES, boxes_of, corners, records_of, through_kornia, upright
from support.replay import left_to_kornia, photographs

import gpuaug
from gpuaug.fusion.targets.targets import Targets

tv_tensors = pytest.importorskip("torchvision.tv_tensors")
F = pytest.importorskip("torchvision.transforms.v2.functional")

KEYS = ["input", "targets"]


def followed(modules, records, seed=0, images=None, **options):
    """(the size that comes out, the dicts that come out, the draws)."""
    images = photographs(len(records)) if images is None else images
    augment = gpuaug.fuse(K.AugmentationSequential(*modules), **options)
    draws = augment.draw(images.shape, seed=seed)
    made, targets = augment(images, records, data_keys=KEYS, draws=draws)
    return tuple(made.shape[2:]), targets, draws


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", PIPELINES)
@left_to_kornia
def test_boxes_and_keypoints_go_where_kornia_takes_them(name, p):
    for seed in range(3):
        modules, records = PIPELINES[name](p), records_of(seed=seed)
        size, got, draws = followed(modules, records, seed)
        known, points = through_kornia(modules, photographs(5), draws.as_kornia(), [corners(r["boxes"]) for r in records])
        assert size == known
        _, spots = through_kornia(modules, photographs(5), draws.as_kornia(), [r["keypoints"][..., :2] for r in records])
        for record, made, four, spot in zip(records, got, points, spots, strict=True):
            torch.testing.assert_close(made["boxes"], upright(four, size), atol=1e-3, rtol=1e-6)
            torch.testing.assert_close(made["keypoints"][..., :2], spot, atol=1e-3, rtol=1e-6)
            assert torch.equal(made["keypoints"][..., 2], record["keypoints"][..., 2])
            sides = made["boxes"][:, 2:] - made["boxes"][:, :2]
            near = ((sides - 1).abs() < 1e-3).any(1)
            assert torch.equal(made["valid"] | near, (sides >= 1).all(1) | near)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", PIPELINES)
@left_to_kornia
def test_masks_go_where_padded_masks_go(name, p):
    modules, records = [*PIPELINES[name](p), K.RandomErasing((0.1, 0.4), p=0.5)], records_of()
    _, got, draws = followed(modules, records)
    padded = torch.zeros(5, 6, 32, 48, dtype=torch.uint8)
    for sample, record in enumerate(records):
        padded[sample, : len(record["masks"])] = record["masks"]
    _, expected = gpuaug.fuse(K.AugmentationSequential(*modules))(
        photographs(5), padded, data_keys=["input", "mask"], draws=draws
    )
    for sample, record in enumerate(got):
        assert torch.equal(record["masks"], expected[sample, : len(record["masks"])])
        assert record["masks"].dtype is torch.uint8
    assert got[1]["masks"].shape == (0, *expected.shape[2:])


def torchvision_does():
    """Kornia's modules, and what torchvision calls what they drew for a sample."""
    yield K.RandomHorizontalFlip(p=1.0), lambda drawn, sample, boxes: F.horizontal_flip(boxes)
    yield K.RandomVerticalFlip(p=1.0), lambda drawn, sample, boxes: F.vertical_flip(boxes)
    yield K.CenterCrop((20, 30)), lambda drawn, sample, boxes: F.center_crop(boxes, [20, 30])
    yield K.PadTo((40, 60)), lambda drawn, sample, boxes: F.pad(boxes, [0, 0, 12, 8])
    yield K.Resize((50, 30), align_corners=False), lambda drawn, sample, boxes: F.resize(boxes, [50, 30])
    yield (
        K.RandomCrop((24, 36), padding=(3, 5, 2, 7)),
        lambda drawn, sample, boxes: F.crop(
            F.pad(boxes, [3, 5, 2, 7]), int(drawn["y"][sample]), int(drawn["x"][sample]), 24, 36
        ),
    )
    yield (
        K.RandomResizedCrop((20, 24), align_corners=False),
        lambda drawn, sample, boxes: F.resized_crop(
            boxes, *(int(drawn[key][sample]) for key in ("y", "x", "height", "width")), [20, 24]
        ),
    )


@pytest.mark.parametrize(("module", "theirs"), [pytest.param(*pair, id=type(pair[0]).__name__) for pair in torchvision_does()])
def test_boxes_go_where_torchvision_takes_them_and_as_many_are_left(module, theirs):
    # Within the image: torchvision moves an edge that lies outside of it onto the frame at every step.
    given_boxes = [boxes.clamp(min=0).minimum(torch.tensor([48.0, 32.0] * 2)) for boxes in boxes_of(seed=3)]
    size, got, draws = followed([module], [{"boxes": boxes} for boxes in given_boxes])
    for sample, (boxes, made) in enumerate(zip(given_boxes, got, strict=True)):
        dressed = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(32, 48), clamping_mode=None)
        expected = theirs(draws._drawn[0], sample, dressed)
        assert expected.canvas_size == size
        expected = F.clamp_bounding_boxes(expected, clamping_mode="hard")
        torch.testing.assert_close(made["boxes"], expected.as_subclass(torch.Tensor), atol=1e-4, rtol=0)
        _, valid = F.sanitize_bounding_boxes(expected)
        assert torch.equal(made["valid"], valid)


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
def test_every_form_of_boxes_goes_where_corners_go(form, name):
    modules, records = PIPELINES[name](0.5), records_of()
    size, expected, _ = followed(modules, records)
    key, form, options = ("bbox", "xywh", {}) if form == "bbox" else ("boxes", form, {"boxes": form})
    given_records = [{key: in_form(record["boxes"], form), "class_labels": record["labels"]} for record in records]
    _, got, _ = followed(modules, given_records, **options)
    for record, other, before in zip(got, expected, given_records, strict=True):
        torch.testing.assert_close(as_corners(record[key], form, size), other["boxes"], atol=1e-4, rtol=0)
        assert torch.equal(record["valid"], other["valid"])
        assert record["class_labels"] is before["class_labels"]
        assert list(record) == [key, "class_labels", "valid"]


@pytest.mark.parametrize("form", ["XYXY", "XYWH", "CXCYWH"])
def test_torchvisions_tensors_say_themselves_what_they_are_and_stay_it(form):
    modules, records = PIPELINES["DETR"](0.5), records_of()
    size, expected, _ = followed(modules, records)
    dressed = [
        {
            "boxes": tv_tensors.BoundingBoxes(in_form(r["boxes"], form.lower()), format=form, canvas_size=(32, 48)),
            "masks": tv_tensors.Mask(r["masks"]),
            "keypoints": tv_tensors.KeyPoints(r["keypoints"][..., :2], canvas_size=(32, 48)),
        }
        for r in records
    ]
    _, got, _ = followed(modules, dressed, boxes="cxcywh_share")
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
        assert torch.equal(record["masks"].as_subclass(torch.Tensor), other["masks"])
        assert torch.equal(record["keypoints"].as_subclass(torch.Tensor), other["keypoints"][..., :2])
    assert dressed[0]["boxes"].canvas_size == (32, 48)


def test_a_pipeline_in_torchvisions_tensors_ends_with_torchvisions_own_sanitizing():
    _, got, _ = followed(PIPELINES["crop"](1.0), [
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
        assert torch.equal(theirs["labels"], mine["labels"])
        assert torch.equal(theirs["boxes"], mine["boxes"])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32], ids=str
)
def test_types_stay_and_whole_numbers_come_out_floating(dtype):
    records = [{"boxes": boxes.to(dtype), "keypoints": boxes[:, None, :2].to(dtype)} for boxes in boxes_of()]
    plain = [{key: value.float() for key, value in record.items()} for record in records]
    _, got, _ = followed(PIPELINES["rotation"](1.0), records)
    _, expected, _ = followed(PIPELINES["rotation"](1.0), plain)
    wanted = dtype if dtype.is_floating_point else torch.float32
    for record, other in zip(got, expected, strict=True):
        for key in ("boxes", "keypoints"):
            assert record[key].dtype is wanted
            tolerance = 1e-4 if wanted is torch.float64 else 0
            torch.testing.assert_close(record[key], other[key].to(wanted), atol=tolerance, rtol=0)


def test_types_may_differ_within_a_batch():
    records = [{"boxes": torch.ones(2, 4, dtype=dtype)} for dtype in (torch.int64, torch.float16, torch.float64)]
    _, got, _ = followed(PIPELINES["flips"](1.0), records)
    assert [record["boxes"].dtype for record in got] == [torch.float32, torch.float16, torch.float64]


def test_dicts_stay_what_they_are_and_are_not_written_to():
    records = records_of(3)
    records[0] = OrderedDict(records[0])
    before = [dict(record) for record in records]
    copies = [{key: value.clone() for key, value in record.items() if key != "image_id"} for record in records]
    for kind in (list, tuple):
        _, got, _ = followed(PIPELINES["rotation"](1.0), kind(records))
        assert type(got) is kind
        assert [type(record) for record in got] == [OrderedDict, dict, dict]
        for record, given_record, copy in zip(got, records, copies, strict=True):
            assert list(record) == ["boxes", "labels", "masks", "keypoints", "image_id", "valid"]
            assert record["labels"] is given_record["labels"]
            assert all(torch.equal(given_record[key], value) for key, value in copy.items())
    assert [dict(record).keys() for record in records] == [record.keys() for record in before]


def test_samples_may_have_different_things_or_nothing():
    records = [{"boxes": torch.tensor([[1.0, 2.0, 9.0, 9.0]])}, {}, {"image_id": 3}, {"masks": torch.ones(2, 32, 48)}]
    _, got, _ = followed(PIPELINES["flips"](1.0), records)
    assert [list(record) for record in got] == [["boxes", "valid"], [], ["image_id"], ["masks"]]
    assert torch.equal(got[0]["boxes"], torch.tensor([[39.0, 23.0, 47.0, 30.0]]))


def test_samples_without_a_key_leave_the_others_their_own_images():
    modules, records = PIPELINES["rotation"](1.0), records_of()
    _, expected, _ = followed(modules, records)
    for key in ("boxes", "keypoints", "masks"):
        some = [record if sample not in (0, 2) else {"image_id": 1} for sample, record in enumerate(records)]
        _, got, _ = followed(modules, [{name: value for name, value in each.items() if name == key} for each in some])
        for sample in (1, 3, 4):
            assert torch.equal(got[sample][key], expected[sample][key])


def test_masks_need_not_be_those_of_the_boxes():
    modules, records = PIPELINES["rotation"](1.0), records_of()
    _, expected, _ = followed(modules, records)
    kinds = [["masks"], [], ["masks"], ["boxes"], ["boxes"]]
    apart = [{key: record[key][:1] for key in keys} for keys, record in zip(kinds, records, strict=True)]
    fewer = [{"boxes": record["boxes"], "masks": record["masks"][:1]} for record in records]
    for given_records in (apart, fewer):
        _, got, _ = followed(modules, given_records)
        for record, made, whole in zip(given_records, got, expected, strict=True):
            assert all(torch.equal(made[key], whole[key][: len(value)]) for key, value in record.items())


@pytest.mark.parametrize("name", PIPELINES)
@left_to_kornia
def test_batches_without_a_box_and_without_an_image(name):
    empty = {"boxes": torch.zeros(0, 4), "masks": torch.zeros(0, 32, 48), "keypoints": torch.zeros(0, 7, 3)}
    size, got, _ = followed(PIPELINES[name](0.5), [empty, empty])
    for record in got:
        assert [tuple(value.shape) for value in record.values()] == [(0, 4), (0, *size), (0, 7, 3), (0,)]
    assert followed(PIPELINES[name](0.5), [])[1] == []


def test_one_image_takes_a_list_of_one_dict():
    augment, records = gpuaug.fuse(PIPELINES["flips"](1.0)), records_of(1)
    _, got = augment(photographs(1)[0], records, data_keys=KEYS)
    _, expected = augment(photographs(1), records, data_keys=KEYS)
    assert torch.equal(got[0]["masks"], expected[0]["masks"])


def test_what_is_no_box_is_not_valid_and_touches_no_other():
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
            _, got, _ = followed(modules, [records[0], {"boxes": given_boxes}, records[2]], boxes=form)
            _, plain, _ = followed(modules, [records[0], {"boxes": given_boxes[:1]}, records[2]], boxes=form)
            assert got[1]["valid"].tolist() == [True] + [False] * 7
            assert torch.equal(got[1]["boxes"][0], plain[1]["boxes"][0])
            assert got[1]["boxes"][1].isnan().all()
            for sample in (0, 2):
                assert torch.equal(got[sample]["boxes"], plain[sample]["boxes"])


def test_what_was_not_valid_stays_so():
    boxes = torch.tensor([[5.0, 5.0, 20.0, 20.0]] * 3)
    records = [{"boxes": boxes, "valid": torch.tensor([True, False, True])}, {"boxes": boxes}]
    _, got, _ = followed(PIPELINES["flips"](1.0), records)
    assert [record["valid"].tolist() for record in got] == [[True, False, True], [True, True, True]]
    assert list(got[0]) == ["boxes", "valid"]
    assert records[0]["valid"].tolist() == [True, False, True]


def test_a_pixel_that_is_left_is_enough_and_less_is_not():
    boxes = torch.tensor([[-9.0, 4.0, 1.0, 9.0], [-9.0, 4.0, 0.9, 9.0], [4.0, 31.0, 9.0, 40.0], [47.5, 4.0, 60.0, 9.0]])
    _, got, _ = followed([K.RandomHorizontalFlip(p=0.0)], [{"boxes": boxes}])
    assert got[0]["valid"].tolist() == [True, False, True, False]


@given(st.lists(st.tuples(*[st.integers(0, 31)] * 4), max_size=5), st.booleans(), st.booleans())
@settings(max_examples=30, deadline=None)
def test_two_flips_are_none(corners_given, across, down):
    boxes = torch.tensor([[min(a, c), min(b, d), max(a, c) + 1, max(b, d) + 1] for a, b, c, d in corners_given])
    records = [{"boxes": boxes.reshape(-1, 4).float(), "masks": torch.zeros(len(boxes), 32, 48)}]
    modules = [K.RandomHorizontalFlip(p=1.0) for _ in range(2 * across)] + [
        K.RandomVerticalFlip(p=1.0) for _ in range(2 * down)
    ]
    _, got, _ = followed([*modules, K.RandomInvert(p=1.0)], records)
    assert torch.equal(got[0]["boxes"], records[0]["boxes"])
    assert got[0]["valid"].all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32], ids=str)
def test_mask_lists_go_where_each_mask_goes(dtype):
    counts = [3, 0, None, 1, 2]
    generator = torch.Generator().manual_seed(1)
    given_masks = [torch.randint(0, 2, (32, 48) if n is None else (n, 32, 48), generator=generator).to(dtype) for n in counts]
    augment = gpuaug.fuse([*PIPELINES["two warps"](0.8), K.RandomErasing((0.1, 0.4), p=0.5)])
    images = photographs(5)
    draws = augment.draw(images.shape, seed=2)
    _, got = augment(images, tuple(given_masks), data_keys=["input", "mask"], draws=draws)
    assert type(got) is tuple
    for sample, (made, mask) in enumerate(zip(got, given_masks, strict=True)):
        padded = torch.zeros(5, max(len(mask), 1) if mask.ndim == 3 else 1, 32, 48, dtype=dtype)
        padded[sample, : len(mask) if mask.ndim == 3 else 1] = mask
        _, expected = augment(images, padded, data_keys=["input", "mask"], draws=draws)
        expected = expected[sample, : len(mask)] if mask.ndim == 3 else expected[sample, 0]
        assert made.dtype is dtype
        assert torch.equal(made, expected)


@pytest.mark.parametrize("pick", ["batch", "sample"])
@left_to_kornia
def test_policies_take_targets_along(pick):
    policy = K.auto.RandAugment(2, 10, [[("shear_x", -0.3, 0.3)], [("translate_y", -0.4, 0.4)], [("equalize", 0, 1)]])
    augment = gpuaug.fuse([K.RandomHorizontalFlip(), policy, K.RandomResizedCrop((20, 24))], pick=pick)
    images, records = photographs(5), records_of()
    for seed in range(6):
        draws = augment.draw(images.shape, seed=seed)
        _, got = augment(images, records, data_keys=KEYS, draws=draws)
        padded = torch.zeros(5, 6, 4)
        for sample, record in enumerate(records):
            padded[sample, : len(record["boxes"])] = record["boxes"] - torch.tensor([0.5, 0.5, 0.5, 0.5])
        _, expected = augment(images, padded, data_keys=["input", "bbox_xyxy"], draws=draws)
        for record, boxes in zip(got, expected, strict=True):
            frame = torch.tensor([24.0, 20.0, 24.0, 20.0])
            wanted = (boxes[: len(record["boxes"])] + 0.5).clamp(min=0).minimum(frame)
            torch.testing.assert_close(record["boxes"], wanted, atol=1e-3, rtol=0)


def test_in_a_loader_every_depth_gives_the_same():
    batches = [{"image": photographs(3, seed=seed), "labels": records_of(3, seed=seed), "name": "a"} for seed in range(3)]
    stage = gpuaug.TransformStage(gpuaug.fuse(PIPELINES["DETR"](0.5)), on={"image": "input", "labels": "targets"})
    seen = [list(gpuaug.StreamedLoader(batches, [stage], device="cpu", depth=depth, seed=7)) for depth in (0, 2)]
    for one, other in zip(*seen, strict=True):
        assert one["name"] == "a"
        for record, same in zip(one["labels"], other["labels"], strict=True):
            assert all(torch.equal(record[key], same[key]) for key in ("boxes", "masks", "keypoints", "valid"))
            assert record["masks"].shape[1:] == (44, 50)


def test_launches_do_not_grow_with_the_batch_and_nothing_waits():
    counted = []
    for batch in (2, 8):
        images, records, matrix = photographs(batch), records_of(batch), torch.eye(3).repeat(batch, 1, 1)
        with Launches() as launches:
            Targets([images, records], KEYS, None).values[1].results(matrix, (32, 48))
        counted.append(launches.names)
    assert counted[0] == counted[1]


def test_of_no_boxes_every_form_is_the_same():
    boxes = tv_tensors.BoundingBoxes([[2.0, 3.0, 10.0, 8.0]], format="XYWH", canvas_size=(20, 30))
    augment = gpuaug.fuse([K.RandomHorizontalFlip(p=1.0)])
    for records in ([{"boxes": boxes}, {"boxes": torch.zeros(0, 4)}], [{"boxes": torch.zeros(0, 4)}, {"boxes": boxes}]):
        _, done = augment(torch.rand(2, 3, 20, 30), records, data_keys=["input", "targets"])
        found = next(record["boxes"] for record in done if len(record["boxes"]))
        assert found.tolist() == [[18.0, 3.0, 10.0, 8.0]]
    _, done = augment(torch.rand(1, 3, 20, 30), [{"boxes": torch.zeros(0, 4)}], data_keys=["input", "targets"])
    assert done[0]["boxes"].shape == (0, 4)
    records = [{"boxes": torch.zeros(0, 4)}, {"boxes": boxes}, {"boxes": torch.ones(1, 4)}]
    with pytest.raises(gpuaug.ArgumentError, match="boxes of sample 2 must be of the form of those of sample 1, got xyxy"):
        augment(torch.rand(3, 3, 20, 30), records, data_keys=["input", "targets"])
