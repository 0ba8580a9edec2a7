"""Advice about targets: target dicts, and targets that are found by their type, their shape or their values."""

import pathlib
import re
import tempfile

import numpy as np
import torch
from pycocotools import mask
from support.files.encoded import encoded
from support.messages.registry import example
from support.messages.values import BOXES, FLIP, FLIPPED, IMAGES, MASK, run, targets
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug


@example("Name the map 'mask'")
def label_map_as_class(told):
    labels, augment = torch.arange(2 * 64).view(2, 8, 8), gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, labels, data_keys=["input", "class"])
    assert torch.equal(augment(IMAGES, labels, data_keys=["input", "mask"])[1], labels.flip(-1))
    _, got = run((IMAGES, labels), gpuaug.TransformStage(augment, on={0: "input", 1: "mask"}))
    assert torch.equal(got, labels.flip(-1))


@example("Transforms of a dataset must receive decoded images")
def transform_left_in_a_dataset(told):
    with tempfile.TemporaryDirectory() as folder:
        path, transform = pathlib.Path(folder) / "image.png", v2.Compose([v2.Resize((16, 16)), FLIP])
        path.write_bytes(encoded(16, 16, "PNG"))
        with told:
            transform(gpuaug.read_encoded(path))
        batch = gpuaug.collate_encoded([(gpuaug.read_encoded(path), 1)])
    stages = [gpuaug.DecodeStage(), gpuaug.fuse(transform, ragged=True)]
    (got, _), (whole, _) = run(batch, *stages), run(batch, stages[0])
    assert torch.equal(got[0], whole[0].flip(-1))


@example("Arrays must be made of images")
def array_of_a_file_that_is_not_read(told):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "image.png"
        path.write_bytes(encoded(16, 16, "PNG"))
        with told:
            np.asarray(gpuaug.read_encoded(path))
        batch = gpuaug.collate_encoded([gpuaug.read_encoded(path)])
    transform = v2.CenterCrop(8)
    stages = [gpuaug.DecodeStage(), gpuaug.fuse(transform, ragged=True)]
    assert run(batch, *stages).shape == (1, 3, 8, 8)


@example("The transform received encoded images")
def function_of_encoded_images(told):
    batch = gpuaug.collate_encoded([encoded(16, 16, "PNG")])
    with told:
        run(batch, lambda images: images / 255)
    assert run(batch, gpuaug.DecodeStage(), lambda images: images[0] / 255).max() <= 1


def upright(boxes, form="XYXY", **options):
    return tv_tensors.BoundingBoxes(boxes, format=form, canvas_size=(8, 8), **options)


@example("must be axis-aligned, got …. Pass the boxes around their corners")
def rotated_boxes(told):
    augment = gpuaug.fuse(FLIP)
    rotated = upright(torch.tensor([[1.0, 2, 3, 3, 0]]), "XYWHR")
    with told:
        augment(IMAGES, [{"boxes": rotated}] * 2, data_keys=["input", "targets"])
    corners = v2.functional.convert_bounding_box_format(rotated, new_format="XYXYXYXY").view(-1, 4, 2)
    boxes = torch.cat((corners.amin(1), corners.amax(1)), 1)
    got = augment(IMAGES, [{"boxes": boxes}] * 2, data_keys=["input", "targets"])[1]
    assert got[0]["boxes"].tolist() == FLIPPED[0].tolist()


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


@example("Pass target dicts with the images: data_keys=['input', 'targets']")
def crop_by_boxes_without_dicts(told):
    augment = gpuaug.fuse([v2.RandomIoUCrop(), v2.Resize((8, 8))])
    with told:
        augment(IMAGES)
    got, followed = augment(IMAGES, targets(), data_keys=["input", "targets"])
    assert got.shape == (2, 3, 8, 8)
    assert len(followed) == 2


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
