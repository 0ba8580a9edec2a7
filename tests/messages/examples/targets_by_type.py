"""Advice about targets that are found by their type, their shape or their values."""

import pathlib
import tempfile

import numpy as np
import torch
from support.batches.ragged import images_of, pack
from support.files.encoded import encoded
from support.messages.registry import example
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug.core.ragged import Ragged, Shapes

IMAGES = torch.arange(2 * 3 * 8 * 8, dtype=torch.uint8).view(2, 3, 8, 8)
FLIP = v2.RandomHorizontalFlip(1.0)
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
BOXES = torch.tensor([[[1.0, 2, 4, 5]], [[2.0, 1, 6, 6]]])
FLIPPED = torch.tensor([[[4.0, 2, 7, 5]], [[2.0, 1, 6, 6]]])
"""Boxes after a horizontal flip of images of 8 x 8 pixels."""


def run(batch, *stages):
    """What a batch becomes in stages."""
    (got,) = gpuaug.StreamedLoader([batch], stages, device="cpu")
    return got


@example("Put tensors that hold all images into a dict, not into a list")
def whole_tensors_in_a_list(told):
    masks = tv_tensors.Mask(torch.arange(3 * 64).view(1, 3, 8, 8).expand(2, 3, 8, 8))
    augment = gpuaug.fuse(FLIP)
    with told:
        run((IMAGES, [masks, masks, masks]), augment)
    _, got = run((IMAGES, {"first": masks, "second": masks}), augment)
    assert torch.equal(got["second"], masks.flip(-1))


@example("Resize boxes with their image")
def boxes_of_another_canvas(told):
    def box(value, size):
        return tv_tensors.BoundingBoxes(torch.tensor([value]), format="XYXY", canvas_size=size)

    augment = gpuaug.fuse(FLIP)
    large, boxes = torch.zeros(2, 3, 16, 16, dtype=torch.uint8), box([2.0, 4, 8, 10], (16, 16))
    with told:
        run((IMAGES, [{"boxes": boxes}] * 2), gpuaug.TransformStage(augment, on={0: "input", 1: "targets"}))
    samples = [v2.Resize((8, 8))(tv_tensors.Image(image), {"boxes": boxes}) for image in large]
    batch = torch.stack([image for image, _ in samples]), [target for _, target in samples]
    _, got = run(batch, gpuaug.TransformStage(augment, on={0: "input", 1: "targets"}))
    assert got[0]["boxes"].tolist() == [[4, 2, 7, 5]]


@example("Name the map 'mask'")
def label_map_as_class(told):
    labels, augment = torch.arange(2 * 64).view(2, 8, 8), gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, labels, data_keys=["input", "class"])
    assert torch.equal(augment(IMAGES, labels, data_keys=["input", "mask"])[1], labels.flip(-1))
    _, got = run((IMAGES, labels), gpuaug.TransformStage(augment, on={0: "input", 1: "mask"}))
    assert torch.equal(got, labels.flip(-1))


@example("Pass all keys that hold one entry per box: per_box=")
def entries_of_an_unknown_key(told):
    targets = [
        {"boxes": torch.zeros(n, 4), "tracks": torch.arange(n), "valid": torch.arange(n) > 0, "size": torch.tensor([8, 8])}
        for n in (2, 3)
    ]
    with told:
        gpuaug.sanitize(targets)
    kept = gpuaug.sanitize(targets, per_box=("boxes", "tracks"))
    assert [each["tracks"].tolist() for each in kept] == [[1], [1, 2]]
    assert kept[0]["size"].tolist() == [8, 8]


@example("End the method with: return self")
def moving_method_that_returns_nothing(told):
    class Moves:
        def to(self, device):
            pass

    with told:
        run((IMAGES, Moves()))

    class Returns:
        def to(self, device):
            return self

    assert isinstance(run((IMAGES, Returns()))[1], Returns)


@example("Transforms of a dataset must receive images")
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


