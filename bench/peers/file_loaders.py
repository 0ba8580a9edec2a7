"""Loaders that the suite ``files`` compares, from a folder of files to augmented batches on the card.

All end with RandomResizedCrop, RandomHorizontalFlip, ColorJitter without hue and Normalize; crops are antialiased; images have
half precision and are channels last.
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
from torchvision.transforms.v2.functional import resize

import gpuaug
from bench.data import loaders, pipelines
from bench.data.encoded_images import Corpus
from bench.data.raw_images import RawImages
from bench.harness.loops import Serial, autocast_dtype
from bench.harness.optional_rows import MissingError
from bench.harness.settings_search import Settings
from bench.peers import dali_files

TORCHVISION = "torchvision, workers"
WORKERS = "workers decode, fuse"
DALI = "DALI"
DALI_CPU = "DALI, CPU"
DALI_WHOLE = "DALI, whole images"
SPDL = "SPDL, fuse"
TORCHCODEC = "torchcodec, fuse"
OURS = "gpuaug"
OURS_ENGINES = "gpuaug, engines"
OURS_CPU = "gpuaug, CPU"
OURS_MIN_SIDE = "gpuaug, min_side"
MAPPED = "memory-mapped"

_RESIZED_PX = 256  # side to which SPDL and torchcodec resize images, since they have no ragged batches

Batches = Iterator[tuple[Any, Any]]
"""Endless (images, labels) on the device, with one label per image."""


@dataclass(frozen=True)
class FileCase:
    """Files of a case, and the form of the batches.

    Args:
        corpus: Folder of the files, with its statistics.
        batch_size: Number of images in a batch.
        size: Side of the augmented images in pixels.
        device: Device of the batches.
        cores: Number of cores that all processes may use.
        workers: Numbers of DataLoader workers to try. Empty: numbers derived from ``cores``.
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
class LoaderSpec:
    """The loader of a row, and the settings to search for it.

    Args:
        open: Opens the loader with the settings as keyword arguments, and registers its clean-up on the stack.
        axes: Settings to search for a case: one list per axis. The search starts at the first entry of each list.
        needs_gpu: Whether the row is skipped on a CPU.
        settings_row: Row whose best settings are reused, if that row was measured before.
    """

    open: Callable[..., Batches]
    axes: Callable[[FileCase], list[list[Settings]]] = lambda _: [[{}]]
    needs_gpu: bool = False
    settings_row: str = ""


def queue_length(settings: Settings) -> int:
    """Largest number of batches that are ready or in preparation before the first ``next``."""
    return 2 * settings.get("workers", 0) + loaders.DEPTH + 4


def versions() -> dict[str, str]:
    """Return the versions of installed packages that decode."""
    packages = (
        *("nvidia-dali-cuda130", "nvidia-nvimgcodec-cu13", "nvidia-nvjpeg", "simplejpeg", "pillow"),
        *("spdl", "torchcodec"),
    )
    versions_by_package = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            versions_by_package[name] = metadata.version(name)
    return versions_by_package


