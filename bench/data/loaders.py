"""Batches for training loops: from DataLoader workers, or prepared before the measurement."""

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torch.utils.data._utils.pin_memory import pin_memory

import gpuaug
from bench.data.random_images import RandomImages
from gpuaug.benchkit.windows import Variant

DEPTH = 2
"""Default ``depth`` of a ``StreamedLoader``, on which the number of discarded steps depends."""

# Limit of the bytes in /dev/shm for the prefetched batches of one loader. /dev/shm is small in many containers, and several
# loaders share it.
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
    """Return a ``DataLoader`` whose epoch is longer than every measurement, so that no window contains the end of an epoch.

    Args:
        dataset: Dataset whose items have about the same size in bytes.
        batch_size: Number of items in a batch.
        options: Options of the suite. Only ``device`` and ``workers`` are read.
        workers: Number of workers. Default: ``options.workers``.
        collate: Collate function. Default: PyTorch's.
        pin: Whether batches are page-locked if the device is a GPU.
    """
    workers = options.workers if workers is None else workers
    # A path, of a file that was not read yet, is a leaf without bytes.
    leaves = tree_leaves(dataset[0], is_leaf=lambda leaf: isinstance(leaf, os.PathLike))
    batch_bytes = batch_size * sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=RandomSampler(dataset, replacement=True, num_samples=10**8, generator=generator),
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin and options.device.type == "cuda",
        persistent_workers=workers > 0,
        prefetch_factor=(2 if 2 * workers * batch_bytes <= _SHARED_BYTES else 1) if workers else None,
        drop_last=True,
    )


def queue_length(loader: DataLoader) -> int:
    """Return the number of steps to discard at the start of a window: batches that may be ready, and a few more."""
    return loader.num_workers * (loader.prefetch_factor or 0) + DEPTH + 4


def repeat_batches(batches: list[Any]) -> list[Any]:
    """Repeat batches for longer than any window: a loader without cost."""
    return batches * 10**5


def decoding_alone(name: str, batches: list[Any], options: Namespace, images_per_batch: int, stack: ExitStack) -> Variant:
    """Return a row that decodes a few encoded batches from memory, repeatedly: a ceiling for rows that decode files.

    Args:
        name: Name of the row.
        batches: Batches of ``collate_encoded``.
        options: Options of the suite. Only ``device`` is read.
        images_per_batch: Number of images that a step counts.
        stack: Closes the loader.
    """
    if options.device.type == "cuda":
        batches = [pin_memory(batch) for batch in batches]
    streamed = gpuaug.StreamedLoader(repeat_batches(batches), [gpuaug.DecodeStage()], device=options.device, depth=DEPTH)
    stack.callback(streamed.close)

    def steps() -> Iterator[int]:
        for _ in streamed:
            yield images_per_batch

    return Variant(name, steps, DEPTH + 4)


def sample_batches(dataset: Dataset, batch_size: int, count: int, device: torch.device, *, pin: bool = False) -> list[Any]:
    """Return ``count`` random batches of ``dataset`` on ``device``. ``pin``: on the host instead, page-locked for a GPU."""
    loader = DataLoader(dataset, batch_size, sampler=RandomSampler(dataset, True, count * batch_size))
    if pin:
        return [[tensor.pin_memory() if device.type == "cuda" else tensor for tensor in batch] for batch in loader]
    return [[tensor.to(device) for tensor in batch] for batch in loader]


def float_batches(options: Namespace, batch_size: int) -> list[Any]:
    """Return four batches of normalised images and labels on the device, channels last."""
    batches = sample_batches(RandomImages(options.size), batch_size, 4, options.device)
    return [((images.float() / 255 - 0.5).contiguous(memory_format=torch.channels_last), labels) for images, labels in batches]
