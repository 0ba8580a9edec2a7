"""Batches for the loops: from DataLoader workers, or made before the measurement."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, RandomSampler

from bench.data.random_images import RandomImages

DEPTH = 2
"""Batches that a ``StreamedLoader`` prepares ahead, its default, here by name because discarded steps depend on it."""

# What one loader's prefetched batches may hold of /dev/shm, which is small in many containers; loaders stand side by side.
_SHARED_BYTES = 1 << 30


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
    batch_bytes = batch_size * sum(getattr(part, "nbytes", 0) for part in tree_leaves(dataset[0]))
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


def float_batches(options: Namespace, batch_size: int) -> list[Any]:
    """Four normalised batches on the card, laid out as the encoder wants them."""
    batches = sample(RandomImages(options.size), batch_size, 4, options.device)
    return [((images.float() / 255 - 0.5).contiguous(memory_format=torch.channels_last), labels) for images, labels in batches]