def _decoding_workers(case: FileCase) -> list[list[Settings]]:
    """Numbers of workers to try where workers decode: about the number of cores."""
    defaults = dict.fromkeys(count for count in (case.cores, case.cores - 2, case.cores // 2) if count > 0)
    return [[{"workers": count} for count in case.workers or defaults]]


def _reading_workers(case: FileCase) -> list[list[Settings]]:
    """Numbers of workers to try where workers only read files."""
    defaults = [count for count in (4, 2, 8) if count < case.cores] or [1]
    return [[{"workers": count} for count in case.workers or defaults]]


def fused(case: FileCase, *, ragged: bool = True) -> Any:
    """Return the augmentation pipeline, fused by gpuaug."""
    return gpuaug.fuse(
        pipelines.classification_kornia(case.size, cropping="slice"),
        dtype=autocast_dtype(case.device) or torch.float32,
        memory_format=torch.channels_last,
        ragged=ragged,
        antialias=True,
    )


def decode(path: str) -> Tensor:
    """Decode an image file to (3, H, W) uint8."""
    return decode_image(path, mode=ImageReadMode.RGB)


def _torchvision(case: FileCase, stack: ExitStack, **settings: Any) -> Batches:
    dataset = ImageFolder(case.root, pipelines.classification_torchvision(case.size), loader=decode)

    def to_output_format(images: Tensor) -> Tensor:
        return images.to(autocast_dtype(case.device) or torch.float32, memory_format=torch.channels_last)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        # Only this frame refers to the loader, so that closing the generator ends the workers.
        yield from Serial(loaders.endless(dataset, case.batch_size, case, **settings), case.device, to_output_format)

    return _close_with(batches(), stack)


def streamed(case: FileCase, stack: ExitStack, loader: Any, stages: list[Any]) -> Batches:
    """Iterate ``loader`` through a ``StreamedLoader`` that ``stack`` closes."""
    streamed_loader = gpuaug.StreamedLoader(loader, stages, device=case.device, depth=loaders.DEPTH)
    stack.callback(streamed_loader.close)
    return iter(streamed_loader)


def _workers_and_fuse(case: FileCase, stack: ExitStack, **settings: Any) -> Batches:
    dataset = ImageFolder(case.root, loader=decode)
    loader = loaders.endless(dataset, case.batch_size, case, collate=gpuaug.collate_ragged, pin=False, **settings)
    return streamed(case, stack, loader, [fused(case)])


def _gpuaug(case: FileCase, stack: ExitStack, *, workers: int, **options: Any) -> Batches:
    dataset = ImageFolder(case.root, loader=gpuaug.read_encoded)
    loader = loaders.endless(dataset, case.batch_size, case, workers=workers, collate=gpuaug.collate_encoded, pin=False)
    return streamed(case, stack, loader, [gpuaug.DecodeStage(**options), fused(case)])


def _dali(case: FileCase, stack: ExitStack, **settings: Any) -> Batches:
    largest = case.corpus.largest_px
    return _close_with(
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
        spdl.io.load_image(samples[0][0])  # without FFmpeg it raises here once, instead of for each image of a batch
    except Exception as error:
        raise MissingError(f"cannot decode here: {error}") from None
    generator = torch.Generator().manual_seed(0)

    def random_samples() -> Iterator[list[tuple[str, int]]]:
        while True:
            yield [samples[index] for index in torch.randint(len(samples), (case.batch_size,), generator=generator).tolist()]

    def load(batch: list[tuple[str, int]]) -> tuple[Tensor, Tensor]:
        paths, labels = zip(*batch, strict=True)
        buffer = spdl.io.load_image_batch(paths, width=_RESIZED_PX, height=_RESIZED_PX, pix_fmt="rgb24")
        images = spdl.io.to_torch(buffer).permute(0, 3, 1, 2)
        return (images.pin_memory() if case.device.type == "cuda" else images), torch.tensor(labels)

    builder = PipelineBuilder().add_source(random_samples()).pipe(load, concurrency=threads, output_order="input")
    pipeline = builder.add_sink(loaders.DEPTH).build(num_threads=threads)
    stack.enter_context(pipeline.auto_stop())
    return iter(Serial(pipeline, case.device, fused(case, ragged=False)))


def read_bytes(path: str) -> bytes:
    """Return the content of a file."""
    return Path(path).read_bytes()


def lists(samples: list[tuple[bytes, int]]) -> tuple[list[bytes], Tensor]:
    """Collate files and labels to a list and a tensor."""
    files, labels = zip(*samples, strict=True)
    return list(files), torch.tensor(labels)


def torchcodec_decoders() -> Any:
    """Return the module ``torchcodec.decoders``.

    Raises:
        MissingError: If torchcodec is not installed, or libraries that it is linked to are missing.
    """
    try:
        from torchcodec import decoders
    except (ImportError, RuntimeError) as error:
        raise MissingError(f"not installed: {error}") from None
    return decoders


def _torchcodec(case: FileCase, stack: ExitStack, **settings: Any) -> Batches:
    """Workers read files; torchcodec decodes each batch on the device, with one call."""
    decoders = torchcodec_decoders()
    dataset = ImageFolder(case.root, loader=read_bytes)
    loader = loaders.endless(dataset, case.batch_size, case, collate=lists, pin=False, **settings)
    augment = fused(case, ragged=False)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for files, labels in loader:
            images = [resize(image, [_RESIZED_PX] * 2) for image in decoders.decode_jpeg(files, device=case.device)]
            yield augment(torch.stack(images)), labels.to(case.device, non_blocking=True)

    return _close_with(batches(), stack)


def _close_with(batches: Any, stack: ExitStack) -> Batches:
    stack.callback(batches.close)
    return batches


def _gpuaug_min_side(case: FileCase, stack: ExitStack, **settings: Any) -> Batches:
    return _gpuaug(case, stack, min_side=2 * case.size, **settings)


def _memory_mapped(case: FileCase, stack: ExitStack, **settings: Any) -> Batches:
    """Raw images from the page cache, decoded and resized beforehand: a loader without decoding."""
    dataset = RawImages(case.root)
    loader = loaders.endless(dataset, case.batch_size, case, pin=False, **settings)
    return streamed(case, stack, loader, [lambda images: images.permute(0, 3, 1, 2), fused(case, ragged=False)])


LOADERS: dict[str, LoaderSpec] = {
    TORCHVISION: LoaderSpec(_torchvision, _decoding_workers),
    WORKERS: LoaderSpec(_workers_and_fuse, _decoding_workers),
    DALI: LoaderSpec(_dali, lambda case: dali_files.axes(case.cores, mixed=True), needs_gpu=True),
    DALI_CPU: LoaderSpec(_dali, lambda case: dali_files.axes(case.cores, mixed=False)),
    SPDL: LoaderSpec(_spdl, lambda case: [[{"threads": count} for count in dict.fromkeys((case.cores, -(-case.cores // 2)))]]),
    TORCHCODEC: LoaderSpec(_torchcodec, _reading_workers),
    OURS: LoaderSpec(_gpuaug, _reading_workers),
    OURS_ENGINES: LoaderSpec(partial(_gpuaug, backend="engines"), _reading_workers, needs_gpu=True, settings_row=OURS),
    OURS_CPU: LoaderSpec(partial(_gpuaug, backend="cpu"), _reading_workers, settings_row=OURS),
    OURS_MIN_SIDE: LoaderSpec(_gpuaug_min_side, _reading_workers),
    MAPPED: LoaderSpec(_memory_mapped, _decoding_workers),
}
"""Name of a row: its loader."""

WITHOUT_ENGINES: dict[str, LoaderSpec] = {
    WORKERS: LOADERS[WORKERS],
    DALI: LoaderSpec(_dali, lambda case: dali_files.axes(case.cores, mixed=True, engines=False), needs_gpu=True),
    OURS: LoaderSpec(partial(_gpuaug, backend="hybrid"), _reading_workers, needs_gpu=True),
    OURS_CPU: LOADERS[OURS_CPU],
}
"""Name of a row: its loader in cases ``no-engines``, where decoders on the GPU do not use the JPEG engines."""

ON_CPU: dict[str, LoaderSpec] = {
    WORKERS: LOADERS[WORKERS],
    DALI: LOADERS[DALI_CPU],
    DALI_WHOLE: LoaderSpec(_dali, lambda case: dali_files.axes(case.cores, mixed=False, regions=(False,))),
    OURS: LoaderSpec(partial(_gpuaug, backend="cpu"), _reading_workers),
}
"""Name of a row: its loader in cases ``cpu``, where all decoders run on the CPU."""
