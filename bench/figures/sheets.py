"""Contact sheets of the same draws by Kornia and by gpuaug.fuse, written into docs/images.

    python -m bench sheets

A sheet shows photographs, their augmentation by Kornia and, with the same draws, by ``fuse``, and the difference of both, fifty
times as bright. The label of the last row has the largest difference. If there is a GPU, both run on it, ``fuse`` with its
Triton kernels.
"""

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import kornia.augmentation as K
import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional

import gpuaug
from bench.figures.pictures import IMAGES, save
from bench.harness.result_rows import hardware
from gpuaug.benchkit.environment import environment
from gpuaug.benchkit.photos import photographs

SIDE_PX = 128
DIFFERENCE_GAIN = 50

# Crops of scikit-image's photographs with edges, skin, fur, letters and a night sky.
_PHOTOGRAPHS = ("astronaut/001", "chelsea/004", "coffee/003", "motorcycle_left/003", "rocket/003")
_SEED = 3
_TINT = torch.tensor([0.0, 0.9, 1.0]).reshape(3, 1, 1)


def classification(side: int) -> K.AugmentationSequential:
    return K.AugmentationSequential(
        K.RandomResizedCrop((side, side)), K.RandomHorizontalFlip(), K.ColorJitter(0.4, 0.4, 0.4, 0.1)
    )


def self_supervised(side: int) -> K.AugmentationSequential:
    return K.AugmentationSequential(
        K.RandomResizedCrop((side, side)),
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
        K.RandomGrayscale(p=0.2),
        K.RandomGaussianBlur((13, 13), (0.1, 2.0), p=0.5),
    )


def geometric(_side: int) -> K.AugmentationSequential:
    return K.AugmentationSequential(K.RandomAffine(25.0, (0.1, 0.1), (0.8, 1.2), p=1.0), K.RandomPerspective(0.4, p=1.0))


def segmentation(side: int) -> K.AugmentationSequential:
    return K.AugmentationSequential(K.RandomResizedCrop((side, side)), K.RandomHorizontalFlip(), data_keys=["input", "mask"])


SHEETS: dict[str, Callable[[int], K.AugmentationSequential]] = {
    "classification": classification,
    "self_supervised": self_supervised,
    "geometric": geometric,
    "segmentation": segmentation,
}


@dataclass(frozen=True)
class Comparison:
    """Photographs and both augmentations, (B, 3, H, W) in [0, 1], and masks (source, Kornia, fused), (B, 1, H, W), if any."""

    source: Tensor
    kornia: Tensor
    fused: Tensor
    masks: tuple[Tensor, Tensor, Tensor] | None

    @property
    def difference(self) -> Tensor:
        return (self.kornia - self.fused).abs()

    @property
    def label(self) -> str:
        text = f"largest {self.difference.max():.0e}"
        if self.masks is None:
            return text
        differing = int((self.masks[1] != self.masks[2]).sum())
        return f"{text}\nmasks: {differing} pixels differ"


def compare(pipeline: K.AugmentationSequential, images: Tensor) -> Comparison:
    """Augment a batch of uint8 images by Kornia and by ``fuse``, with masks of the images if the pipeline takes masks."""
    augment = gpuaug.fuse(pipeline)
    draws = augment.draw(images.shape, seed=_SEED)
    masks = brightness_masks(images) if len(pipeline.data_keys) > 1 else None
    mask_inputs = () if masks is None else (masks,)
    with exact_convolutions():
        kornia = pipeline(images.float() / 255, *mask_inputs, params=draws.as_kornia())
        fused = augment(images, *mask_inputs, draws=draws)
    if masks is None:
        return Comparison(images.cpu().float() / 255, kornia.cpu(), fused.cpu(), None)
    mask_sets = masks.cpu(), kornia[1].cpu(), fused[1].cpu()
    return Comparison(images.cpu().float() / 255, kornia[0].cpu(), fused[0].cpu(), mask_sets)


