"""Contact sheets: the same draws through Kornia and through gpuaug.fuse, side by side, into docs/images.

    python -m bench sheets

Every sheet shows photographs as they are, as Kornia augments them, as ``fuse`` does with the same draws, and the difference
of the two, fifty times as bright. The label of the last row says how large it is. Where there is a GPU, both run there, and
``fuse`` with its Triton kernels.
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
BRIGHTER = 50

# Found by looking: photographs with edges, skin, fur, letters and a night sky, among the crops of scikit-image's.
_SHOWN = ("astronaut/001", "chelsea/004", "coffee/003", "motorcycle_left/003", "rocket/003")
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
class Compared:
    """Photographs, what became of them, (B, 3, H, W) in [0, 1], and masks, (B, 1, H, W), where they follow."""

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
        wrong = int((self.masks[1] != self.masks[2]).sum())
        return f"{text}\nmasks: {wrong} pixels differ"


def compare(pipeline: K.AugmentationSequential, images: Tensor) -> Compared:
    """Run a batch of uint8 images, with masks made of them where the pipeline takes some, through both."""
    augment = gpuaug.fuse(pipeline)
    draws = augment.draw(images.shape, seed=_SEED)
    masks = bright_parts(images) if len(pipeline.data_keys) > 1 else None
    given = () if masks is None else (masks,)
    with exact_convolutions():
        expected = pipeline(images.float() / 255, *given, params=draws.as_kornia())
        got = augment(images, *given, draws=draws)
    if masks is None:
        return Compared(images.cpu().float() / 255, expected.cpu(), got.cpu(), None)
    follow = masks.cpu(), expected[1].cpu(), got[1].cpu()
    return Compared(images.cpu().float() / 255, expected[0].cpu(), got[0].cpu(), follow)


def bright_parts(images: Tensor) -> Tensor:
    """A mask that follows what is in the picture, (B, 1, H, W) uint8: what is brighter than the picture's mean."""
    grey = functional.avg_pool2d(images.float().mean(1, keepdim=True), 9, 1, 4)
    return (grey > grey.mean((2, 3), keepdim=True)).to(torch.uint8)


@contextmanager
def exact_convolutions():
    """Kornia's blur is a convolution, which a GPU computes in TF32 unless told not to."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def draw(title: str, compared: Compared) -> Figure:
    """A row of pictures each for the source, Kornia, fuse and their difference."""
    rows = [compared.source, compared.kornia, compared.fused, (compared.difference * BRIGHTER).clamp(0, 1)]
    if compared.masks is not None:
        source, expected, got = compared.masks
        rows = [tinted(row, mask) for row, mask in zip(rows, (source, expected, got, expected != got), strict=True)]
    labels = ["source", "Kornia", "gpuaug.fuse,\nsame draws", f"difference, x{BRIGHTER}\n{compared.label}"]
    columns = len(compared.source)
    # A pixel of a picture is one of the sheet: nothing is resampled.
    dpi, gap, left, top = 100, 4, 130, 26
    height, width = (max(row.shape[axis] for row in rows) for axis in (2, 3))
    size = left + columns * (width + gap), top + len(rows) * (height + gap)
    figure = Figure(figsize=(size[0] / dpi, size[1] / dpi), dpi=dpi)
    figure.text(gap / size[0], 1 - top / 2 / size[1], title, va="center", fontsize=9)
    for index, (label, row) in enumerate(zip(labels, rows, strict=True)):
        upper = top + index * (height + gap)
        figure.text(gap / size[0], 1 - (upper + height / 2) / size[1], label, va="center", fontsize=8)
        for column, picture in enumerate(row):
            tall, wide = picture.shape[1:]
            at = left + column * (width + gap), size[1] - upper - tall
            axis = figure.add_axes((at[0] / size[0], at[1] / size[1], wide / size[0], tall / size[1]))
            axis.imshow(np.asarray(picture.permute(1, 2, 0).clamp(0, 1)), interpolation="nearest", aspect="auto")
            axis.axis("off")
    return figure


def tinted(images: Tensor, masks: Tensor) -> Tensor:
    """Images with a colour over what their masks cover."""
    return torch.where(masks != 0, 0.55 * images + 0.45 * _TINT, images)


def load(paths: Sequence[Path], side: int) -> Tensor:
    """The centres of photographs, (B, 3, side, side) uint8."""
    shown = []
    for path in paths:
        with Image.open(path) as image:
            shown.append(np.asarray(ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.LANCZOS)))
    return torch.from_numpy(np.stack(shown)).permute(0, 3, 1, 2).contiguous()


def main(argv: Sequence[str] | None = None) -> list[Path]:
    parser = ArgumentParser(prog="python -m bench sheets", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(SHEETS), help="one sheet (default: all)")
    parser.add_argument("--images", type=Path, default=IMAGES, help="folder to draw into (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)")
    parser.add_argument("--side", type=int, default=SIDE_PX, help="pixels a side (default: %(default)s)")
    options = parser.parse_args(argv)
    root = photographs()
    images = load([root / f"{name}.jpg" for name in _SHOWN], options.side).to(options.device)
    where = hardware({"environment": environment()}) if images.is_cuda else "CPU"
    drawn = []
    for name in [options.only] if options.only else SHEETS:
        pipeline = SHEETS[name](options.side)
        modules = ", ".join(type(module).__name__ for module in pipeline.children())
        compared = compare(pipeline, images)
        target = options.images / f"sheet_{name}.png"
        save(draw(f"{modules}{', with masks' if compared.masks else ''} ({where})", compared), target)
        drawn.append(target)
    print("\n".join(map(str, drawn)))
    return drawn
