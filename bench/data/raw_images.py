"""Raw epochs: images resized once and stored uncompressed in one file, which workers map into memory.

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

from gpuaug.benchkit.environment import allowed_cores
from gpuaug.benchkit.photos import cached_folder

IMAGES, LABELS = "images.npy", "labels.npy"


def make(root: Path, count: int, side: int) -> Path:
    """Return a folder with ``count`` raw images of ``side`` pixels per side, which the first call writes.

    Args:
        root: Folder of class folders of image files. Its name is part of the name of the cache. Too few files are repeated.
        count: Number of images.
        side: Side of each image in pixels.
    """
    samples = ImageFolder(root).samples
    raw_samples = [samples[index % len(samples)] for index in range(count)]
    return cached_folder(f"raw-{root.name}-{count}-{side}", partial(write, raw_samples, side))


def write(samples: Sequence[tuple[str, int]], side: int, folder: Path) -> None:
    """Write ``images.npy``, (N, side, side, 3) uint8, and ``labels.npy``, (N,) int64, into ``folder``."""
    np.save(folder / LABELS, np.array([label for _, label in samples]))
    shape = (len(samples), side, side, 3)
    images = np.lib.format.open_memmap(folder / IMAGES, mode="w+", dtype=np.uint8, shape=shape)

    def shrink(index: int) -> None:
        with Image.open(samples[index][0]) as opened:
            images[index] = ImageOps.fit(opened.convert("RGB"), (side, side), Image.Resampling.BICUBIC)

    with ThreadPoolExecutor(allowed_cores()) as pool:
        list(pool.map(shrink, range(len(samples))))
    images.flush()


class RawImages(Dataset):
    """Labelled images, (side, side, 3) uint8, read from the page cache when they are collated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Copy-on-write instead of read-only, because PyTorch warns about read-only memory.
        self.images = np.load(folder / IMAGES, mmap_mode="c")
        self.labels = np.load(folder / LABELS)

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return RawImages, (self.folder,)  # a spawned worker maps the file; a pickle would contain all images

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.images[index]), int(self.labels[index])
