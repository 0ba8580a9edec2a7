"""Messages whose advice is not code and that no test of a room reads: each is given for its mistake."""

from types import SimpleNamespace

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from support.batches.ragged import images_of, pack
from support.files.encoded import encoded
from support.files.encoded_files import png
from support.messages import registry
from support.messages.values import BOXES, FLIP, IMAGES, LABELS, MASK, TO_FLOAT, fuse_some, run, targets
from support.video.videos import video
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug.core.ragged import Ragged, Shapes

AUGMENT = gpuaug.fuse(FLIP)
MOVED = K.RandomHorizontalFlip(p=1.0)
TWO_SIZES = K.ImageSequential(MOVED, K.CenterCrop((4, 4), p=1.0), random_apply=1)
UNCLAMPED = {"boxes": tv_tensors.BoundingBoxes(BOXES[0], format="XYXY", canvas_size=(8, 8), clamping_mode=None)}
WHOLE_MASKS = tv_tensors.Mask(torch.zeros(2, 3, 8, 8))


def draw(module, shape=IMAGES.shape):
    return gpuaug.fuse(module).draw(shape, seed=1, dtype=IMAGES.dtype)


def clip_of_two_sizes():
    batch = pack(images_of([(20, 30), (20, 31)]))
    return Ragged(batch.data, batch.places, Shapes(batch.shapes.sizes, 3, "chw", frames=2))