def brightness_masks(images: Tensor) -> Tensor:
    """Return masks of the regions that are brighter than the mean of the image, (B, 1, H, W) uint8."""
    grey = functional.avg_pool2d(images.float().mean(1, keepdim=True), 9, 1, 4)
    return (grey > grey.mean((2, 3), keepdim=True)).to(torch.uint8)


@contextmanager
def exact_convolutions():
    """Disable TF32 within the context, because Kornia's blur is a convolution, for which a GPU would use TF32."""
    allow_tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = allow_tf32


def draw(title: str, comparison: Comparison) -> Figure:
    """Draw a sheet with one row each for source, Kornia, fuse and their difference."""
    rows = [comparison.source, comparison.kornia, comparison.fused, (comparison.difference * DIFFERENCE_GAIN).clamp(0, 1)]
    if comparison.masks is not None:
        source_masks, kornia_masks, fused_masks = comparison.masks
        rows = [
            tint(row, mask)
            for row, mask in zip(rows, (source_masks, kornia_masks, fused_masks, kornia_masks != fused_masks), strict=True)
        ]
    labels = ["source", "Kornia", "gpuaug.fuse,\nsame draws", f"difference, x{DIFFERENCE_GAIN}\n{comparison.label}"]
    columns = len(comparison.source)
    # One pixel of a picture is one pixel of the sheet, so that pictures are not resampled.
    dpi, gap, left, top = 100, 4, 130, 26
    height, width = (max(row.shape[axis] for row in rows) for axis in (2, 3))
    size = left + columns * (width + gap), top + len(rows) * (height + gap)
    figure = Figure(figsize=(size[0] / dpi, size[1] / dpi), dpi=dpi)
    figure.text(gap / size[0], 1 - top / 2 / size[1], title, va="center", fontsize=9)
    for index, (label, row) in enumerate(zip(labels, rows, strict=True)):
        row_top = top + index * (height + gap)
        figure.text(gap / size[0], 1 - (row_top + height / 2) / size[1], label, va="center", fontsize=8)
        for column, picture in enumerate(row):
            picture_height, picture_width = picture.shape[1:]
            position = left + column * (width + gap), size[1] - row_top - picture_height
            axis = figure.add_axes(
                (position[0] / size[0], position[1] / size[1], picture_width / size[0], picture_height / size[1])
            )
            axis.imshow(np.asarray(picture.permute(1, 2, 0).clamp(0, 1)), interpolation="nearest", aspect="auto")
            axis.axis("off")
    return figure


def tint(images: Tensor, masks: Tensor) -> Tensor:
    """Tint the regions of images that are covered by masks."""
    return torch.where(masks != 0, 0.55 * images + 0.45 * _TINT, images)


def load(paths: Sequence[Path], side: int) -> Tensor:
    """Load photographs, cropped at the centre and resized, as (B, 3, side, side) uint8."""
    squares = []
    for path in paths:
        with Image.open(path) as image:
            squares.append(np.asarray(ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.LANCZOS)))
    return torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2).contiguous()


def main(argv: Sequence[str] | None = None) -> list[Path]:
    parser = ArgumentParser(prog="python -m bench sheets", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(SHEETS), help="one sheet (default: all)")
    parser.add_argument("--images", type=Path, default=IMAGES, help="folder to draw into (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)")
    parser.add_argument("--side", type=int, default=SIDE_PX, help="side of a picture in pixels (default: %(default)s)")
    options = parser.parse_args(argv)
    root = photographs()
    images = load([root / f"{name}.jpg" for name in _PHOTOGRAPHS], options.side).to(options.device)
    device_name = hardware({"environment": environment(images.device)}) if images.is_cuda else "CPU"
    targets = []
    for name in [options.only] if options.only else SHEETS:
        pipeline = SHEETS[name](options.side)
        modules = ", ".join(type(module).__name__ for module in pipeline.children())
        comparison = compare(pipeline, images)
        target = options.images / f"sheet_{name}.png"
        save(draw(f"{modules}{', with masks' if comparison.masks else ''} ({device_name})", comparison), target)
        targets.append(target)
    print("\n".join(map(str, targets)))
    return targets
