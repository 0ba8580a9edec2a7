"""Datasets of random images that are cheap to read, so that figures measure the loop and not decoding."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

CLASSES = 21
POOL_IMAGES = 128
"""Number of images in a pool."""

_POOL_REPEATS = 40
_MEAN_OBJECTS = 7.0
_OBJECT_CLASSES = 80


class RandomImages(Dataset):
    """Items from a small pool of random uint8 images. Reading an item copies nothing; collating a batch copies each item once.

    Args:
        size: Side of the images in pixels.
        labels: Whether there is one label per image, or one per pixel.
        dtype: Data type of the labels. Published segmentation loops take int64, eight bytes per pixel.
        transform: Function that is applied to each image in the worker.
    """

    def __init__(
        self,
        size: int,
        *,
        labels: Literal["image", "pixel"] = "image",
        dtype: torch.dtype = torch.int64,
        transform: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(256, (POOL_IMAGES, 3, size, size), dtype=torch.uint8, generator=generator)
        shape = (POOL_IMAGES, size, size) if labels == "pixel" else (POOL_IMAGES,)
        self.labels = torch.randint(CLASSES, shape, dtype=dtype, generator=generator)
        self.transform = transform

    def __len__(self) -> int:
        return POOL_IMAGES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        return (image if self.transform is None else self.transform(image)), self.labels[index]


class RaggedImages(Dataset):
    """Items from a pool of random uint8 images of different sizes.

    Args:
        sides: Smallest and largest side in pixels.
        count: Number of images.
    """

    def __init__(self, sides: tuple[int, int], *, count: int = POOL_IMAGES) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = torch.randint(sides[0], sides[1] + 1, (count, 2), generator=generator).tolist()
        self.images = [torch.randint(256, (3, *shape), dtype=torch.uint8, generator=generator) for shape in shapes]
        self.labels = torch.randint(CLASSES, (count,), generator=generator)
        self.transform: Callable[[Tensor], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        return (image if self.transform is None else self.transform(image)), self.labels[index]

    def transformed(self, transform: Callable[[Tensor], Tensor]) -> "RaggedImages":
        """Return a dataset of the same images that applies ``transform`` to each image in the worker."""
        dataset = copy(self)
        dataset.transform = transform
        return dataset


class TransformedSamples(Dataset):
    """Samples in memory, transformed in the worker.

    Args:
        samples: Arguments of ``transform`` for each item.
        transform: Function that returns the members of an item, as a tuple unless there is only one.
    """

    def __init__(self, samples: Sequence[tuple[Any, ...]], transform: Callable[..., Any]) -> None:
        self.samples, self.transform = samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        item = self.transform(*self.samples[index])
        return item if isinstance(item, tuple) else (item,)


def random_objects(height: int, width: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return ``boxes``, (n, 4) float32 in xyxy pixels, and ``labels``, (n,) int64, of a random number of objects n.

    n has the Poisson distribution with mean 7, the average in COCO, but is at least 1.
    """
    num_objects = max(1, int(torch.poisson(torch.tensor(_MEAN_OBJECTS), generator=generator)))
    corners = torch.rand(num_objects, 2, 2, generator=generator).sort(dim=1).values
    # No side of a box is shorter than a tenth of the side of the image.
    corners[:, 0] *= 0.9
    corners[:, 1] = corners[:, 1].clamp(min=corners[:, 0] + 0.1)
    labels = torch.randint(_OBJECT_CLASSES, (num_objects,), generator=generator)
    return {"boxes": (corners * torch.tensor([width, height])).flatten(1), "labels": labels}


class RepeatedRandomImages(RandomImages):
    """A pool of repeated images that is larger than CPU caches: 1 GB for a side of 256 pixels."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.images = self.images.repeat(_POOL_REPEATS, 1, 1, 1)
        self.labels = self.labels.repeat(_POOL_REPEATS)

    def __len__(self) -> int:
        return len(self.images)
