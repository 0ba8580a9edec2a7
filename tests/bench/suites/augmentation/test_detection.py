import pytest
import torch
from support.bench.commands import assert_runs_on_a_gpu, measure_suite

from bench.data.scenes import Scenes
from bench.suites.augmentation import detection


def test_detection_has_its_rows_with_whatever_follows(tmp_path):
    made = measure_suite("detection", tmp_path, "--size", "24", "--side", "48", "--batch", "2,3")
    rows = ["torchvision, workers", "Kornia, image by image", "gpuaug, workers", "gpuaug"]
    sizes = {(row["case"], row["batch_size"]) for row in made["rows"]}
    assert sizes == {("images", 2), ("boxes", 2), ("boxes and masks", 2), ("boxes and masks", 3)}
    for case, size in sizes:
        assert [row["name"] for row in made["rows"] if (row["case"], row["batch_size"]) == (case, size)] == rows


def test_scenes_have_objects_inside_their_images():
    scenes = Scenes(60, ("boxes", "labels", "masks"), count=30)
    shapes = set()
    for image, target in scenes:
        height, width = image.shape[1:]
        shapes.add((height > width, height, width))
        boxes, masks = target["boxes"], target["masks"]
        assert max(height, width) == 60
        assert len(boxes) == len(target["labels"]) == len(masks) >= 1
        assert (boxes[:, :2] >= 0).all()
        assert (boxes[:, 2:] <= torch.tensor([width, height])).all()
        assert (boxes[:, 2:] > boxes[:, :2]).all()
        assert masks.shape[1:] == (height, width)
        for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
            assert mask.sum() == mask[top:bottom, left:right].sum() > 0
    assert len(shapes) > 4
    assert 3 < sum(len(target["labels"]) for _, target in scenes) / 30 < 11


@pytest.mark.parametrize("keys", [(), ("boxes", "labels"), ("boxes", "labels", "masks")], ids=len)
def test_peers_of_detection_take_what_there_is(keys):
    scenes = Scenes(48, keys, count=3)
    on_worker = scenes.transformed(detection.OnWorker(24))
    images, targets = detection.stacked([on_worker[index] for index in range(3)])
    assert images.shape == (3, 3, 24, 24)
    for target in targets:
        assert set(target) == set(keys)
        assert {type(value) for value in target.values()} <= {torch.Tensor}
        assert len({len(value) for value in target.values()}) <= 1
    found = detection.one_by_one(24, scenes.items)
    first = found[0] if keys else [found[0]]
    assert first[0].shape == (1, 3, 24, 24)
    assert len(first) == 1 + ("boxes" in keys) + ("masks" in keys)
    if "masks" in keys:
        assert first[2].shape == (1, len(scenes.items[0][1]["masks"]), 24, 24)


@pytest.mark.gpu
def test_detection_runs_on_a_gpu():
    assert_runs_on_a_gpu(detection.main, "--side", "80")
