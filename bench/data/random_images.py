"""Data sets of random images: cheap to read, so that figures measure the loop and not decoding."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

CLASSES = 21
POOL = 128
_REPEATS = 40
_MEAN_OBJECTS = 7.0
_OBJECT_CLASSES = 80


class RandomImages(Dataset):
    """Items from a small pool of random uint8 images: an item costs one copy, like an image decoded in advance.

    Args:
        size: Side of the images in pixels.
        labels: One label per image, or one per pixel.
        dtype: Data type of the labels. Published segmentation loops take int64, eight bytes a pixel.
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
    """Items from a pool of random uint8 images of different sizes.

    Args:
        sides: Smallest and largest side in pixels.
        count: Number of images.
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


class Transformed(Dataset):
    """Samples in memory, transformed in the worker.

    Args:
        samples: The arguments of ``transform`` for each item.
        transform: Returns one part of an item, or a tuple of them.
    """

    def __init__(self, samples: Sequence[tuple[Any, ...]], transform: Callable[..., Any]) -> None:
        self.samples, self.transform = samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        found = self.transform(*self.samples[index])
        return found if isinstance(found, tuple) else (found,)


def random_objects(height: int, width: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Boxes (n, 4) as corners in pixels and labels (n,) of about seven objects, at least one, as in COCO."""
    objects = max(1, int(torch.poisson(torch.tensor(_MEAN_OBJECTS), generator=draw)))
    corners = torch.rand(objects, 2, 2, generator=draw).sort(dim=1).values
    # No side is shorter than a tenth of the image's.
    corners[:, 0] *= 0.9
    corners[:, 1] = corners[:, 1].clamp(min=corners[:, 0] + 0.1)
    labels = torch.randint(_OBJECT_CLASSES, (objects,), generator=draw)
    return {"boxes": (corners * torch.tensor([width, height])).flatten(1), "labels": labels}


class RepeatedRandomImages(RandomImages):
    """A pool of repeated images that is larger than CPU caches: 1 GB for a side of 256 pixels."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.images = self.images.repeat(_REPEATS, 1, 1, 1)
        self.labels = self.labels.repeat(_REPEATS)

    def __len__(self) -> int:
        return len(self.images)
