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

_VALIDATION_SHARE = 0.2


class Images(Dataset):
    """Labelled images, (3, H, W) uint8 of any size.

    Args:
        samples: (path, label) of each image.
        decoded_images: Decoded images, if they are held in memory.
        transform: Function that is applied to each image.
        load: Function that reads a file. Default: ``decode``.
    """

    def __init__(
        self,
        samples: Sequence[tuple[str, int]],
        decoded_images: Sequence[Tensor] | None = None,
        transform: Callable[[Tensor], Tensor] | None = None,
        load: Callable[[str], Any] | None = None,
    ) -> None:
        self.samples = samples
        self.decoded_images = decoded_images
        self.transform = transform
        self.load = load or decode

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        image = self.load(path) if self.decoded_images is None else self.decoded_images[index]
        return (image if self.transform is None else self.transform(image)), label

    def in_memory(self) -> "Images":
        """Decode all images, and return them as a dataset in memory."""
        with ThreadPoolExecutor(allowed_cores()) as pool:
            return Images(self.samples, list(pool.map(decode, [path for path, _ in self.samples])), self.transform)

    def encoded(self) -> "Images":
        """Return a dataset of the same files, not decoded, for ``gpuaug.collate_encoded``."""
        return Images(self.samples, load=gpuaug.read_encoded)

    def transformed(self, transform: Callable[[Tensor], Tensor]) -> "Images":
        """Return a dataset of the same images that applies ``transform`` to each."""
        return Images(self.samples, self.decoded_images, transform)


class Split(NamedTuple):
    """Training images and validation images, which have no file in common, and the names of their classes."""

    train: Images
    val: Images
    classes: list[str]


def split(root: Path) -> Split:
    """Return the folders ``train`` and ``val`` of ``root``, or split a folder of class folders.

    If there are no such folders, a fifth of the images is for validation, the same images in every run.

    Raises:
        ValueError: If ``root`` is not such a folder, or ``train`` and ``val`` have different classes.
    """
    if (root / "train").is_dir() and (root / "val").is_dir():
        train, val = (class_folders(root / name, None) for name in ("train", "val"))
        if train.classes != val.classes:
            raise ValueError(
                f"train and val must have the same classes, got {len(train.classes)} and {len(val.classes)} in {root}, of "
                f"which {len(set(train.classes) ^ set(val.classes))} are in one alone. Add or remove folders."
            )
        return Split(Images(train.samples), Images(val.samples), train.classes)
    folder = class_folders(root, None)
    order = torch.randperm(len(folder), generator=torch.Generator().manual_seed(0)).tolist()
    val_count = max(1, round(_VALIDATION_SHARE * len(folder)))
    val_samples, train_samples = (
        [folder.samples[index] for index in indices] for indices in (order[:val_count], order[val_count:])
    )
    return Split(Images(train_samples), Images(val_samples), folder.classes)


def decode(path: str) -> Tensor:
    """Decode an image file to (3, H, W) uint8."""
    return v2.functional.pil_to_tensor(default_loader(path))


def validation_tensors(images: Images, size: int) -> tuple[Tensor, Tensor]:
    """Return images (N, 3, size, size) float32 and labels (N,): resized, cropped at the centre, and normalised."""
    transform = v2.Compose(
        [
            v2.Resize(size * 8 // 7, antialias=True),
            v2.CenterCrop(size),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    with ThreadPoolExecutor(allowed_cores()) as pool:
        tensors, labels = zip(*pool.map(images.transformed(transform).__getitem__, range(len(images))), strict=True)
    return torch.stack(tensors), torch.tensor(labels)
