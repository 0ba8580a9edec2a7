"""Pictures of ``gpuaug.show`` on photographs, one per task, written into docs/images.

    python -m bench show

Boxes, masks and keypoints belong to objects in scikit-image's photographs, so that a misplaced one is visible.
"""

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from math import cos, radians, sin
from pathlib import Path
from typing import NamedTuple

import kornia.augmentation as K
import numpy as np
import torch
from PIL import Image, ImageOps
from skimage import data
from torch import Tensor
from torch.utils.data import DataLoader, Subset

import gpuaug
from bench.figures.pictures import IMAGES, save
from gpuaug.benchkit.photos import class_folders, photographs

SIDE_PX = 192
_MEAN, _STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
_SEED = 7

# One crop of each of six photographs.
_PHOTOGRAPH_NAMES = ("astronaut/001", "camera/002", "chelsea/004", "coffee/003", "motorcycle_left/003", "rocket/003")


class Ellipse(NamedTuple):
    """An elliptical object in pixels of its photograph: centre, half axes, and clockwise angle of the first axis."""

    name: str
    x: float
    y: float
    across: float
    down: float
    degrees: float = 0.0


class Photograph(NamedTuple):
    """A photograph of scikit-image, the square region that is used, two objects and two keypoints."""

    load: Callable[[], np.ndarray]
    left: int
    top: int
    side: int
    objects: tuple[Ellipse, Ellipse]
    points: tuple[tuple[float, float], tuple[float, float]]


def _motorcycle() -> np.ndarray:
    return data.stereo_motorcycle()[0]


_FACE, _PATCH = Ellipse("face", 227, 128, 47, 62), Ellipse("patch", 172, 384, 38, 39)
_EYES = Ellipse("eye", 170, 116, 35, 31), Ellipse("eye", 319, 136, 24, 29)
_CUP, _SPOON = Ellipse("cup", 289, 113, 118, 96), Ellipse("spoon", 366, 283, 40, 42)
_WHEEL, _LIGHT = Ellipse("wheel", 597, 369, 98, 66, 57), Ellipse("light", 538, 154, 29, 33)

PHOTOGRAPHS = (
    Photograph(data.astronaut, 0, 0, 512, (_FACE, _PATCH), ((202, 101), (246, 103))),
    Photograph(data.chelsea, 70, 0, 300, _EYES, ((172, 110), (318, 132))),
    Photograph(data.coffee, 80, 0, 400, (_CUP, _SPOON), ((366, 283), (225, 265))),
    Photograph(_motorcycle, 240, 0, 500, (_WHEEL, _LIGHT), ((588, 377), (572, 131))),
)
CLASSES = sorted({ellipse.name for photograph in PHOTOGRAPHS for ellipse in photograph.objects})


class Objects:
    """Loader of one detection batch, with the attribute ``dataset``, which has ``classes``."""

    classes = CLASSES

    def __init__(self, side: int) -> None:
        samples = [_detections(photograph, side) for photograph in PHOTOGRAPHS]
        images, boxes, masks, points, labels = (torch.stack(values) for values in zip(*samples, strict=True))
        self._batch = {"image": images, "boxes": boxes, "masks": masks, "points": points, "labels": labels}
        self.dataset = self

    def __iter__(self):
        yield self._batch


def _detections(photograph: Photograph, side: int) -> tuple[Tensor, ...]:
    """Return (image, boxes, masks, keypoints, labels). Boxes are first and last pixels, keypoints are in pixels."""
    left, top, square_side = photograph.left, photograph.top, photograph.side
    square = Image.fromarray(photograph.load()[top : top + square_side, left : left + square_side])
    image = torch.from_numpy(np.array(square.resize((side, side), Image.Resampling.LANCZOS))).permute(2, 0, 1)
    scale = side / square_side
    centres = (torch.arange(side) + 0.5) / scale
    masks = torch.stack([_inside(ellipse, centres + left, centres[:, None] + top) for ellipse in photograph.objects])
    boxes = []
    for mask in masks:
        y, x = mask.nonzero(as_tuple=True)
        boxes.append(torch.stack((x.min(), y.min(), x.max(), y.max())))
    points = (torch.tensor(photograph.points) - torch.tensor([left, top])) * scale - 0.5
    labels = torch.tensor([CLASSES.index(ellipse.name) for ellipse in photograph.objects])
    return image, torch.stack(boxes).float(), masks.to(torch.uint8), points, labels


