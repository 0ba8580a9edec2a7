"""Loaders that the suite ``feeds`` compares, from samples in memory to batches on the card."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, default_collate

import gpuaug
from bench.data import loaders, pipelines
from bench.data.random_images import RepeatedRandomImages
from bench.harness.optional_rows import MissingError

UNPINNED = "DataLoader, unpinned"
PINNED = "DataLoader, pinned"
COPY_STREAM = "pinned, copy stream"
SPDL = "SPDL"
FFCV = "FFCV"
PLAIN = "StreamedLoader, plain"
STREAMED = "StreamedLoader"
FUSED = "StreamedLoader, fused"
STACKING = "stacking alone"

_EPOCH_SAMPLES = 10**8


@dataclass(frozen=True)
class FeedCase:
    """Samples, batch size and number of workers of a case."""

    workers: int
    batch_size: int
    data: RepeatedRandomImages
    prefetch: int

    @property
    def sample_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.data[0])

    @property
    def queue_length(self) -> int:
        """Largest number of batches that are ready or in preparation before the first ``next``."""
        return self.workers * self.prefetch + loaders.DEPTH + 4


@dataclass(frozen=True)
class OpenFeeder:
    """An endless iterator of batches on the device, and the function that returns its ``Stats``, for gpuaug's loaders."""

    batches: Iterator[Any]
    stats: Callable[[], Any] | None = None


def loader(case: FeedCase, *, pin: bool, collate: Callable[[list[Any]], Any] | None = None) -> DataLoader:
    """Return a ``DataLoader`` whose epoch is longer than every measurement, so that no window contains the end of an epoch."""
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        case.data,
        batch_size=case.batch_size,
        sampler=RandomSampler(case.data, replacement=True, num_samples=_EPOCH_SAMPLES, generator=generator),
        num_workers=case.workers,
        pin_memory=pin,
        persistent_workers=True,
        prefetch_factor=case.prefetch,
        drop_last=True,
        collate_fn=collate,
    )


def _data_loader(case: FeedCase, device: torch.device, stack: ExitStack, *, pin: bool) -> OpenFeeder:
    def batches() -> Iterator[list[Tensor]]:
        # Only this frame refers to the loader, so that closing the generator ends the workers, which are persistent.
        for batch in loader(case, pin=pin):
            yield [tensor.to(device, non_blocking=pin) for tensor in batch]

    return _close_with(batches(), stack)


def _copy_stream(case: FeedCase, device: torch.device, stack: ExitStack) -> OpenFeeder:
    def batches() -> Iterator[list[Tensor]]:
        copy_stream = torch.cuda.Stream(device)
        host_batches = iter(loader(case, pin=True))

        def copy_next() -> list[Tensor]:
            batch = next(host_batches)
            with torch.cuda.stream(copy_stream):
                return [tensor.to(device, non_blocking=True) for tensor in batch]

        next_batch = copy_next()
        while True:
            consumer = torch.cuda.current_stream(device)
            consumer.wait_stream(copy_stream)
            for tensor in next_batch:
                tensor.record_stream(consumer)  # else the copy stream, which allocated it, could reuse its memory too early
            batch = next_batch
            next_batch = copy_next()
            yield batch

    return _close_with(batches(), stack)


class _StackCollate:
    """Collate function that stacks images into the same memory for every batch, and returns their number."""

    def __init__(self) -> None:
        self._out: Tensor | None = None

    def __call__(self, samples: list[tuple[Tensor, Tensor]]) -> int:
        images = [image for image, _ in samples]
        if self._out is None:
            self._out = torch.stack(images)
        return len(torch.stack(images, out=self._out))


def _stacking(case: FeedCase, _device: torch.device, stack: ExitStack) -> OpenFeeder:
    def batches() -> Iterator[int]:
        yield from loader(case, pin=False, collate=_StackCollate())

    return _close_with(batches(), stack)