@example("Leave … out for batches with")
def mix_beside_boxes_in_a_stage(told):
    boxes = [{"boxes": torch.tensor([[1.0, 2, 4, 5]])}] * 2
    mix = gpuaug.fuse([TO_FLOAT, v2.MixUp(num_classes=3)])
    with told:
        run((IMAGES, torch.tensor([0, 1]), boxes), gpuaug.TransformStage(mix, on={0: "input", 1: "class"}))
    without = gpuaug.fuse([TO_FLOAT, v2.RandomInvert()])
    run((IMAGES, torch.tensor([0, 1]), boxes), without)
    transform = gpuaug.fuse([TO_FLOAT, v2.MixUp(num_classes=3)])
    run((IMAGES, torch.tensor([0, 1]), boxes), lambda images: transform(images))


@example("Pass one dict per clip, or one dict per frame")
def dicts_of_another_number_of_frames(told):
    clips, boxes = torch.rand(2, 3, 3, 8, 8), torch.tensor([[1.0, 2, 4, 5]])
    keys = ["input", "targets"]
    with told:
        gpuaug.fuse(FLIP)(clips, [[{"boxes": boxes}] * 2] * 2, data_keys=keys)
    _, of_clips = gpuaug.fuse(FLIP)(clips, [{"boxes": boxes}] * 2, data_keys=keys)
    _, of_frames = gpuaug.fuse(FLIP)(clips, [[{"boxes": boxes}] * 3] * 2, data_keys=keys)
    assert all(
        torch.equal(frame["boxes"], clip["boxes"]) for clip, frames in zip(of_clips, of_frames, strict=True) for frame in frames
    )


@example("Resize the frames of each clip in the dataset")
def frames_of_two_sizes(told):
    sizes = [(20, 30), (20, 31)]
    batch = pack(images_of(sizes))
    mixed = Ragged(batch.data, batch.places, Shapes(batch.shapes.sizes, 3, "chw", frames=2))
    with told:
        gpuaug.fuse(v2.Resize((8, 8)), ragged=True)(mixed)
    resized = pack([v2.Resize((20, 30))(image) for image in images_of(sizes)])
    clips = Ragged(resized.data, resized.places, Shapes(resized.shapes.sizes, 3, "chw", frames=2))
    assert gpuaug.fuse(v2.Resize((8, 8)), ragged=True)(clips).shape == (1, 2, 3, 8, 8)


@example("per_box must be a list of keys")
def one_key_as_text(told):
    targets = [{"boxes": torch.zeros(2, 4), "valid": torch.tensor([True, False]), "labels": torch.arange(2)}]
    with told:
        gpuaug.sanitize(targets, per_box="boxes")
    assert gpuaug.sanitize(targets, per_box=["boxes", "labels"])[0]["labels"].tolist() == [0]


def upright(boxes, form="XYXY", **options):
    return tv_tensors.BoundingBoxes(boxes, format=form, canvas_size=(8, 8), **options)


@example("Convert all boxes to one format in the dataset")
def boxes_of_two_forms(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, [{"boxes": upright(BOXES[0])}, {"boxes": upright(BOXES[1], "XYWH")}], data_keys=["input", "targets"])
    convert = v2.functional.convert_bounding_box_format
    dicts = [{"boxes": upright(BOXES[0])}, {"boxes": convert(upright(BOXES[1], "XYWH"), new_format="XYXY")}]
    assert augment(IMAGES, dicts, data_keys=["input", "targets"])[1][0]["boxes"].tolist() == FLIPPED[0].tolist()


@example("boxes of sample … must be axis-aligned")
def rotated_boxes(told):
    augment = gpuaug.fuse(FLIP)
    rotated = upright(torch.tensor([[1.0, 2, 3, 3, 0]]), "XYWHR")
    with told:
        augment(IMAGES, [{"boxes": rotated}] * 2, data_keys=["input", "targets"])
    corners = v2.functional.convert_bounding_box_format(rotated, new_format="XYXYXYXY").view(-1, 4, 2)
    boxes = torch.cat((corners.amin(1), corners.amax(1)), 1)
    got = augment(IMAGES, [{"boxes": boxes}] * 2, data_keys=["input", "targets"])[1]
    assert got[0]["boxes"].tolist() == FLIPPED[0].tolist()