def _inside(ellipse: Ellipse, x: Tensor, y: Tensor) -> Tensor:
    angle = radians(ellipse.degrees)
    right, down = x - ellipse.x, y - ellipse.y
    along, beside = right * cos(angle) + down * sin(angle), down * cos(angle) - right * sin(angle)
    return (along / ellipse.across) ** 2 + (beside / ellipse.down) ** 2 <= 1


def _photographs(side: int) -> DataLoader:
    """Return a loader of photographs with their labels, as for a classifier."""

    def to_tensor(image: Image.Image) -> Tensor:
        return torch.from_numpy(np.array(ImageOps.fit(image, (side, side), Image.Resampling.LANCZOS))).permute(2, 0, 1)

    folders = class_folders(photographs(), to_tensor)
    index_by_name = {f"{Path(path).parent.name}/{Path(path).stem}": index for index, (path, _) in enumerate(folders.samples)}
    return DataLoader(Subset(folders, [index_by_name[name] for name in _PHOTOGRAPH_NAMES]), batch_size=len(_PHOTOGRAPH_NAMES))


def classification(side: int) -> gpuaug.StreamedLoader:
    augment = gpuaug.fuse(
        K.AugmentationSequential(
            K.RandomResizedCrop((side, side), scale=(0.3, 1.0)),
            K.RandomHorizontalFlip(),
            K.ColorJitter(0.4, 0.4, 0.4, 0.1),
            K.RandomErasing(p=0.4),
            K.Normalize(_MEAN, _STD),
        ),
        dtype=torch.bfloat16,
        memory_format=torch.channels_last,
    )
    return gpuaug.StreamedLoader(_photographs(side), [gpuaug.TransformStage(augment, name="augment")], seed=_SEED)


def detection(side: int) -> gpuaug.StreamedLoader:
    augment = gpuaug.fuse(
        K.AugmentationSequential(
            K.RandomResizedCrop((side, side), scale=(0.5, 1.0)),
            K.RandomHorizontalFlip(),
            K.RandomAffine(20.0, scale=(0.9, 1.1)),
            K.Normalize(_MEAN, _STD),
        )
    )
    on = {"image": "input", "boxes": "bbox_xyxy", "masks": "mask", "points": "keypoints", "labels": "class"}
    return gpuaug.StreamedLoader(Objects(side), [gpuaug.TransformStage(augment, on=on, name="augment")], seed=_SEED)


def mixup(side: int) -> gpuaug.StreamedLoader:
    crop = gpuaug.fuse(
        [K.RandomResizedCrop((side, side), scale=(0.3, 1.0)), K.RandomHorizontalFlip(), K.Normalize(_MEAN, _STD)]
    )
    mix = gpuaug.TransformStage(gpuaug.fuse(K.RandomMixUpV2(p=1.0)), on={0: "input", 1: "class"}, name="mix")
    return gpuaug.StreamedLoader(_photographs(side), [gpuaug.TransformStage(crop, name="crop"), mix], seed=_SEED)


LOADERS = {"classification": classification, "detection": detection, "mixup": mixup}


def main(argv: Sequence[str] | None = None) -> list[Path]:
    parser = ArgumentParser(prog="python -m bench show", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(LOADERS), help="one picture (default: all)")
    parser.add_argument("--images", type=Path, default=IMAGES, help="folder to draw into (default: %(default)s)")
    parser.add_argument("--side", type=int, default=SIDE_PX, help="side of a picture in pixels (default: %(default)s)")
    options = parser.parse_args(argv)
    targets = []
    for name in [options.only] if options.only else LOADERS:
        target = options.images / f"show_{name}.png"
        with LOADERS[name](options.side) as loader:
            save(gpuaug.show(loader), target)
        targets.append(target)
    print("\n".join(map(str, targets)))
    return targets