def _close_with(batches: Any, stack: ExitStack) -> OpenFeeder:
    stack.callback(batches.close)
    return OpenFeeder(batches)


def _streamed(
    case: FeedCase, device: torch.device, stack: ExitStack, *, plain: bool = False, fused: bool = False
) -> OpenFeeder:
    stages = []
    if fused:
        side = min(224, case.data.images.shape[-1])
        pipeline = pipelines.classification_kornia(side, cropping="slice")
        stages = [gpuaug.fuse(pipeline, dtype=torch.bfloat16, memory_format=torch.channels_last)]
    cuda = device.type == "cuda"
    streamed = gpuaug.StreamedLoader(
        loader(case, pin=plain and cuda),
        stages,
        device=device,
        depth=loaders.DEPTH,
        feed="plain" if plain else "auto" if cuda else "ring",
    )
    stack.callback(streamed.close)
    return OpenFeeder(iter(streamed), streamed.stats)


def _spdl(case: FeedCase, device: torch.device, stack: ExitStack) -> OpenFeeder:
    try:
        from spdl.io import transfer_tensor
        from spdl.pipeline import PipelineBuilder
    except ImportError as error:
        raise MissingError(f"not installed: {error}") from None
    generator = torch.Generator().manual_seed(0)

    def indices() -> Iterator[list[int]]:
        while True:
            yield torch.randint(len(case.data), (case.batch_size,), generator=generator).tolist()

    def collate(batch: list[int]) -> list[Tensor]:
        return default_collate([case.data[index] for index in batch])

    builder = PipelineBuilder().add_source(indices()).pipe(collate, concurrency=case.workers, output_order="input")
    if device.type == "cuda":
        # On one thread, as SPDL's documentation requires: streams and page-locked buffers are per thread.
        transfer = stack.enter_context(ThreadPoolExecutor(max_workers=1))
        builder = builder.pipe(transfer_tensor, executor=transfer)
    pipeline = builder.add_sink(loaders.DEPTH).build(num_threads=case.workers)
    stack.enter_context(pipeline.auto_stop())
    return OpenFeeder(iter(pipeline))


def _ffcv(case: FeedCase, device: torch.device, stack: ExitStack) -> OpenFeeder:
    try:
        from ffcv.fields import IntField, NDArrayField
        from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.transforms import Squeeze, ToDevice, ToTensor
        from ffcv.writer import DatasetWriter
    except ImportError as error:
        raise MissingError(f"not installed: {error}") from None
    images = case.data.images.numpy()
    samples = list(zip(images, case.data.labels.tolist(), strict=True))
    path = Path(stack.enter_context(TemporaryDirectory())) / "samples.beton"
    fields = {"image": NDArrayField(images.dtype, images.shape[1:]), "label": IntField()}
    DatasetWriter(str(path), fields, num_workers=case.workers).from_indexed_dataset(samples)
    to_device = [ToTensor(), ToDevice(device, non_blocking=True)]
    ffcv_loader = Loader(
        str(path),
        batch_size=case.batch_size,
        num_workers=case.workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={"image": [NDArrayDecoder(), *to_device], "label": [IntDecoder(), *to_device, Squeeze()]},
    )

    def batches() -> Iterator[Any]:
        while True:
            yield from ffcv_loader

    return _close_with(batches(), stack)


FEEDERS: dict[str, Callable[[FeedCase, torch.device, ExitStack], OpenFeeder]] = {
    UNPINNED: partial(_data_loader, pin=False),
    PINNED: partial(_data_loader, pin=True),
    COPY_STREAM: _copy_stream,
    SPDL: _spdl,
    FFCV: _ffcv,
    PLAIN: partial(_streamed, plain=True),
    STREAMED: _streamed,
    FUSED: partial(_streamed, fused=True),
    STACKING: _stacking,
}
"""Name of a row: function that opens its loader and registers the clean-up on the stack."""
