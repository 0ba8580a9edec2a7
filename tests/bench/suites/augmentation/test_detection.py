import torch

from bench.data.scenes import Scenes


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
