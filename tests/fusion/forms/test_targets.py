"""Target dicts, as detection models take them, against Kornia and torchvision on the same draws."""

import kornia.augmentation as K
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import internals
from support.batches.pairwise import sweep
from support.comparison.replay import left_to_kornia, photographs
from support.comparison.values import assert_values
from support.gpu.launches import Launches
from support.targets.detection import PIPELINES, boxes_of, corners, follow_targets, records_of, through_kornia, upright

import gpuaug

tv_tensors = pytest.importorskip("torchvision.tv_tensors")
F = pytest.importorskip("torchvision.transforms.v2.functional")

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


@pytest.mark.parametrize(("name", "p"), sweep(PIPELINES, [0.5, 0.0, 1.0]))
@left_to_kornia
def test_target_masks_equal_padded_masks(name, p):
    modules, records = [*PIPELINES[name](p), K.RandomErasing((0.1, 0.4), p=0.5)], records_of()
    _, got, draws = follow_targets(modules, records)
    padded = torch.zeros(5, 6, 32, 48, dtype=torch.uint8)
    for sample, record in enumerate(records):
        padded[sample, : len(record["masks"])] = record["masks"]
    _, expected = gpuaug.fuse(K.AugmentationSequential(*modules))(
        photographs(5), padded, data_keys=["input", "mask"], draws=draws
    )
    for sample, record in enumerate(got):
        assert_values(record["masks"], expected[sample, : len(record["masks"])])
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
def test_target_boxes_equal_torchvision(module, theirs):
    # Within the image: torchvision moves an edge that lies outside of it onto the frame at every step.
    given_boxes = [boxes.clamp(min=0).minimum(torch.tensor([48.0, 32.0] * 2)) for boxes in boxes_of(seed=3)]
    size, got, draws = follow_targets([module], [{"boxes": boxes} for boxes in given_boxes])
    for sample, (boxes, made) in enumerate(zip(given_boxes, got, strict=True)):
        dressed = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(32, 48), clamping_mode=None)
        expected = theirs(internals.drawn(draws)[0], sample, dressed)
        assert expected.canvas_size == size
        expected = F.clamp_bounding_boxes(expected, clamping_mode="hard")
        torch.testing.assert_close(made["boxes"], expected.as_subclass(torch.Tensor), atol=1e-4, rtol=0)
        _, valid = F.sanitize_bounding_boxes(expected)
        assert_values(made["valid"], valid)


@given(st.lists(st.tuples(*[st.integers(0, 31)] * 4), max_size=5), st.booleans(), st.booleans())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_two_flips_leave_target_boxes_unchanged(corners_given, across, down):
    boxes = torch.tensor([[min(a, c), min(b, d), max(a, c) + 1, max(b, d) + 1] for a, b, c, d in corners_given])
    records = [{"boxes": boxes.reshape(-1, 4).float(), "masks": torch.zeros(len(boxes), 32, 48)}]
    modules = [K.RandomHorizontalFlip(p=1.0) for _ in range(2 * across)] + [
        K.RandomVerticalFlip(p=1.0) for _ in range(2 * down)
    ]
    _, got, _ = follow_targets([*modules, K.RandomInvert(p=1.0)], records)
    assert_values(got[0]["boxes"], records[0]["boxes"])
    assert got[0]["valid"].all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32], ids=str)
def test_mask_lists_equal_padded_masks(dtype):
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
        assert_values(made, expected)


@pytest.mark.parametrize("pick", ["batch", "sample"])
@left_to_kornia
def test_policies_move_target_boxes(pick):
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


def test_targets_in_a_loader_are_the_same_at_every_depth():
    batches = [{"image": photographs(3, seed=seed), "labels": records_of(3, seed=seed), "name": "a"} for seed in range(3)]
    stage = gpuaug.TransformStage(gpuaug.fuse(PIPELINES["DETR"](0.5)), on={"image": "input", "labels": "targets"})
    seen = [list(gpuaug.StreamedLoader(batches, [stage], device="cpu", depth=depth, seed=7)) for depth in (0, 2)]
    for one, other in zip(*seen, strict=True):
        assert one["name"] == "a"
        for record, same in zip(one["labels"], other["labels"], strict=True):
            for key in ("boxes", "masks", "keypoints", "valid"):
                assert_values(record[key], same[key])
            assert record["masks"].shape[1:] == (44, 50)


def test_target_launches_do_not_grow_with_the_batch_or_synchronise():
    counted = []
    augment = gpuaug.fuse(PIPELINES["flips"](0.5))
    for batch in (2, 8):
        images, records = photographs(batch), records_of(batch)
        draws = augment.draw(images.shape, seed=0)
        with Launches() as launches:
            augment(images, records, data_keys=KEYS, draws=draws)
        counted.append(launches.names)
    assert counted[0] == counted[1]
