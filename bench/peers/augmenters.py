"""The augmenters that the suite ``augment`` compares, on a batch that is on the device: gpuaug and its competitors.

All get the same uint8 images and return images of the same shape and the same number of bytes. Kornia's rows crop by a warp,
which needs no loop over the images; gpuaug gets the pipeline as Kornia's users write it. Modules stay on the CPU, where Kornia
0.9 draws without waiting for the device.
"""

from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import tv_tensors

import gpuaug
from bench.data import loaders, pipelines, random_images
from bench.harness.call_rows import AugmentCall
from bench.harness.optional_rows import MissingError
from bench.peers import dali
from gpuaug.benchkit.environment import cores_allowed


@dataclass(frozen=True)
class Case:
    """One pipeline, in the form of each library.

    Args:
        name: The case of its rows.
        kornia: Makes Kornia's pipeline, from ``cropping`` and arguments of the container.
        torchvision: Makes torchvision's pipeline.
        out: Side of the augmented images in pixels.
        dtype: Data type of the augmented images.
        loop: Makes torchvision's pipeline with a call per image, where such a loop was published.
        masks: Whether uint8 masks are augmented too.
    """

    name: str
    kornia: Callable[..., nn.Module]
    torchvision: Callable[[], nn.Module]
    out: int
    dtype: torch.dtype = torch.bfloat16
    loop: Callable[[], nn.Module] | None = None
    masks: bool = False

    @property
    def memory_format(self) -> torch.memory_format:
        """Memory format of the augmented images: channels last for half precision, as convolutions prefer."""
        return torch.contiguous_format if self.dtype == torch.float32 else torch.channels_last


@dataclass(frozen=True)
class Batch:
    """Images (B, 3, H, W) uint8 and masks (B, 1, H, W) uint8, on the device."""

    images: Tensor
    masks: Tensor | None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The images, and the masks if there are any."""
        return (self.images,) if self.masks is None else (self.images, self.masks)


def cases(size: int) -> list[Case]:
    """The pipelines, for images of ``size`` pixels a side."""
    out = size * 7 // 8
    classification = partial(pipelines.classification_kornia, out)
    return [
        Case(
            "seed",
            partial(pipelines.heavy_kornia, size),
            partial(pipelines.heavy_worker, size),
            size,
            dtype=torch.float32,
            loop=partial(pipelines.HeavyPublished, size),
        ),
        Case("cls", classification, partial(pipelines.classification_torchvision, out), out),
        Case("ssl", partial(pipelines.contrastive_kornia, out), partial(pipelines.contrastive_torchvision, out), out),
        Case(
            "masks",
            partial(classification, data_keys=["input", "mask"]),
            partial(pipelines.classification_torchvision, out),
            out,
            masks=True,
        ),
        Case(
            "randaugment",
            pipelines.randaugment_kornia,
            pipelines.randaugment_torchvision,
            size,
        ),
    ]


def sample(case: Case, batch_size: int, size: int, device: torch.device) -> Batch:
    """Random images on ``device``, and masks where the pipeline takes them."""
    images = torch.randint(256, (batch_size, 3, size, size), dtype=torch.uint8, device=device)
    masks = torch.randint(21, (batch_size, 1, size, size), dtype=torch.uint8, device=device) if case.masks else None
    return Batch(images, masks)


def fused(case: Case, pipeline: nn.Module | None = None, **options: Any) -> nn.Module:
    """A pipeline as gpuaug runs it, Kornia's unless another is given."""
    pipeline = case.kornia(cropping="slice") if pipeline is None else pipeline
    return gpuaug.fuse(pipeline, dtype=case.dtype, memory_format=case.memory_format, **options)


def _gpuaug(case: Case, batch: Batch, _stack: ExitStack, **options: Any) -> AugmentCall:
    augment = fused(case, **options)
    return lambda: augment(*batch.parts)


def _gpuaug_torchvision(case: Case, batch: Batch, _stack: ExitStack) -> AugmentCall:
    augment = fused(case, case.torchvision())
    return lambda: augment(*batch.parts)


def _streamed(case: Case, batch: Batch, stack: ExitStack) -> AugmentCall:
    images = random_images.RandomImages(batch.images.shape[-1])
    batches = loaders.cycle(loaders.sample(images, len(batch.images), 4, batch.images.device, pin=True))
    loader = gpuaug.StreamedLoader(batches, [fused(case)], device=batch.images.device, depth=loaders.DEPTH)
    stack.callback(loader.close)
    streamed = iter(loader)
    return lambda: next(streamed)[0]


def _kornia(case: Case, batch: Batch, _stack: ExitStack, **container: Any) -> AugmentCall:
    return _float(case, batch, pipelines.Scaled(case.kornia(cropping="resample", **container)))


