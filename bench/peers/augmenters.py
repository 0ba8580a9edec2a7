"""The augmenters that the suite ``augment`` compares, on a batch that is on the device: gpuaug and its competitors.

All get the same uint8 images and return images of the same shape and the same number of bytes. Kornia's rows crop by a warp,
which needs no loop over the images; gpuaug gets the pipeline as Kornia's users write it. Modules stay on the CPU, where Kornia
0.9 draws without waiting for the device.

Boxes come as each library takes them for a batch: a target dict for each image, one tensor of all boxes, or padded tensors.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import nn

import gpuaug
from bench.data import loaders, pipelines, random_images
from bench.data.recipes import detection as recipes
from bench.data.target_batches import Batch, collate, move, random_batch, read_tensors, split_targets
from bench.harness.call_rows import AugmentCall, QueuedCall
from bench.harness.optional_rows import MissingError
from bench.peers import dali
from gpuaug.benchkit.environment import allowed_cores


@dataclass(frozen=True)
class Case:
    """One pipeline, in the form of each library.

    Args:
        name: The case of its rows.
        kornia: Makes Kornia's pipeline, from ``cropping`` and arguments of the container; ``None`` if Kornia lacks a transform.
        torchvision: Makes torchvision's pipeline.
        out: Side of the augmented images in pixels.
        dtype: Data type of the augmented images.
        loop: Makes torchvision's pipeline with a call per image, where such a loop was published.
        masks: Data type of the augmented masks; ``None`` without masks.
        boxes: Whether boxes are augmented too.
        preset: Whether it is one of torchvision's reference presets, whose rows are compared with torchvision's.
    """

    name: str
    kornia: Callable[..., nn.Module] | None
    torchvision: Callable[[], nn.Module]
    out: int
    dtype: torch.dtype = torch.bfloat16
    loop: Callable[[], nn.Module] | None = None
    masks: torch.dtype | None = None
    boxes: bool = False
    preset: bool = False

    @property
    def baseline(self) -> str:
        """The row that ratios are relative to."""
        return TORCHVISION if self.preset else EAGER

    @property
    def ours(self) -> str:
        """The row of gpuaug's that the others are compared with."""
        return OURS_TORCHVISION if self.preset else OURS

    @property
    def memory_format(self) -> torch.memory_format:
        """Memory format of the augmented images: channels last for half precision, as convolutions prefer."""
        return torch.contiguous_format if self.dtype == torch.float32 else torch.channels_last


def cases(size: int) -> list[Case]:
    """The pipelines, for images of ``size`` pixels a side."""
    out = size * 7 // 8
    # As the preset for segmentation crops images that are resized around 520 pixels to 480.
    cropped = size * 12 // 13
    preset = partial(Case, dtype=torch.float32, preset=True)
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
            masks=torch.uint8,
        ),
        Case(
            "randaugment",
            pipelines.randaugment_kornia,
            pipelines.randaugment_torchvision,
            size,
        ),
        preset(
            "hflip",
            partial(pipelines.hflip_kornia, data_keys=["input", "bbox_xyxy"]),
            recipes.hflip,
            size,
            boxes=True,
        ),
        preset("lsj", None, partial(recipes.lsj, size), size, boxes=True),
        preset("ssd", None, partial(recipes.ssd, size), size, boxes=True),
        preset(
            "segmentation",
            None,
            partial(recipes.segmentation, size, cropped),
            cropped,
            masks=torch.int64,
        ),
    ]


def sample(case: Case, batch_size: int, size: int, device: torch.device) -> Batch:
    """Random images on ``device``, and masks or boxes where the pipeline takes them."""
    return random_batch(batch_size, size, device, masks=case.masks is not None, boxes=case.boxes)


def fused(case: Case, name: str, **options: Any) -> nn.Module:
    """The pipeline of one of gpuaug's rows, as gpuaug runs it."""
    pipeline = case.torchvision() if name in (OURS_TORCHVISION, OURS_PADDED) else case.kornia(cropping="slice")
    return gpuaug.fuse(pipeline, dtype=case.dtype, memory_format=case.memory_format, **options)


