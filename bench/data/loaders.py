"""Batches for the loops: from DataLoader workers, or prepared before the measurement."""

import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, RandomSampler

from bench.data.random_images import RandomImages

DEPTH = 2
"""The default ``depth`` of a ``StreamedLoader``, which the number of discarded steps depends on."""

# Most bytes of /dev/shm for one loader's prefetched batches: it is small in many containers, and several loaders share it.
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
    """A ``DataLoader`` whose epoch is longer than every measurement, so that no window contains an epoch's end.

    Args:
        dataset: A dataset of items of about the same size.
        batch_size: Images of a batch.
        options: The suite's options: ``device`` and ``workers`` are read.
        workers: Number of workers. Left out: ``options.workers``.
        collate: Collate function. Left out: PyTorch's own.
        pin: Whether batches are page-locked for a GPU.
    """
    workers = options.workers if workers is None else workers
    parts = tree_leaves(dataset[0], is_leaf=lambda part: isinstance(part, os.PathLike))  # files that are not read yet
    batch_bytes = batch_size * sum(getattr(part, "nbytes", 0) for part in parts)
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
    """Steps to discard at the start of a window: the batches that workers and lanes had ready, and a few more."""
    return loader.num_workers * (loader.prefetch_factor or 0) + DEPTH + 4


def cycle(batches: list[Any]) -> list[Any]:
    """The batches repeated for longer than any window: a loader without cost."""
    return batches * 10**5


def sample(dataset: Dataset, batch_size: int, count: int, device: torch.device, *, pin: bool = False) -> list[Any]:
    """``count`` batches of ``dataset`` on ``device``, or page-locked on the host if ``pin`` and there is a GPU."""
    loader = DataLoader(dataset, batch_size, sampler=RandomSampler(dataset, True, count * batch_size))
    if pin:
        return [[part.pin_memory() if device.type == "cuda" else part for part in batch] for batch in loader]
    return [[part.to(device) for part in batch] for batch in loader]


def float_batches(options: Namespace, batch_size: int) -> list[Any]:
    """Four normalised batches on the card, channels last, as the encoder expects."""
    batches = sample(RandomImages(options.size), batch_size, 4, options.device)
    return [((images.float() / 255 - 0.5).contiguous(memory_format=torch.channels_last), labels) for images, labels in batches]
