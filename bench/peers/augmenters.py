"""Augmenters that the suite ``augment`` compares, on a batch on the device: gpuaug and other libraries.

All take the same uint8 images and return images of the same shape and number of bytes. Kornia's rows crop by a warp, which
needs no loop over the images; gpuaug gets the pipeline as Kornia's users write it. Modules stay on the CPU, where Kornia 0.9
draws without waiting for the device.

Boxes have the form that each library takes for a batch: one target dict per image, one tensor of all boxes, or padded tensors.
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
    """A pipeline in the form of each library.

    Args:
        name: Name of the case.
        kornia: Function that creates Kornia's pipeline, from ``cropping`` and arguments of the container. ``None`` if Kornia
            lacks a transform.
        torchvision: Function that creates torchvision's pipeline.
        out: Side of the augmented images in pixels.
        dtype: Data type of the augmented images.
        loop: Function that creates torchvision's pipeline with a call per image, if such a loop was published.
        masks: Data type of the augmented masks. ``None``: no masks.
        boxes: Whether boxes are augmented too.
        preset: Whether the pipeline is a reference preset of torchvision, whose rows are compared with torchvision's row.
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
        """Name of the row that ratios are relative to."""
        return TORCHVISION if self.preset else EAGER

    @property
    def ours(self) -> str:
        """Name of the row of gpuaug with which other rows are compared."""
        return OURS_TORCHVISION if self.preset else OURS

    @property
    def memory_format(self) -> torch.memory_format:
        """Memory format of the augmented images: channels last for half precision, with which convolutions are faster."""
        return torch.contiguous_format if self.dtype == torch.float32 else torch.channels_last


def cases(size: int) -> list[Case]:
    """Return all cases, for images of ``size`` pixels per side."""
    crop_size = size * 7 // 8
    # The preset for segmentation resizes images to about 520 pixels, and crops them to 480.
    segmentation_size = size * 12 // 13
    preset = partial(Case, dtype=torch.float32, preset=True)
    classification = partial(pipelines.classification_kornia, crop_size)
    return [
        Case(
            "seed",
            partial(pipelines.heavy_kornia, size),
            partial(pipelines.heavy_worker, size),
            size,
            dtype=torch.float32,
            loop=partial(pipelines.HeavyPublished, size),
        ),
        Case("cls", classification, partial(pipelines.classification_torchvision, crop_size), crop_size),
        Case(
            "ssl",
            partial(pipelines.contrastive_kornia, crop_size),
            partial(pipelines.contrastive_torchvision, crop_size),
            crop_size,
        ),
        Case(
            "masks",
            partial(classification, data_keys=["input", "mask"]),
            partial(pipelines.classification_torchvision, crop_size),
            crop_size,
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
            partial(recipes.segmentation, size, segmentation_size),
            segmentation_size,
            masks=torch.int64,
        ),
    ]


def random_inputs(case: Case, batch_size: int, size: int, device: torch.device) -> Batch:
    """Return random images on ``device``, with masks or boxes if the pipeline takes them."""
    return random_batch(batch_size, size, device, masks=case.masks is not None, boxes=case.boxes)


def fused_pipeline(case: Case, name: str, **options: Any) -> nn.Module:
    """Return the fused pipeline of a row of gpuaug."""
    pipeline = case.torchvision() if name in (OURS_TORCHVISION, OURS_PADDED) else case.kornia(cropping="slice")
    return gpuaug.fuse(pipeline, dtype=case.dtype, memory_format=case.memory_format, **options)


def _gpuaug(case: Case, batch: Batch, _stack: ExitStack, *, name: str, **options: Any) -> AugmentCall:
    inputs = batch.by_key()
    # Images alone are passed without data keys, as in a training loop.
    arguments = {"data_keys": list(inputs)} if len(inputs) > 1 else {}
    return partial(fused_pipeline(case, name, **options), *inputs.values(), **arguments)


def _gpuaug_targets(case: Case, batch: Batch, stack: ExitStack, *, name: str) -> AugmentCall:
    """Call with the target dicts of torchvision's models. Boxes that are not valid are removed from the result."""
    if batch.targets is None:
        return _gpuaug(case, batch, stack, name=name)
    augment = fused_pipeline(case, name)
    inputs = batch.loaded_inputs()

    def call() -> Any:
        images, targets = augment(*inputs, data_keys=["input", "targets"])
        return images, gpuaug.sanitize(targets)

    return call


def _streamed(case: Case, batch: Batch, stack: ExitStack) -> AugmentCall:
    if case.boxes:
        return _streamed_targets(case, batch, stack)
    images = random_images.RandomImages(batch.images.shape[-1])
    batches = loaders.repeat_batches(loaders.sample_batches(images, len(batch.images), 4, batch.images.device, pin=True))
    loader = gpuaug.StreamedLoader(batches, [fused_pipeline(case, STREAMED)], device=batch.images.device, depth=loaders.DEPTH)
    stack.callback(loader.close)
    streamed = iter(loader)
    return QueuedCall(lambda: next(streamed)[0], loaders.DEPTH + 2)


def _streamed_targets(case: Case, batch: Batch, stack: ExitStack) -> AugmentCall:
    """Call that reads a loader of target dicts, whose stages augment images and boxes and remove invalid boxes."""
    augment = gpuaug.TransformStage(fused_pipeline(case, OURS_TORCHVISION), on={0: "input", 1: "targets"})
    return _streamed_dicts(batch, [augment, gpuaug.TransformStage(gpuaug.sanitize, on=1)], stack)


def _handed_over(_case: Case, batch: Batch, stack: ExitStack) -> AugmentCall:
    """Call that reads a loader of target dicts, whose stage returns them as they are."""
    return _streamed_dicts(batch, [gpuaug.TransformStage(lambda targets: targets, on=1)], stack)


