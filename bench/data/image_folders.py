"""Labelled images from folders, split for training and validation."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

import gpuaug
from bench.data.pipelines import MEAN, STD
from gpuaug.benchkit.environment import allowed_cores
from gpuaug.benchkit.photos import class_folders

_TESTED_SHARE = 0.2


class Images(Dataset):
    """Labelled images, (3, H, W) uint8 of any size.

    Args:
        samples: (path, label) of each image.
        decoded: The images, if they are held in memory.
        transform: Applied to each image.
        read: Reads a file. Left out: ``decode``.
    """

    def __init__(
        self,
        samples: Sequence[tuple[str, int]],
        decoded: Sequence[Tensor] | None = None,
        transform: Callable[[Tensor], Tensor] | None = None,
        read: Callable[[str], Any] | None = None,
    ) -> None:
        self.samples = samples
        self.decoded = decoded
        self.transform = transform
        self.read = read or decode

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        image = self.read(path) if self.decoded is None else self.decoded[index]
        return (image if self.transform is None else self.transform(image)), label

    def in_memory(self) -> "Images":
        """The same images, decoded now."""
        with ThreadPoolExecutor(allowed_cores()) as pool:
            return Images(self.samples, list(pool.map(decode, [path for path, _ in self.samples])), self.transform)

    def encoded(self) -> "Images":
        """The same images as undecoded files, for ``gpuaug.collate_encoded``."""
        return Images(self.samples, read=gpuaug.read_encoded)

    def transformed(self, transform: Callable[[Tensor], Tensor]) -> "Images":
        """The same images, with ``transform`` applied to each."""
        return Images(self.samples, self.decoded, transform)


class Split(NamedTuple):
    """Images to train on and to validate on, without a file in common, and the names of their classes."""

    train: Images
    val: Images
    classes: list[str]


def split(root: Path) -> Split:
    """Split a folder of class folders, or use its folders ``train`` and ``val``.

    A split keeps a fifth of the images for validation, the same images in every run.

    Raises:
        ValueError: If ``root`` is no such folder, or ``train`` and ``val`` have different classes.
    """
    if (root / "train").is_dir() and (root / "val").is_dir():
        train, val = (class_folders(root / part, None) for part in ("train", "val"))
        if train.classes != val.classes:
            raise ValueError(
                f"train and val must have the same classes, got {len(train.classes)} and {len(val.classes)} in {root}, of "
                f"which {len(set(train.classes) ^ set(val.classes))} are in one alone. Add or remove folders."
            )
        return Split(Images(train.samples), Images(val.samples), train.classes)
    whole = class_folders(root, None)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0)).tolist()
    tested = max(1, round(_TESTED_SHARE * len(whole)))
    kept, left = ([whole.samples[index] for index in chosen] for chosen in (order[:tested], order[tested:]))
    return Split(Images(left), Images(kept), whole.classes)


def decode(path: str) -> Tensor:
    """An image file as (3, H, W) uint8."""
    return v2.functional.pil_to_tensor(default_loader(path))


def validation_tensors(images: Images, size: int) -> tuple[Tensor, Tensor]:
    """Images (N, 3, size, size) float32 and labels (N,), with one transform for all models."""
    transform = v2.Compose(
        [
            v2.Resize(size * 8 // 7, antialias=True),
            v2.CenterCrop(size),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    with ThreadPoolExecutor(allowed_cores()) as pool:
        found, labels = zip(*pool.map(images.transformed(transform).__getitem__, range(len(images))), strict=True)
    return torch.stack(found), torch.tensor(labels)