def _gpuaug(case: Case, batch: Batch, _stack: ExitStack, *, name: str, **options: Any) -> AugmentCall:
    given = batch.by_key()
    # By images alone where there is nothing else, as in a training loop.
    keys = {"data_keys": list(given)} if len(given) > 1 else {}
    return partial(fused(case, name, **options), *given.values(), **keys)


def _gpuaug_targets(case: Case, batch: Batch, stack: ExitStack, *, name: str) -> AugmentCall:
    """The target dicts of torchvision's models, in which boxes that are not valid are dropped."""
    if batch.targets is None:
        return _gpuaug(case, batch, stack, name=name)
    augment = fused(case, name)
    loaded = batch.loaded_inputs()

    def call() -> Any:
        images, targets = augment(*loaded, data_keys=["input", "targets"])
        return images, gpuaug.sanitize(targets)

    return call


def _streamed(case: Case, batch: Batch, stack: ExitStack) -> AugmentCall:
    if case.boxes:
        return _streamed_targets(case, batch, stack)
    images = random_images.RandomImages(batch.images.shape[-1])
    batches = loaders.repeat_batches(loaders.sample_batches(images, len(batch.images), 4, batch.images.device, pin=True))
    loader = gpuaug.StreamedLoader(batches, [fused(case, STREAMED)], device=batch.images.device, depth=loaders.DEPTH)
    stack.callback(loader.close)
    streamed = iter(loader)
    return QueuedCall(lambda: next(streamed)[0], loaders.DEPTH + 2)


def _streamed_targets(case: Case, batch: Batch, stack: ExitStack) -> AugmentCall:
    """Target dicts on the host and images on the device through a loader, whose stages augment them and drop boxes."""
    batches = loaders.repeat_batches([(batch.images, move(batch.targets, torch.device("cpu")))])
    stages = [
        gpuaug.TransformStage(fused(case, OURS_TORCHVISION), on={0: "input", 1: "targets"}),
        gpuaug.TransformStage(gpuaug.sanitize, on=1),
    ]
    streamed = gpuaug.StreamedLoader(batches, stages, device=batch.images.device, depth=loaders.DEPTH)
    stack.callback(streamed.close)
    iterator = iter(streamed)
    return QueuedCall(lambda: next(iterator), loaders.DEPTH + 2)


def _kornia(case: Case, batch: Batch, _stack: ExitStack, **container: Any) -> AugmentCall:
    inputs = list(batch.by_key().values())[:2]
    return _float(case, inputs, pipelines.Scaled(case.kornia(cropping="resample", **container)))


def _compiled(case: Case, batch: Batch, _stack: ExitStack) -> AugmentCall:
    torch.compiler.reset()
    # Static shapes give faster code; a new batch size compiles anew.
    return _float(case, batch.inputs, torch.compile(pipelines.Scaled(case.kornia(cropping="resample")), dynamic=False))


def _torchvision(case: Case, batch: Batch, _stack: ExitStack) -> AugmentCall:
    return _float(case, batch.for_torchvision(), case.torchvision())


def _torchvision_workers(case: Case, batch: Batch, stack: ExitStack) -> AugmentCall:
    samples = random_images.Transformed(batch.samples(), case.torchvision())
    options = Namespace(device=batch.images.device, workers=workers())
    loader = loaders.endless(samples, len(batch.images), options, collate=collate)
    batches = iter(loader)
    stack.callback(batches._shutdown_workers)  # type: ignore[attr-defined]
    call = _float(case, (), lambda: [split_targets(move(column, batch.images.device)) for column in next(batches)])
    return QueuedCall(call, loaders.queue_length(loader))


def _torchvision_loop(case: Case, batch: Batch, _stack: ExitStack) -> AugmentCall:
    assert case.loop is not None, "its row was left out"
    return _float(case, batch.inputs, pipelines.Scaled(case.loop()))


def _fuse_augmentations(case: Case, batch: Batch, _stack: ExitStack) -> AugmentCall:
    try:
        from fuse_aug import Compose
    except ImportError as error:
        raise MissingError(f"not installed: {error}") from None
    keys = {"data_keys": ["input", "mask"]} if case.masks else {}
    # Unlike Kornia's, its modules must be on the images' device.
    composed = Compose(list(case.kornia(cropping="resample").children()), **keys).to(batch.images.device)
    return _float(case, batch.inputs, pipelines.Scaled(composed))