@example("Boxes are always clipped to the image: leave clamping_mode out")
def boxes_without_clamping(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, [{"boxes": upright(BOXES[0], clamping_mode=None)}] * 2, data_keys=["input", "targets"])
    got = augment(IMAGES, [{"boxes": upright(BOXES[0])}] * 2, data_keys=["input", "targets"])[1]
    assert got[0]["boxes"].tolist() == FLIPPED[0].tolist()


@example("if per_box names it, got … with …. Leave … out of per_box")
def other_entries_than_boxes(told):
    targets = [{"boxes": torch.zeros(2, 4), "valid": torch.tensor([True, False]), "tracks": torch.arange(3)}]
    with told:
        gpuaug.sanitize(targets, per_box=["boxes", "tracks"])
    assert gpuaug.sanitize(targets, per_box=["boxes"])[0]["tracks"].tolist() == [0, 1, 2]


@example("leave other keys out of per_box")
def values_of_other_images_in_a_padded_dict(told):
    boxes = torch.zeros(1, 2, 4)
    targets = {"boxes": boxes, "valid": torch.tensor([[True, False]]), "tracks": np.array([[5, 6], [7, 8]])}
    with told:
        gpuaug.sanitize(targets, per_box=["boxes", "tracks"])
    assert gpuaug.sanitize(targets, per_box=["boxes"])[0]["tracks"] is targets["tracks"]
    with told:
        gpuaug.sanitize({**targets, "boxes": boxes.repeat(2, 1, 1)})


@example("Convert the masks before the call to a type that holds the fill")
def padding_out_of_the_range_of_masks(told):
    masks = torch.ones(2, 8, 8, dtype=torch.uint8)
    augment = gpuaug.fuse(v2.Pad(1, fill={tv_tensors.Mask: -100, "others": 0}))
    with told:
        augment(IMAGES, masks, data_keys=["input", "mask"])
    assert augment(IMAGES, masks.long(), data_keys=["input", "mask"])[1].unique().tolist() == [-100, 1]


@example("Put tensors that hold all images into a dict, and tensors of one image into a dict for each image")
def two_maps_of_two_images(told):
    masks = tv_tensors.Mask(torch.arange(64).view(1, 8, 8).expand(2, 8, 8))
    augment = gpuaug.fuse(FLIP)
    with told:
        run((IMAGES, (masks, masks)), augment)
    _, got = run((IMAGES, {"first": masks, "second": masks}), augment)
    assert torch.equal(got["second"], masks.flip(-1))
    _, got = run((IMAGES, [{"masks": masks}, {"masks": masks}]), augment)
    assert torch.equal(got[1]["masks"], masks.flip(-1))


@example("Pass such labels, or leave … out of data_keys")
def no_labels_of_several_views(told):
    augment, keys = gpuaug.fuse(FLIP, views=2), ["input", "class"]
    with told:
        augment(IMAGES, None, data_keys=keys)
    assert augment(IMAGES, [5, 6], data_keys=keys)[1] == [5, 6, 5, 6]
    assert augment(IMAGES, data_keys=["input"]).shape == (4, 3, 8, 8)


@example("Leave all but one of them out")
def two_sets_of_boxes_for_a_crop(told):
    augment, keys = gpuaug.fuse([v2.RandomIoUCrop(), v2.Resize((4, 4))]), ["input", "targets"]
    records = [{"boxes": upright(BOXES[0]), "second": upright(BOXES[1])}] * 2
    with told:
        augment(IMAGES, records, data_keys=keys)
    one_set = [{"boxes": record["boxes"]} for record in records]
    assert augment(IMAGES, one_set, data_keys=keys)[0].shape == (2, 3, 4, 4)