def _streamed_dicts(batch: Batch, stages: list[gpuaug.TransformStage], stack: ExitStack) -> AugmentCall:
    """Call that reads a loader with images on the device and target dicts on the host."""
    batches = loaders.repeat_batches([(batch.images, move(batch.targets, torch.device("cpu")))])
    streamed = gpuaug.StreamedLoader(batches, stages, device=batch.images.device, depth=loaders.DEPTH)
    stack.callback(streamed.close)
    iterator = iter(streamed)
    return QueuedCall(lambda: next(iterator), loaders.DEPTH + 2)


def _kornia(case: Case, batch: Batch, _stack: ExitStack, **container: Any) -> AugmentCall:
    inputs = list(batch.by_key().values())[:2]
    return _as_output(case, inputs, pipelines.ScaleAndTransform(case.kornia(cropping="resample", **container)))


def _compiled(case: Case, batch: Batch, _stack: ExitStack) -> AugmentCall:
    torch.compiler.reset()
    # Static shapes give faster code. Each batch size is compiled separately.
    return _as_output(
        case, batch.inputs, torch.compile(pipelines.ScaleAndTransform(case.kornia(cropping="resample")), dynamic=False)
    )


def _torchvision(case: Case, batch: Batch, _stack: ExitStack) -> AugmentCall:
    return _as_output(case, batch.for_torchvision(), case.torchvision())


def _torchvision_workers(case: Case, batch: Batch, stack: ExitStack) -> AugmentCall:
    samples = random_images.TransformedSamples(batch.samples(), case.torchvision())
    options = Namespace(device=batch.images.device, workers=worker_count())
    loader = loaders.endless(samples, len(batch.images), options, collate=collate)
    batches = iter(loader)
    stack.callback(batches._shutdown_workers)  # type: ignore[attr-defined]
    call = _as_output(case, (), lambda: [split_targets(move(column, batch.images.device)) for column in next(batches)])
    return QueuedCall(call, loaders.queue_length(loader))


def _torchvision_loop(case: Case, batch: Batch, _stack: ExitStack) -> AugmentCall:
    assert case.loop is not None, "its row was left out"
    return _as_output(case, batch.inputs, pipelines.ScaleAndTransform(case.loop()))


def _fuse_augmentations(case: Case, batch: Batch, _stack: ExitStack) -> AugmentCall:
    try:
        from fuse_aug import Compose
    except ImportError as error:
        raise MissingError(f"not installed: {error}") from None
    keys = {"data_keys": ["input", "mask"]} if case.masks else {}
    # Unlike Kornia's modules, these must be on the device of the images.
    pipeline = Compose(list(case.kornia(cropping="resample").children()), **keys).to(batch.images.device)
    return _as_output(case, batch.inputs, pipelines.ScaleAndTransform(pipeline))


def _dali(case: Case, batch: Batch, _stack: ExitStack) -> AugmentCall:
    try:
        return dali.build(dali.PIPELINES[case.name], batch.images, batch.masks, case.dtype, batch.targets)
    except ImportError as error:
        raise MissingError(f"not installed: {error}") from None


def _as_output(case: Case, inputs: Sequence[Any], module: Callable[..., Any]) -> AugmentCall:
    """Return a call of ``module`` that converts the images to the data type and memory format of gpuaug's result."""

    def call() -> Any:
        outputs = module(*inputs)
        images, *annotations = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
        images = images.to(case.dtype, memory_format=case.memory_format)
        return [images, *annotations] if annotations else images

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
HAND_OVER = "gpuaug, hand-over"
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
    HAND_OVER: _handed_over,
}
"""Name of a row: function that returns its call, and registers the clean-up after the case on the stack."""


def create_call(name: str, case: Case, batch: Batch, stack: ExitStack) -> AugmentCall:
    """Return the call of a row. In cases with boxes, it reads shape and address of each tensor in its result.

    Args:
        name: Name of the row.
        case: Case of the row.
        batch: Inputs of the call.
        stack: Stack for the clean-up after the case.
    """
    call = AUGMENTERS[name](case, batch, stack)
    if not case.boxes:
        return call
    if isinstance(call, QueuedCall):
        return QueuedCall(partial(_call_and_read, call.call), call.queue_length)
    return partial(_call_and_read, call)


def _call_and_read(call: AugmentCall) -> Any:
    return read_tensors(call())


def row_names(case: Case) -> list[str]:
    """Return the names of all rows of a case, including rows that cannot run on this machine."""
    # The loop was published for one pipeline, and streaming is measured with one pipeline without boxes. Compiling takes
    # minutes, so only the three pipelines whose figures are quoted are compiled.
    included = {
        LOOP: case.loop is not None,
        STREAMED: case.name == "cls" or case.boxes,
        COMPILED: case.name in ("seed", "cls", "ssl"),
        ANTIALIASED: case.name in ("seed", "cls", "ssl"),
        HAND_OVER: case.boxes,
        OURS_PADDED: case.boxes and case.name != "ssd",  # the crop by boxes of ssd takes target dicts
        FUSE_AUGMENTATIONS: not case.preset,
        DALI: case.name in dali.PIPELINES,
    }
    if case.kornia is None:
        included |= dict.fromkeys((EAGER, MATRICES_SKIPPED, OURS), False)
    return [name for name in AUGMENTERS if included.get(name, True)]


def worker_count() -> int:
    """Return the number of worker processes of the row with workers, which leave two cores free."""
    return max(min(allowed_cores(), 16) - 2, 1)


def peer_versions() -> dict[str, str]:
    """Return the versions of installed peers that ``environment`` does not contain."""
    versions = {}
    for package in ("fuse-augmentations", "nvidia-dali-cuda130", "nvidia-dali-cuda120"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
