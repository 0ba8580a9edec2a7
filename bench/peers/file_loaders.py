"""The loaders that the suite ``files`` compares, from a folder of files to augmented batches on the card.

All end with RandomResizedCrop, HorizontalFlip, ColorJitter without hue and Normalize; crops are antialiased; images have half
precision and are channels last.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image

import gpuaug
from bench.data import loaders, pipelines
from bench.data.encoded_images import Corpus
from bench.data.raw_images import RawImages
from bench.harness.loops import Serial, half
from bench.harness.optional_rows import MissingError
from bench.harness.settings_search import Settings
from bench.peers import dali_files

TORCHVISION = "torchvision, workers"
WORKERS = "workers decode, fuse"
DALI = "DALI"
DALI_CPU = "DALI, CPU"
DALI_WHOLE = "DALI, whole images"
SPDL = "SPDL, fuse"
OURS = "gpuaug"
OURS_ENGINES = "gpuaug, engines"
OURS_CPU = "gpuaug, CPU"
OURS_SCALED = "gpuaug, min_side"
MAPPED = "memory-mapped"

_SHRUNK_PX = 256  # side that SPDL resizes images to, since it has no ragged batches

Batches = Iterator[tuple[Any, Any]]
"""Endless (images, labels) on the device, with one label per image."""


@dataclass(frozen=True)
class FileCase:
    """The files of a case, and the batches that are made of them.

    Args:
        corpus: The folder.
        batch_size: Images of a batch.
        size: Side of the augmented images in pixels.
        device: Device of the batches.
        cores: Number of cores that all processes may use.
        workers: Numbers of DataLoader workers to choose from. Left out: numbers derived from ``cores``.
    """

    corpus: Corpus
    batch_size: int
    size: int
    device: torch.device
    cores: int
    workers: tuple[int, ...] = ()

    @property
    def root(self) -> Path:
        return self.corpus.root


@dataclass(frozen=True)
class Way:
    """A way from files to batches.

    Args:
        open: Opens it with settings as keywords. Clean-up after the row is registered on the stack.
        axes: The settings to choose from for a case, one of each list. The search starts at the first of each.
        needs_gpu: Whether the row is skipped on a CPU.
        settled_by: The row whose best settings this one takes, if that row was measured before.
    """

    open: Callable[..., Batches]
    axes: Callable[[FileCase], list[list[Settings]]] = lambda _: [[{}]]
    needs_gpu: bool = False
    settled_by: str = ""


def queued(settings: Settings) -> int:
    """Largest number of batches that are ready or in preparation before the first is taken."""
    return 2 * settings.get("workers", 0) + loaders.DEPTH + 4


def versions() -> dict[str, str]:
    """Versions of the installed packages that decode."""
    packages = ("nvidia-dali-cuda130", "nvidia-nvimgcodec-cu13", "nvidia-nvjpeg", "simplejpeg", "pillow", "spdl")
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _most_workers(case: FileCase) -> list[list[Settings]]:
    """Numbers of workers that decode: about as many as cores."""
    usual = dict.fromkeys(count for count in (case.cores, case.cores - 2, case.cores // 2) if count > 0)
    return [[{"workers": count} for count in case.workers or usual]]


def _few_workers(case: FileCase) -> list[list[Settings]]:
    """Numbers of workers that only read files."""
    usual = [count for count in (4, 2, 8) if count < case.cores] or [1]
    return [[{"workers": count} for count in case.workers or usual]]


def fused(case: FileCase, *, ragged: bool = True) -> Any:
    """The pipeline as gpuaug runs it."""
    return gpuaug.fuse(
        pipelines.classification_kornia(case.size, cropping="slice"),
        dtype=half(case.device) or torch.float32,
        memory_format=torch.channels_last,
        ragged=ragged,
        antialias=True,
    )


def decode(path: str) -> Tensor:
    """An image file as (3, H, W) uint8."""
    return decode_image(path, mode=ImageReadMode.RGB)


def _torchvision(case: FileCase, stack: ExitStack, **settings: Any) -> Batches:
    dataset = ImageFolder(case.root, pipelines.classification_torchvision(case.size), loader=decode)

    def finish(images: Tensor) -> Tensor:
        return images.to(half(case.device) or torch.float32, memory_format=torch.channels_last)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        # Only this frame holds the loader: when it ends, the workers end too.
        yield from Serial(loaders.endless(dataset, case.batch_size, case, **settings), case.device, finish)

    return _closing(batches(), stack)


def streamed(case: FileCase, stack: ExitStack, loader: Any, stages: list[Any]) -> Batches:
    """Batches of ``loader`` through a ``StreamedLoader``, which is closed with ``stack``."""
    made = gpuaug.StreamedLoader(loader, stages, device=case.device, depth=loaders.DEPTH)
    stack.callback(made.close)
    return iter(made)


def _workers(case: FileCase, stack: ExitStack, **settings: Any) -> Batches:
    dataset = ImageFolder(case.root, loader=decode)
    loader = loaders.endless(dataset, case.batch_size, case, collate=gpuaug.collate_ragged, pin=False, **settings)
    return streamed(case, stack, loader, [fused(case)])


def _ours(case: FileCase, stack: ExitStack, *, workers: int, **options: Any) -> Batches:
    dataset = ImageFolder(case.root, loader=gpuaug.read_encoded)
    loader = loaders.endless(dataset, case.batch_size, case, workers=workers, collate=gpuaug.collate_encoded, pin=False)
    return streamed(case, stack, loader, [gpuaug.DecodeStage(**options), fused(case)])


def _dali(case: FileCase, stack: ExitStack, **settings: Any) -> Batches:
    largest = case.corpus.largest_px
    return _closing(
        dali_files.batches(case.root, case.batch_size, case.size, case.device, largest_px=largest, **settings), stack
    )


def _spdl(case: FileCase, stack: ExitStack, *, threads: int) -> Batches:
    try:
        import spdl.io
        from spdl.pipeline import PipelineBuilder
    except ImportError as error:
        raise MissingError(f"not installed: {error}") from None
    samples = ImageFolder(case.root).samples
    try:
        spdl.io.load_image(samples[0][0])  # without FFmpeg it fails here once, and not for each image of a batch
    except Exception as error:
        raise MissingError(f"cannot decode here: {error}") from None
    draw = torch.Generator().manual_seed(0)

    def picked() -> Iterator[list[tuple[str, int]]]:
        while True:
            yield [samples[index] for index in torch.randint(len(samples), (case.batch_size,), generator=draw).tolist()]

    def load(batch: list[tuple[str, int]]) -> tuple[Tensor, Tensor]:
        paths, labels = zip(*batch, strict=True)
        buffer = spdl.io.load_image_batch(paths, width=_SHRUNK_PX, height=_SHRUNK_PX, pix_fmt="rgb24")
        images = spdl.io.to_torch(buffer).permute(0, 3, 1, 2)
        return (images.pin_memory() if case.device.type == "cuda" else images), torch.tensor(labels)

    builder = PipelineBuilder().add_source(picked()).pipe(load, concurrency=threads, output_order="input")
    pipeline = builder.add_sink(loaders.DEPTH).build(num_threads=threads)
    stack.enter_context(pipeline.auto_stop())
    return iter(Serial(pipeline, case.device, fused(case, ragged=False)))


def _closing(batches: Any, stack: ExitStack) -> Batches:
    stack.callback(batches.close)
    return batches


def _scaled(case: FileCase, stack: ExitStack, **settings: Any) -> Batches:
    return _ours(case, stack, min_side=2 * case.size, **settings)


def _memory_mapped(case: FileCase, stack: ExitStack, **settings: Any) -> Batches:
    """Images that were decoded and resized before, from the page cache: a loader without decoding."""
    dataset = RawImages(case.root)
    loader = loaders.endless(dataset, case.batch_size, case, pin=False, **settings)
    return streamed(case, stack, loader, [lambda images: images.permute(0, 3, 1, 2), fused(case, ragged=False)])


LOADERS: dict[str, Way] = {
    TORCHVISION: Way(_torchvision, _most_workers),
    WORKERS: Way(_workers, _most_workers),
    DALI: Way(_dali, lambda case: dali_files.axes(case.cores, mixed=True), needs_gpu=True),
    DALI_CPU: Way(_dali, lambda case: dali_files.axes(case.cores, mixed=False)),
    SPDL: Way(_spdl, lambda case: [[{"threads": count} for count in dict.fromkeys((case.cores, -(-case.cores // 2)))]]),
    OURS: Way(_ours, _few_workers),
    OURS_ENGINES: Way(partial(_ours, backend="engines"), _few_workers, needs_gpu=True, settled_by=OURS),
    OURS_CPU: Way(partial(_ours, backend="cpu"), _few_workers, settled_by=OURS),
    OURS_SCALED: Way(_scaled, _few_workers),
    MAPPED: Way(_memory_mapped, _most_workers),
}
"""Name of a row: its way."""

WITHOUT_ENGINES: dict[str, Way] = {
    WORKERS: LOADERS[WORKERS],
    DALI: Way(_dali, lambda case: dali_files.axes(case.cores, mixed=True, engines=False), needs_gpu=True),
    OURS: Way(partial(_ours, backend="hybrid"), _few_workers, needs_gpu=True),
    OURS_CPU: LOADERS[OURS_CPU],
}
"""Name of a row: its way on a card whose engines are hidden, so that other decoders of the card are measured."""

ON_CPU: dict[str, Way] = {
    WORKERS: LOADERS[WORKERS],
    DALI: LOADERS[DALI_CPU],
    DALI_WHOLE: Way(_dali, lambda case: dali_files.axes(case.cores, mixed=False, regions=(False,))),
    OURS: Way(partial(_ours, backend="cpu"), _few_workers),
}
"""Name of a row: its way with decoders on the CPU alone."""