def _dali(case: Case, batch: Batch, _stack: ExitStack) -> AugmentCall:
    try:
        return dali.build(dali.PIPELINES[case.name], batch.images, batch.masks, case.dtype, batch.targets)
    except ImportError as error:
        raise MissingError(f"not installed: {error}") from None


def _float(case: Case, inputs: Sequence[Any], module: Callable[..., Any]) -> AugmentCall:
    """A call of ``module`` on ``inputs``, whose images have gpuaug's data type and memory format."""

    def call() -> Any:
        found = module(*inputs)
        images, *rest = found if isinstance(found, (list, tuple)) else (found,)
        images = images.to(case.dtype, memory_format=case.memory_format)
        return [images, *rest] if rest else images

    return call


LOOP = "torchvision loop"
TORCHVISION = "torchvision v2"
EAGER = "Kornia"
MATRICES_SKIPPED = "Kornia, matrices skipped"
COMPILED = "Kornia compiled"
FUSE_AUGMENTATIONS = "fuse-augmentations"
DALI = "DALI"
OURS = "gpuaug"
ANTIALIASED = "gpuaug, antialiased"
OURS_TORCHVISION = "gpuaug, from torchvision"
OURS_PADDED = "gpuaug, padded boxes"
STREAMED = "gpuaug, streamed"
WORKERS = "torchvision v2, workers"

AUGMENTERS: dict[str, Callable[[Case, Batch, ExitStack], AugmentCall]] = {
    LOOP: _torchvision_loop,
    TORCHVISION: _torchvision,
    WORKERS: _torchvision_workers,
    EAGER: _kornia,
    MATRICES_SKIPPED: partial(_kornia, transformation_matrix_mode="skip"),
    COMPILED: _compiled,
    FUSE_AUGMENTATIONS: _fuse_augmentations,
    DALI: _dali,
    OURS: partial(_gpuaug, name=OURS),
    ANTIALIASED: partial(_gpuaug, name=ANTIALIASED, antialias=True),
    OURS_TORCHVISION: partial(_gpuaug_targets, name=OURS_TORCHVISION),
    OURS_PADDED: partial(_gpuaug, name=OURS_PADDED),
    STREAMED: _streamed,
}
"""Name of a row: function that makes its call. Clean-up after the case is registered on the stack."""


def call_of(name: str, case: Case, batch: Batch, stack: ExitStack) -> AugmentCall:
    """The call of a row. With boxes it ends when each tensor of its result has been read.

    Args:
        name: Name of the row.
        case: Pipeline of the row.
        batch: Inputs of the call.
        stack: Takes the clean-up after the case.
    """
    call = AUGMENTERS[name](case, batch, stack)
    if not case.boxes:
        return call
    if isinstance(call, QueuedCall):
        return QueuedCall(partial(_read_after, call.call), call.queue_length)
    return partial(_read_after, call)


def _read_after(call: AugmentCall) -> Any:
    return read_tensors(call())


def row_names(case: Case) -> list[str]:
    """The names of all rows of a pipeline, including rows that cannot run on this machine."""
    # The loop was published for one pipeline, and streaming is measured with one. Compiling takes minutes: only the three
    # pipelines whose figures are quoted are compiled.
    only = {
        LOOP: case.loop is not None,
        STREAMED: case.name == "cls" or case.boxes,
        COMPILED: case.name in ("seed", "cls", "ssl"),
        ANTIALIASED: case.name in ("seed", "cls", "ssl"),
        OURS_PADDED: case.boxes and case.name != "ssd",  # its crop by boxes takes target dicts
        FUSE_AUGMENTATIONS: not case.preset,
        DALI: case.name in dali.PIPELINES,
    }
    if case.kornia is None:
        only |= dict.fromkeys((EAGER, MATRICES_SKIPPED, OURS), False)
    return [name for name in AUGMENTERS if only.get(name, True)]


def workers() -> int:
    """Number of worker processes of the row with workers: two cores are left free."""
    return max(min(allowed_cores(), 16) - 2, 1)


def installed_versions() -> dict[str, str]:
    """Versions of the installed peers that ``environment`` does not name."""
    found = {}
    for package in ("fuse-augmentations", "nvidia-dali-cuda130", "nvidia-dali-cuda120"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