MISTAKES = {
    "loader must be an iterable of batches, got …. Pass a DataLoader, a list or a generator.": lambda: gpuaug.StreamedLoader(3),
    "device must be a torch device": lambda: gpuaug.StreamedLoader([], device="gpu"),
    "source must be the path of a video or its bytes": lambda: gpuaug.read_clip(7),
    "sample must be the index of a drawn sample": lambda: draw(FLIP).of(99),
    "path must be …, got …. The suffix selects the format.": lambda: gpuaug.Timeline((), "cpu", 2).save("run.jpg"),
    "path must be a str or a path of pathlib, got …. Write 'timeline.png'.": lambda: gpuaug.Timeline((), "cpu", 2).save(3),
    "width_in must be …, got …. Lane names": lambda: gpuaug.Timeline((), "cpu", 2).figure(5),
    "must be finite, got …. Leave it out to begin": lambda: gpuaug.read_clip("a.mp4", 2, start_s=float("inf")),
    "Clips of a batch must have as many frames as the first, …, got … in …. Return the same number of frames from the "
    "dataset.": lambda: gpuaug.collate_ragged([IMAGES, IMAGES[:1]]),
    "Images of a batch must have the type and number of channels of the first": lambda: gpuaug.collate_ragged(
        [np.zeros((1, 1, 1), np.uint16), np.zeros((1, 1, 2), np.uint8)], channels=None
    ),
    "Clips must be gpuaug.read_clip(…) in all samples": lambda: gpuaug.collate_encoded([gpuaug.read_clip(video(), 2), 7]),
    "… must be a number, got …. Pass a float.": lambda: gpuaug.read_clip("a.mp4", 2, start_s="1 s"),
    "transforms that map one image to one image": lambda: gpuaug.fuse([FLIP, v2.ToPILImage()]),
    "… must return all images of a batch in one size, got …. Run it in the dataset, or make it return one size.": lambda: (
        fuse_some(v2.Compose([FLIP, lambda image: image[:, : 4 + image[0, 0, 0] // 100]]))(IMAGES)
    ),
    "A clip must be chosen by one of": lambda: gpuaug.read_clip("a.mp4", [1, 2], start_s=1),
    "step must be callable": lambda: gpuaug.profile(gpuaug.StreamedLoader([IMAGES], device="cpu"), 3),
    "backend must be 'auto', or name a decoder": lambda: run(
        gpuaug.collate_encoded([encoded(16, 16)]), gpuaug.DecodeStage(backend="engines")
    ),
    "Lower max_bytes or max_pixels": lambda: gpuaug.DecodeStage(max_pixels=2**62, max_bytes=2**62)(
        gpuaug.collate_encoded([png(2**31 - 1, 2**20)]), "cpu"
    ),
    "draws must be for images of the same shape": lambda: AUGMENT(IMAGES, draws=draw(FLIP, (2, 3, 9, 9))),
    "draws must come from the same pipeline, got draws of … modules for …. Draw with this module.": lambda: AUGMENT(
        IMAGES, draws=draw([FLIP, FLIP])
    ),
    "VideoSequential modules of one data_format": lambda: gpuaug.fuse(
        [K.VideoSequential(MOVED, same_on_frame=same) for same in (True, False)]
    ),
    "data_keys must be among …, got …. Use Kornia's names, 'targets' for target dicts, 'tv_tensors' for torchvision's "
    "tensors, or 'valid' beside boxes.": lambda: AUGMENT(IMAGES, MASK, data_keys=["input", "segmentation"]),
    "data_keys must contain 'input'": lambda: AUGMENT(MASK, data_keys=["mask"]),
    "mask must hold masks for each": lambda: AUGMENT(IMAGES, [MASK[0]], data_keys=["input", "mask"]),
    "must return images of …, the size that was drawn": lambda: fuse_some([nn.AvgPool2d(2), MOVED])(IMAGES),
    "where … has no num_classes, got …. Pass the class index": lambda: gpuaug.fuse([TO_FLOAT, v2.MixUp()])(
        IMAGES, torch.ones(3, 4) / 4, data_keys=["input", "class"]
    ),
    "pipeline must be an instance, got the class …. Call it first: …(…).": lambda: gpuaug.fuse(v2.RandomHorizontalFlip),
    "label_smoothing must be in [0, 1)": lambda: gpuaug.fuse(FLIP, label_smoothing=1.0, num_classes=3),
    "pipeline must return all views in one size": lambda: [fuse_some(TWO_SIZES, views=2)(IMAGES) for _ in range(30)],
    "targets must hold one dict for each of the … images, got …. Pass one dict per image.": lambda: AUGMENT(
        IMAGES, targets()[:1], data_keys=["input", "targets"]
    ),
    "mask must have the size of the images, …, got …. Resize the mask to that size.": lambda: AUGMENT(
        IMAGES, MASK[..., :4], data_keys=["input", "mask"]
    ),
    "valid of sample … must be one bool for each of its … boxes, got …. Pass valid as gpuaug.fuse returned it.": lambda: (
        gpuaug.sanitize(targets(valid=torch.tensor([True, False, True])))
    ),
    "must hold one entry for each of the … boxes if per_box names it": lambda: gpuaug.sanitize(
        targets(valid=torch.tensor([True]), tracks=torch.arange(3)), per_box=["boxes", "tracks"]
    ),
    "targets must be a list of dicts or one dict": lambda: gpuaug.sanitize(BOXES),
    "targets… must be a dict, got …. Pass the target dicts that gpuaug.fuse returned.": lambda: gpuaug.sanitize(list(BOXES)),
    "valid… must be torch.bool": lambda: gpuaug.sanitize(targets(valid=torch.tensor([1]))),
    "per_box must be a list of keys": lambda: gpuaug.sanitize(targets(valid=torch.tensor([True])), per_box="boxes"),
    "A list of masks, boxes or keypoints must hold one element": lambda: run((IMAGES, [WHOLE_MASKS] * 3), AUGMENT),
    "dict for each of the … frames of a clip": lambda: AUGMENT(
        torch.rand(2, 3, 3, 8, 8), [[{"boxes": BOXES[0]}] * 2] * 2, data_keys=["input", "targets"]
    ),
    "frames of a clip in a ragged batch must have one size": lambda: gpuaug.fuse(v2.Resize((8, 8)), ragged=True)(
        clip_of_two_sizes()
    ),
    "format of … must be XYXY, XYWH or CXCYWH": lambda: gpuaug.fuse([FLIP, v2.ConvertBoundingBoxFormat("XYWHR")]),
    "dtype of … must be set for images and masks only": lambda: gpuaug.fuse(
        [FLIP, v2.ToDtype({tv_tensors.BoundingBoxes: torch.int64}, scale=True)]
    ),
    "must follow all transforms that move pixels": lambda: gpuaug.fuse([v2.SanitizeBoundingBoxes(), v2.CenterCrop(4)]),
    "Boxes are always clipped to the image": lambda: AUGMENT(IMAGES, [UNCLAMPED] * 2, data_keys=["input", "targets"]),
    "End the method with: return self": lambda: run((IMAGES, SimpleNamespace(to=lambda device: None))),
    "into must be left out with on=None": lambda: gpuaug.TransformStage(torch.negative, on=None, into=1),
    "must name at least one member of the batch": lambda: gpuaug.TransformStage(torch.negative, on=()),
    "must be a key, an index or a tuple of them": lambda: gpuaug.TransformStage(torch.negative, on=[0, 1]),
    "on must map members to names": lambda: gpuaug.TransformStage(AUGMENT, on={0: 0.5}),
    "on must name a member of the batch, a … of …, got …. Leave on out.": lambda: run(
        LABELS, gpuaug.TransformStage(torch.negative, on=1)
    ),
    "into must name members of a …, got": lambda: run(LABELS, gpuaug.TransformStage(torch.negative, into=1)),
    "… no longer match the images, because … transforms the images without them": lambda: run((IMAGES, targets()), AUGMENT),
    "on must name a member of the batch, a … of …, got …. It has ….": lambda: run(
        (IMAGES, LABELS), gpuaug.TransformStage(torch.negative, on=2)
    ),
    "name must be a non-empty string": lambda: gpuaug.TransformStage(torch.negative, name=""),
    "transform must be an instance, got the class …. Call it first: …(…).": lambda: gpuaug.TransformStage(nn.Flatten),
    "transform must be a callable or nn.Module": lambda: gpuaug.TransformStage(3),
    "Pass a function of tensors to a TransformStage": lambda: gpuaug.FeatureStage(torch.negative),
    "folder must be a path": lambda: gpuaug.FeatureCache(3),
    "views must be": lambda: gpuaug.FeatureCache("cache", views=0),
    "key must be a member's name or index": lambda: gpuaug.FeatureCache("cache").wrap([1], key=[2]),
    "dataset must be a data set or an iterable": lambda: gpuaug.FeatureCache("cache").wrap(3),
    "cache must be a gpuaug.FeatureCache": lambda: gpuaug.FeatureStage(nn.Identity(), cache="cache"),
    "encoder must be an nn.Module, a bound method of one, or a mapping of names to such encoders, got …. ….": lambda: (
        gpuaug.FeatureStage(torch.export.export(nn.Tanh(), (torch.ones(2),)))
    ),
    "Make it a submodule of an nn.Module whose forward": lambda: gpuaug.FeatureStage(nn.ModuleList()),
    "shapes must be a list of shapes or tensors": lambda: gpuaug.FeatureStage(nn.Identity()).capture(torch.ones(2, 3)),
    "shapes must hold shapes, tensors or tuples": lambda: gpuaug.FeatureStage(nn.Identity()).capture([2.0]),
}


@pytest.mark.parametrize("part", MISTAKES)
def test_a_mistake_is_told(part):
    with registry.Told((part,)):
        MISTAKES[part]()
