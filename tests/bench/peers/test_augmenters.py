from contextlib import ExitStack

import pytest
import torch
from support.comparison.replay import left_to_kornia
from torchvision import tv_tensors

from bench.data.target_batches import Batch
from bench.peers import augmenters

pytestmark = left_to_kornia  # RandAugment as its users have it, equalize and auto_contrast included


ELSEWHERE = {"fuse-augmentations", "DALI", "Kornia compiled", "gpuaug, streamed", "gpuaug, hand-over"}
"""Rows that take a library that may be missing, minutes, or other images, or that augment nothing."""

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", augmenters.cases(32), ids=lambda case: case.name)
def test_every_row_gives_the_same_shape_and_layout(case):
    batch = augmenters.random_inputs(case, 3, 32, CPU)
    for name in set(augmenters.row_names(case)) - ELSEWHERE:
        with ExitStack() as stack:
            outputs = augmenters.create_call(name, case, batch, stack)()
        images, *annotations = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        assert images.shape == (3, 3, case.out, case.out), name
        assert images.dtype == case.dtype, name
        assert images.is_contiguous(memory_format=case.memory_format), name
        if case.masks:
            assert [(mask.shape, mask.dtype) for mask in annotations] == [((3, 1, case.out, case.out), case.masks)], name
        assert bool(annotations) == bool(case.masks or case.boxes), name


def squares(size, count):
    """Black images with a bright rectangle and its box; some have a second box without width or height."""
    images, targets = torch.zeros(count, 3, size, size, dtype=torch.uint8), []
    for index in range(count):
        left, top, right, bottom = 8 + 3 * index, 12 + 2 * index, 34 + 2 * index, 36 + index
        images[index, :, top:bottom, left:right] = 255
        boxes = torch.tensor([[left, top, right, bottom], [3, 3, 3, 3]][: 1 + index % 2], dtype=torch.float32)
        boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(size, size))
        targets.append({"boxes": boxes, "labels": torch.full((len(boxes),), index)})
    return Batch(images, None, targets)


def boxes_of(outputs):
    """The first box of each image, (8, 4); all 0 where it was dropped."""
    _, targets, *valid = outputs
    if isinstance(targets, torch.Tensor):
        return targets[:, 0] * (valid[0][:, :1] if valid else 1)
    if isinstance(targets, dict):
        labels, owners = targets["labels"].T
        assert torch.equal(labels, owners)
        targets = [{"boxes": targets["boxes"][owners == index], "labels": labels[owners == index]} for index in range(8)]
    first_boxes = torch.zeros(8, 4)
    for index, target in enumerate(targets):
        assert len(target["labels"]) == len(target["boxes"]) <= 1, "a second box has no width"
        first_boxes[index, :] = target["boxes"].sum(0)
    return first_boxes


FOLLOWING = [
    pytest.param(case, name, id=f"{case.name}, {name}")
    for case in augmenters.cases(64)
    if case.name in ("hflip", "lsj")  # a bright rectangle can be found again
    for name in augmenters.row_names(case)
    if name != augmenters.HAND_OVER  # it returns the images uint8, as they are
]


@pytest.mark.parametrize(("case", "name"), FOLLOWING)
def test_boxes_follow_the_pixels(case, name):
    if name == "DALI":
        pytest.importorskip("nvidia.dali")
    torch.manual_seed(0)
    boxes_checked = 0
    with ExitStack() as stack:
        call = augmenters.create_call(name, case, squares(64, 8), stack)
        for _ in range(3):
            outputs = call()
            for image, box in zip(outputs[0], boxes_of(outputs), strict=True):
                if (box[2:] - box[:2]).min() < 3:
                    continue
                bright = image.amin(0) > 0.75  # what pads is darker
                rows, columns = bright.any(1).nonzero()[:, 0], bright.any(0).nonzero()[:, 0]
                corners = torch.stack((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1))
                # Kornia counts a box's last pixel in, which is up to two pixels here, and a resize blurs edges by one.
                assert (box - corners).abs().max() < 3, (box, corners)
                boxes_checked += 1
    assert boxes_checked > 5
