"""Images of different sizes, cropped to one size: gpuaug and other libraries.

    python -m bench run ragged

Random uint8 images of 300 to 700 pixels per side become 224 x 224: RandomResizedCrop, RandomHorizontalFlip, ColorJitter without
hue, Normalize, to bfloat16 and channels last. Cases differ in antialiasing, and in the source of the images: "on the card",
where the loop only augments, or "from the host", where images are copied first. Rows:

Kornia, image by image    Kornia's pipeline on the card, called once per image, because its batches have one size (not
                          antialiased; measured on 8 images of the batch, because it is slow)
torchvision, workers      v2 in DataLoader workers, then a copy (antialiased)
DALI                      GPU operators; on the card they read the ragged batch without copying it, from the host they read
                          page-locked memory; to float16, because DALI has no bfloat16
gpuaug, workers           DataLoader workers collate into one buffer, a StreamedLoader copies it and runs gpuaug.fuse
gpuaug                    gpuaug.fuse; from the host, a StreamedLoader over page-locked batches

Rates are images per second. ``host_ms`` is the time of one call on the calling thread, with an idle GPU; only rows without
workers have it. ``gpu_ms`` is the time of the GPU for one call, without host time; only rows that work on the current stream
have it.
"""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import gpuaug
from bench.data import loaders, pipelines, random_images
from bench.harness import call_rows, flags, measurement
from bench.harness.loops import Serial, loop, settled_loop
from bench.harness.optional_rows import OptionalRow, peer_row
from bench.peers import dali
from gpuaug.benchkit.windows import Variant

KORNIA = "Kornia, image by image"
POOL_IMAGES = 256
_KORNIA_IMAGES = 8


def fused_pipeline(size: int, *, antialias: bool) -> Any:
    """Return the pipeline of gpuaug's rows: Kornia's classification pipeline, fused for ragged batches."""
    return gpuaug.fuse(
        pipelines.classification_kornia(size, cropping="slice"),
        dtype=torch.bfloat16,
        memory_format=torch.channels_last,
        ragged=True,
        antialias=antialias,
    )


def to_bfloat16(images: Tensor) -> Tensor:
    """Convert images of another library to the output format of gpuaug's rows: bfloat16, channels last."""
    return images.to(torch.bfloat16, memory_format=torch.channels_last)


@cache
def collate_channels_last(pool: random_images.RaggedImages, count: int) -> gpuaug.Ragged:
    """Return the first ``count`` images as a ragged batch that stores them as (H, W, C), for DALI's operators."""
    return gpuaug.collate_ragged([image.permute(1, 2, 0).numpy() for image in pool.images[:count]])


def dali_row(
    options: Namespace, pool: random_images.RaggedImages, batch_size: int, antialias: bool, source_device: torch.device
) -> Variant:
    """Return DALI's row, which reads images from one buffer on ``source_device``."""
    ragged = collate_channels_last(pool, batch_size).to(source_device)
    if source_device.type == "cpu" and options.device.type == "cuda":
        ragged = ragged.pin_memory()
    images = [image.permute(1, 2, 0) for image in ragged]
    call = dali.build_ragged(images, options.size, antialias=antialias, device=options.device)
    # Discards the batches that DALI prepared while other rows ran.
    return call_rows.call_row("DALI", call, batch_size, launches=None, discard=3)


def card_rows(
    options: Namespace, pool: random_images.RaggedImages, batch_size: int, antialias: bool, _stack: ExitStack
) -> list[OptionalRow]:
    device = options.device
    kornia_images = [image.to(device) for image in pool.images[: min(_KORNIA_IMAGES, batch_size)]]
    ragged = gpuaug.collate_ragged(pool.images[:batch_size]).to(device)
    augment = fused_pipeline(options.size, antialias=antialias)
    kornia_pipeline = pipelines.ScaleAndTransform(pipelines.classification_kornia(options.size, cropping="slice"))

    def augment_one_by_one() -> Tensor:
        return to_bfloat16(torch.cat([kornia_pipeline(image[None]) for image in kornia_images]))

    def kornia_row() -> Variant:
        return call_rows.call_row(KORNIA, augment_one_by_one, batch_size, images=_KORNIA_IMAGES)

    return [
        *([] if antialias else [peer_row(KORNIA, device, kornia_row, needs_gpu=False)]),
        peer_row("DALI", device, partial(dali_row, options, pool, batch_size, antialias, device)),
        call_rows.call_row("gpuaug", lambda: augment(ragged), batch_size, launches=call_rows.FEW_LAUNCHES),
    ]


def host_rows(
    options: Namespace, pool: random_images.RaggedImages, batch_size: int, antialias: bool, stack: ExitStack
) -> list[OptionalRow]:
    device = options.device

    def torchvision_row() -> Variant:
        transform = pipelines.classification_torchvision(options.size)
        loader = loaders.endless(pool.transformed(transform), batch_size, options)
        return Variant(
            "torchvision, workers", loop(Serial(loader, device, to_bfloat16), _no_step), loaders.queue_length(loader)
        )

    def streamed_loader(batches: Any) -> gpuaug.StreamedLoader:
        stage = fused_pipeline(options.size, antialias=antialias)
        loader = gpuaug.StreamedLoader(batches, [stage], device=device, depth=loaders.DEPTH)
        stack.callback(loader.close)
        return loader

    images, labels = pool.images[:batch_size], pool.labels[:batch_size]
    host_batches = [[gpuaug.collate_ragged(batch_images), labels] for batch_images in (images, images[::-1])]
    if options.device.type == "cuda":
        host_batches = [[member.pin_memory() for member in batch] for batch in host_batches]
    worker_loader = loaders.endless(pool, batch_size, options, collate=gpuaug.collate_ragged, pin=False)
    streamed_batches = iter(streamed_loader(loaders.repeat_batches(host_batches)))
    queue_length = loaders.queue_length(worker_loader)
    return [
        *([torchvision_row()] if antialias else []),
        peer_row("DALI", device, partial(dali_row, options, pool, batch_size, antialias, torch.device("cpu"))),
        Variant("gpuaug, workers", settled_loop(streamed_loader(worker_loader), _no_step, 2 * queue_length), queue_length),
        call_rows.call_row("gpuaug", lambda: next(streamed_batches), batch_size, launches=None, discard=loaders.DEPTH + 2),
    ]


def _no_step(*_: object) -> None:
    """Step of a loop that only augments."""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("ragged", __doc__, batch="64,256", size=224, seconds=0.3, repeats=3, spare=2)
    parser.add_argument("--sides", default="300,700", help="smallest and largest side in pixels (default: %(default)s)")
    options = flags.parse(parser, argv)
    min_side, max_side = (int(side) for side in options.sides.split(","))
    pool = random_images.RaggedImages((min_side, max_side), count=min(POOL_IMAGES, max(options.batch)))
    sources = {"on the card": card_rows, "from the host": host_rows}
    return measurement.measure(
        "ragged",
        options,
        [
            (
                {"case": f"{source}, antialiased" if antialias else source, "batch_size": size},
                partial(build, options, pool, size, antialias),
            )
            for size in options.batch
            for source, build in sources.items()
            for antialias in (False, True)
        ],
        baseline="DALI",
        ours=("gpuaug, workers", "gpuaug"),
        figures=partial(call_rows.batch_figures, device=options.device),
    )
