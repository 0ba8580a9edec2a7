"""Advice about target dicts in a call of a fused pipeline, and about ``sanitize``."""

import re

import numpy as np
import torch
from messages.examples.fusion_inputs import BOXES, FLIP, FLIPPED, IMAGES, MASK, targets
from pycocotools import mask
from support.messages.registry import example
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug


@example("targets must hold one dict for each of the … images")
def too_few_dicts(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, targets()[:1], data_keys=["input", "targets"])
    assert torch.equal(augment(IMAGES, targets(), data_keys=["input", "targets"])[1][1]["boxes"], FLIPPED[1])


@example("pass the padded tensors as inputs with data keys: bbox_xyxy, valid")
def padded_boxes_in_one_dict(told):
    augment = gpuaug.fuse(FLIP)
    boxes, valid = torch.tensor([[[1.0, 2.0, 5.0, 6.0]]] * 2), torch.ones(2, 1, dtype=torch.bool)
    with told:
        augment(IMAGES, {"boxes": boxes, "valid": valid}, data_keys=["input", "targets"])
    _, _, out_valid = augment(IMAGES, boxes, valid, data_keys=["input", "bbox_xyxy", "valid"])
    assert out_valid.all()


@example("Put all annotations of an image into one")
def boxes_without_a_dict(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, list(BOXES), data_keys=["input", "targets"])
    dicts = [{"boxes": boxes, "labels": torch.tensor([1])} for boxes in BOXES]
    assert torch.equal(augment(IMAGES, dicts, data_keys=["input", "targets"])[1][0]["boxes"], FLIPPED[0])


@example("Convert it: torch.as_tensor(…)")
def boxes_in_lists(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, [{"boxes": boxes.tolist()} for boxes in BOXES], data_keys=["input", "targets"])
    dicts = [{"boxes": torch.as_tensor(boxes.tolist())} for boxes in BOXES]
    assert torch.equal(augment(IMAGES, dicts, data_keys=["input", "targets"])[1][0]["boxes"], FLIPPED[0])


@example("For an image without boxes, pass torch.zeros(0, 4)")
def image_without_boxes(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, [{"boxes": torch.tensor([])}, {"boxes": BOXES[1]}], data_keys=["input", "targets"])
    dicts = [{"boxes": torch.zeros(0, 4)}, {"boxes": BOXES[1]}]
    assert torch.equal(augment(IMAGES, dicts, data_keys=["input", "targets"])[1][1]["boxes"], FLIPPED[1])


@example("For an image without keypoints, pass torch.zeros(0, K, 3)")
def image_without_keypoints(told):
    augment, points = gpuaug.fuse(FLIP), torch.tensor([[[1.0, 2, 1]]])
    with told:
        augment(IMAGES, [{"keypoints": torch.tensor([])}, {"keypoints": points}], data_keys=["input", "targets"])
    dicts = [{"keypoints": torch.zeros(0, 1, 3)}, {"keypoints": points}]
    got = augment(IMAGES, dicts, data_keys=["input", "targets"])[1]
    assert got[0]["keypoints"].shape == (0, 1, 3)
    assert got[1]["keypoints"][0, 0, 0] in (6.0, 7.0)


@example("For an image without masks, pass torch.zeros(0, H, W)")
def image_without_masks(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, [{"masks": torch.tensor([])}, {"masks": MASK[1]}], data_keys=["input", "targets"])
    dicts = [{"masks": torch.zeros(0, 8, 8, dtype=MASK.dtype)}, {"masks": MASK[1]}]
    assert torch.equal(augment(IMAGES, dicts, data_keys=["input", "targets"])[1][1]["masks"], MASK[1].flip(-1))


@example("Stack the masks of one image: torch.stack(masks)")
def masks_of_an_image_in_a_list(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, [{"masks": list(mask)} for mask in MASK], data_keys=["input", "targets"])
    dicts = [{"masks": torch.stack(list(mask))} for mask in MASK]
    assert torch.equal(augment(IMAGES, dicts, data_keys=["input", "targets"])[1][0]["masks"], MASK[0].flip(-1))


@example("Convert the masks in the dataset: torch.from_numpy(…)")
def masks_in_arrays(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, [{"masks": mask.numpy()} for mask in MASK], data_keys=["input", "targets"])
    with told:
        augment(IMAGES, [{"masks": list(mask.numpy())} for mask in MASK], data_keys=["input", "targets"])
    for code in ("torch.from_numpy(masks)", "torch.from_numpy(np.stack(masks))"):
        masks = MASK[0].numpy() if "stack" not in code else list(MASK[0].numpy())
        dicts = [{"masks": eval(code, {"torch": torch, "np": np, "masks": masks})}] * 2
        assert torch.equal(augment(IMAGES, dicts, data_keys=["input", "targets"])[1][0]["masks"], MASK[0].flip(-1))


