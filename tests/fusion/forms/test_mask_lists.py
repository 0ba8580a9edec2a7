"""Masks of images of several sizes, in one launch: as if each were on its own."""

import kornia.augmentation as K
import pytest
import torch
from support.comparison.values import assert_values
from support.targets.detection import masks
from support.targets.mask_lists import COUNTS, PIPELINES, SIDES, listed, rows_of
from torchvision.transforms import v2

import gpuaug
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.ops.boxes import BoxFormat, BoxMapping


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("name", PIPELINES)
def test_mask_list_of_several_sizes_equals_each_mask_alone(name, dtype):
    plan, tables = rows_of(PIPELINES[name])
    given = [masks(n, *sides, dtype=dtype, seed=n) for n, sides in zip(COUNTS, SIDES, strict=True)]
    given[1] = masks(*SIDES[1], dtype=dtype)
    together, counts = listed(given)
    together.run(plan, torch.cat(tables), ())
    for mask, table, made in zip(given, tables, together.values[:, 0].split(counts), strict=True):
        alone = mask[None] if mask.ndim == 3 else mask[None, None]
        for step in plan.passes:
            alone = dispatch.run_mask(step, alone, table)
        assert made.dtype is dtype
        assert_values(made, alone[0])
        assert made.bool().any()


def test_mask_list_without_masks():
    plan, tables = rows_of(PIPELINES["resized crop"])
    empty, counts = listed([torch.zeros(0, *sides) for sides in SIDES])
    empty.run(plan, torch.cat(tables), ())
    assert (tuple(empty.values.shape), counts) == ((0, 1, 20, 24), [0, 0, 0])


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("order", [(0, 0, 2), (0, 2, 0), (2, 0, 1)], ids=str)
def test_images_without_masks_may_have_masks_of_another_type(order, dtype, ragged):
    sizes = SIDES if ragged else [(32, 48)] * 3
    images = [torch.zeros(3, *size) for size in sizes]
    batch = gpuaug.collate_ragged([image.byte() for image in images]) if ragged else torch.stack(images)
    given = [masks(n, *size, dtype=dtype, seed=n) if n else torch.zeros(0, *size) for n, size in zip(order, sizes, strict=True)]
    augment = gpuaug.fuse([K.RandomHorizontalFlip(p=1.0), K.CenterCrop((16, 16))], ragged=ragged)
    _, got = augment(batch, [{"masks": mask} for mask in given], data_keys=["input", "targets"])
    _, expected = augment(batch, [{"masks": mask.to(dtype)} for mask in given], data_keys=["input", "targets"])
    for record, other in zip(got, expected, strict=True):
        assert record["masks"].dtype is dtype
        assert_values(record["masks"], other["masks"])


def test_normalized_boxes_are_scaled_by_their_own_image():
    places = torch.tensor([[0, *sides] for sides in SIDES])
    records = [{"boxes": torch.tensor([[0.5, 0.5, 0.5, 0.5]] * n).view(-1, 4)} for n in COUNTS]
    batch = gpuaug.collate_ragged([torch.zeros(3, *sides, dtype=torch.uint8) for sides in SIDES])
    augment = gpuaug.fuse(v2.CenterCrop((200, 100)), ragged=True, boxes="cxcywh_share")
    _, got = augment(batch, records, data_keys=["input", "targets"])
    for (height, width), made in zip(SIDES, got, strict=True):
        expected = torch.tensor([0.5, 0.5, width / 200, height / 400])
        torch.testing.assert_close(made["boxes"][:, 2:], expected[2:].expand(len(made["boxes"]), 2), atol=1e-6, rtol=0)
    padded = torch.tensor([[[0.5, 0.5, 0.5, 0.5]]] * 3)
    form = BoxFormat("centre", edges=True, share=True)
    way = BoxMapping(form, BoxFormat("corners", edges=True), torch.eye(3).expand(3, 3, 3), places, (200, 100))
    made, _ = dispatch.map_boxes(padded, None, way, torch.float32)
    expected = torch.tensor([[w / 4, h / 4, 3 * w / 4, 3 * h / 4] for h, w in SIDES])
    torch.testing.assert_close(made[:, 0], expected)
