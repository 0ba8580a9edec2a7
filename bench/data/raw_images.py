"""Raw epochs: images that were shrunk to one size once and lie uncompressed in one file, which workers map into memory.

The recipe of ``docs/raw-epochs.md``.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder

from gpuaug.benchkit.environment import cores_allowed
from gpuaug.benchkit.photos import written_once

IMAGES, LABELS = "images.npy", "labels.npy"


def make(root: Path, count: int, side: int) -> Path:
    """The folder with ``count`` images of ``side`` pixels out of a folder of class folders, written on the first call.

    Args:
        root: Where the files are, in a folder that is called by what is in it; with fewer than ``count``, some are taken again.
        count: Of the images.
        side: Of each image.
    """
    samples = ImageFolder(root).samples
    chosen = [samples[index % len(samples)] for index in range(count)]
    return written_once(f"raw-{root.name}-{count}-{side}", partial(write, chosen, side))


def write(samples: Sequence[tuple[str, int]], side: int, folder: Path) -> None:
    """Write ``images.npy``, (N, side, side, 3) uint8, and ``labels.npy``, (N,) int64, into ``folder``."""
    np.save(folder / LABELS, np.array([label for _, label in samples]))
    shape = (len(samples), side, side, 3)
    images = np.lib.format.open_memmap(folder / IMAGES, mode="w+", dtype=np.uint8, shape=shape)

    def shrink(index: int) -> None:
        with Image.open(samples[index][0]) as opened:
            images[index] = ImageOps.fit(opened.convert("RGB"), (side, side), Image.Resampling.BICUBIC)

    with ThreadPoolExecutor(cores_allowed()) as pool:
        list(pool.map(shrink, range(len(samples))))
    images.flush()


class RawImages(Dataset):
    """Labelled images, (side, side, 3) uint8, read from the page cache when they are collated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Mapped for copies on writing, of which there are none: PyTorch warns of memory that it cannot write to.
        self.images = np.load(folder / IMAGES, mmap_mode="c")
        self.labels = np.load(folder / LABELS)

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return RawImages, (self.folder,)  # a worker that is not forked maps the file itself: a pickle would hold all images

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.images[index]), int(self.labels[index])
