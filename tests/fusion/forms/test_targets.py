"""Target dicts, as detection models take them, against Kornia and torchvision on the same draws."""

import pytest
import torch
from support.batches.pairwise import sweep
from support.comparison.replay import left_to_kornia, photographs
from support.comparison.values import assert_values
from support.gpu.launches import Launches
from support.targets.detection import PIPELINES, corners, follow_targets, records_of, through_kornia, upright

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
