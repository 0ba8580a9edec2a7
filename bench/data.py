"""Random images for the experiments: cheap to make, so that a figure is about the loop and not about decoding."""

from argparse import Namespace
from collections.abc import Callable
from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, RandomSampler

from bench.common import DEPTH

CLASSES = 21
POOL = 128

# What one loader's prefetched batches may hold of /dev/shm, which is small in many containers; loaders stand side by side.
_SHARED_BYTES = 1 << 30


class RandomImages(Dataset):
    """Items out of a small pool of random uint8 images: an item costs a copy, like one that was decoded before.

    Args:
        size: Side of the images.
        labels: One label an image, or one a pixel.
        dtype: Of the labels. Published segmentation loops take int64, which is eight bytes a pixel.
        transform: Applied to the image in the worker.
    """

    def __init__(
        self,
        size: int,
        *,
        labels: Literal["image", "pixel"] = "image",
        dtype: torch.dtype = torch.int64,
        transform: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        draw = torch.Generator().manual_seed(0)
        self.images = torch.randint(256, (POOL, 3, size, size), dtype=torch.uint8, generator=draw)
        shape = (POOL, size, size) if labels == "pixel" else (POOL,)
        self.labels = torch.randint(CLASSES, shape, dtype=dtype, generator=draw)
        self.transform = transform

    def __len__(self) -> int:
        return POOL

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        return (image if self.transform is None else self.transform(image)), self.labels[index]


class RaggedImages(Dataset):
    """Items out of a pool of random uint8 images whose sides differ.

    Args:
        sides: The least and the most pixels of a side.
        count: How many there are.
    """

    def __init__(self, sides: tuple[int, int], *, count: int = POOL) -> None:
        draw = torch.Generator().manual_seed(0)
        shapes = torch.randint(sides[0], sides[1] + 1, (count, 2), generator=draw).tolist()
        self.images = [torch.randint(256, (3, *shape), dtype=torch.uint8, generator=draw) for shape in shapes]
        self.labels = torch.randint(CLASSES, (count,), generator=draw)
        self.transform: Callable[[Tensor], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        return (image if self.transform is None else self.transform(image)), self.labels[index]

    def transformed(self, transform: Callable[[Tensor], Tensor]) -> "RaggedImages":
        """The same images, with ``transform`` applied to each in the worker."""
        other = copy(self)
        other.transform = transform
        return other


def endless(
    dataset: Dataset,
    batch_size: int,
    options: Namespace,
    *,
    workers: int | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    pin: bool = True,
) -> DataLoader:
    """A ``DataLoader`` whose epoch outlasts every measurement, so that no window holds the edge of one.

    Args:
        dataset: Items of about the same size.
        batch_size: Of every batch.
        options: Says the device, and the workers unless ``workers`` does.
        workers: How many there are.
        collate: Instead of PyTorch's own.
        pin: Whether batches are page-locked for a GPU.
    """
    workers = options.workers if workers is None else workers
    batch_bytes = batch_size * sum(part.nbytes for part in tree_leaves(dataset[0]))
    draw = torch.Generator().manual_seed(0)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=RandomSampler(dataset, replacement=True, num_samples=10**8, generator=draw),
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin and options.device.type == "cuda",
        persistent_workers=workers > 0,
        prefetch_factor=(2 if 2 * workers * batch_bytes <= _SHARED_BYTES else 1) if workers else None,
        drop_last=True,
    )


def queued(loader: DataLoader) -> int:
    """Steps to leave out at the start of a window: what the workers and the lanes had ready, and a few more."""
    return loader.num_workers * (loader.prefetch_factor or 0) + DEPTH + 4


def cycle(batches: list[Any]) -> list[Any]:
    """The same batches over and over, longer than any window: a loader that costs nothing."""
    return batches * 10**5


def sample(dataset: Dataset, batch_size: int, count: int, device: torch.device, *, pin: bool = False) -> list[Any]:
    """``count`` batches of ``dataset`` on ``device``, or page-locked on the host if ``pin`` and there is a GPU."""
    loader = DataLoader(dataset, batch_size, sampler=RandomSampler(dataset, True, count * batch_size))
    if pin:
        return [[part.pin_memory() if device.type == "cuda" else part for part in batch] for batch in loader]
    return [[part.to(device) for part in batch] for batch in loader]