def _compiled(case: Case, batch: Batch, _stack: ExitStack) -> AugmentCall:
    torch.compiler.reset()
    # Static shapes give faster code; a new batch size compiles anew.
    return _float(case, batch, torch.compile(pipelines.Scaled(case.kornia(cropping="resample")), dynamic=False))


def _torchvision(case: Case, batch: Batch, _stack: ExitStack) -> AugmentCall:
    wrapped = [tv_tensors.Image(batch.images), *(tv_tensors.Mask(part) for part in batch.parts[1:])]
    return _float(case, Batch(*wrapped, *[None] * (2 - len(wrapped))), case.torchvision())


def _torchvision_workers(case: Case, batch: Batch, stack: ExitStack) -> AugmentCall:
    images = random_images.RandomImages(batch.images.shape[-1], transform=case.torchvision())
    options = Namespace(device=batch.images.device, workers=workers())
    batches = iter(loaders.endless(images, len(batch.images), options))
    stack.callback(batches._shutdown_workers)  # type: ignore[attr-defined]
    return _float(case, Batch(batch.images, None), lambda _: next(batches)[0].to(batch.images.device, non_blocking=True))


def _torchvision_loop(case: Case, batch: Batch, _stack: ExitStack) -> AugmentCall:
    assert case.loop is not None, "its row was left out"
    return _float(case, batch, pipelines.Scaled(case.loop()))


def _fuse_augmentations(case: Case, batch: Batch, _stack: ExitStack) -> AugmentCall:
    try:
        from fuse_aug import Compose
    except ImportError as error:
        raise MissingError(f"not installed: {error}") from None
    keys = {"data_keys": ["input", "mask"]} if case.masks else {}
    # Unlike Kornia's, its modules must be on the images' device.
    composed = Compose(list(case.kornia(cropping="resample").children()), **keys).to(batch.images.device)
    return _float(case, batch, pipelines.Scaled(composed))


def _dali(case: Case, batch: Batch, _stack: ExitStack) -> AugmentCall:
    try:
        return dali.build(case.name, batch.images, batch.masks, case.dtype)
    except ImportError as error:
        raise MissingError(f"not installed: {error}") from None


def _float(case: Case, batch: Batch, module: Callable[..., Any]) -> AugmentCall:
    """A call of ``module`` on the batch, whose result has gpuaug's data type and memory format."""

    def call() -> Any:
        found = module(*batch.parts)
        images, *rest = found if isinstance(found, (list, tuple)) else (found,)
        images = images.to(case.dtype, memory_format=case.memory_format)
        return [images, *rest] if rest else images

    return call


LOOP = "torchvision loop"
EAGER = "Kornia"
COMPILED = "Kornia compiled"
DALI = "DALI"
OURS = "gpuaug"
ANTIALIASED = "gpuaug, antialiased"
OURS_TORCHVISION = "gpuaug, from torchvision"
STREAMED = "gpuaug, streamed"
WORKERS = "torchvision v2, workers"

AUGMENTERS: dict[str, Callable[[Case, Batch, ExitStack], AugmentCall]] = {
    LOOP: _torchvision_loop,
    "torchvision v2": _torchvision,
    WORKERS: _torchvision_workers,
    EAGER: _kornia,
    "Kornia, matrices skipped": partial(_kornia, transformation_matrix_mode="skip"),
    COMPILED: _compiled,
    "fuse-augmentations": _fuse_augmentations,
    DALI: _dali,
    OURS: _gpuaug,
    ANTIALIASED: partial(_gpuaug, antialias=True),
    OURS_TORCHVISION: _gpuaug_torchvision,
    STREAMED: _streamed,
}
"""Name of a row: function that makes its call. Clean-up after the case is registered on the stack."""


def row_names(case: Case) -> list[str]:
    """The names of all rows of a pipeline, including rows that cannot run on this machine."""
    # The loop was published for one pipeline, and streaming is measured with one. Compiling takes minutes: only the three
    # pipelines whose figures are quoted are compiled.
    only = {
        LOOP: case.loop is not None,
        STREAMED: case.name == "cls",
        COMPILED: case.name in ("seed", "cls", "ssl"),
        ANTIALIASED: case.name in ("seed", "cls", "ssl"),
        OURS_TORCHVISION: not case.masks,
        WORKERS: not case.masks,
    }
    return [name for name in AUGMENTERS if only.get(name, True)]


def workers() -> int:
    """Number of worker processes of the row with workers: two cores are left free."""
    return max(min(cores_allowed(), 16) - 2, 1)


def installed_versions() -> dict[str, str]:
    """Versions of the installed peers that ``environment`` does not name."""
    found = {}
    for package in ("fuse-augmentations", "nvidia-dali-cuda130", "nvidia-dali-cuda120"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