@example("Decode run lengths and polygons in the dataset, with pycocotools.mask")
def masks_of_coco(told):
    augment, height, width = gpuaug.fuse(FLIP), *IMAGES.shape[2:]
    expected = torch.zeros(1, height, width, dtype=torch.uint8)
    expected[:, 1:4, 1:3] = 1
    lengths = [{"size": [height, width], "counts": [height + 1, 3, height - 3, 3, (width - 3) * height + height - 4]}]
    text = mask.frPyObjects(lengths, height, width)
    text_as_json = [{**each, "counts": each["counts"].decode()} for each in text]
    for masks in (lengths, text, text_as_json, [[1.0, 1.0, 3.0, 1.0, 3.0, 4.0, 1.0, 4.0]], lengths[0], text[0]):
        with told:
            augment(IMAGES, [{"masks": masks}] * 2, data_keys=["input", "targets"])
        code = re.search(r"torch.from_numpy\(mask.decode\((.*)\)\).movedim\(2, 0\)", told.last)[1]
        found = eval(code, {"mask": mask, "masks": masks, "height": height, "width": width})
        decoded = torch.from_numpy(mask.decode(found)).movedim(2, 0)
        assert torch.equal(decoded, expected)
        got = augment(IMAGES, [{"masks": decoded}] * 2, data_keys=["input", "targets"])[1]
        assert torch.equal(got[0]["masks"], expected.flip(-1))


@example("Return a tensor (n, H, W) from the dataset")
def masks_that_are_none(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, [{"masks": 3}] * 2, data_keys=["input", "targets"])
    got = augment(IMAGES, [{"masks": MASK[0]}] * 2, data_keys=["input", "targets"])[1]
    assert torch.equal(got[0]["masks"], MASK[0].flip(-1))


@example("Resize the masks to that size")
def small_masks_of_an_image(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, [{"masks": mask[:, ::2, ::2]} for mask in MASK], data_keys=["input", "targets"])
    dicts = [{"masks": mask} for mask in MASK]
    assert torch.equal(augment(IMAGES, dicts, data_keys=["input", "targets"])[1][0]["masks"], MASK[0].flip(-1))


@example("Convert all masks of a batch to one dtype")
def masks_of_two_types(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, [{"masks": MASK[0]}, {"masks": MASK[1].bool()}], data_keys=["input", "targets"])
    dicts = [{"masks": mask.bool()} for mask in MASK]
    assert torch.equal(augment(IMAGES, dicts, data_keys=["input", "targets"])[1][0]["masks"], MASK[0].bool().flip(-1))


@example("must hold boxes or bbox, got both")
def boxes_twice(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, targets(bbox=BOXES[0]), data_keys=["input", "targets"])
    assert torch.equal(augment(IMAGES, targets(), data_keys=["input", "targets"])[1][0]["boxes"], FLIPPED[0])


@example("Leave valid out if all boxes are valid")
def valid_of_another_length(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, targets(valid=torch.ones(3, dtype=torch.bool)), data_keys=["input", "targets"])
    assert augment(IMAGES, targets(), data_keys=["input", "targets"])[1][0]["valid"].tolist() == [True]


@example("Pass target dicts with the images: data_keys=['input', 'targets']")
def crop_by_boxes_without_dicts(told):
    augment = gpuaug.fuse([v2.RandomIoUCrop(), v2.Resize((8, 8))])
    with told:
        augment(IMAGES)
    got, followed = augment(IMAGES, targets(), data_keys=["input", "targets"])
    assert got.shape == (2, 3, 8, 8)
    assert len(followed) == 2


@example(
    "targets must be a list of dicts or one dict of padded tensors",
    "targets… must be a dict",
    "must have the key 'valid'",
)
def sanitize_of_what_fuse_did_not_return(told):
    with told:
        gpuaug.sanitize(BOXES)
    with told:
        gpuaug.sanitize(list(BOXES))
    with told:
        gpuaug.sanitize(targets())
    _, followed = gpuaug.fuse(FLIP)(IMAGES, targets(), data_keys=["input", "targets"])
    assert torch.equal(gpuaug.sanitize(followed)[0]["boxes"], FLIPPED[0])


@example("Pass valid as gpuaug.fuse returned it")
def sanitize_of_another_valid(told):
    _, followed = gpuaug.fuse(FLIP)(IMAGES, targets(), data_keys=["input", "targets"])
    with told:
        gpuaug.sanitize([{**each, "valid": each["valid"].long()} for each in followed])
    assert torch.equal(gpuaug.sanitize(followed)[0]["boxes"], FLIPPED[0])


@example("labels_getter of … is not used")
def labels_getter_of_another_key(told):
    boxes = tv_tensors.BoundingBoxes([[5, 5, 5, 7], [1, 1, 6, 7]], format="XYXY", canvas_size=(8, 8))
    target = {"boxes": boxes, "cls": torch.tensor([3, 4])}
    getter = lambda sample: sample[1]["cls"]  # noqa: E731
    with told:
        gpuaug.fuse([v2.RandomHorizontalFlip(1.0), v2.SanitizeBoundingBoxes(labels_getter=getter)])
    augment = gpuaug.fuse([v2.RandomHorizontalFlip(1.0), v2.SanitizeBoundingBoxes()])
    _, targets = augment(torch.zeros(1, 3, 8, 8), [target], data_keys=["input", "targets"])
    assert gpuaug.sanitize(targets, per_box=["boxes", "masks", "cls"])[0]["cls"].tolist() == [4]
