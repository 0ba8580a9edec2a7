"""Images of different sizes, cropped to one size: gpuaug beside its competitors.

    python -m bench run ragged

Random uint8 images of 300 to 700 pixels a side become 224 x 224: RandomResizedCrop, HorizontalFlip, ColorJitter without hue,
Normalize, to bfloat16 and channels last. Crops that shrink are antialiased or not, in cases of their own. "On the card"
means that images are there already and the loop only augments; "from the host", that they are copied first. Rows:

Kornia, image by image    its pipeline on the card, called once per image, since a batch has one size (not antialiased; some of
                          the images of a batch, since it is slow)
torchvision, workers      v2 in DataLoader workers, then copied (antialiased)
DALI                      GPU operators on the same images, without a copy on the card, or from page-locked memory (to float16)
gpuaug, workers           DataLoader workers collate into one buffer, a StreamedLoader copies it and runs gpuaug.fuse
gpuaug                    gpuaug.fuse; from the host, a StreamedLoader over page-locked batches

Rates are in images. ``host_ms`` is the calling thread's time for a batch with an idle card, in rows without workers, and
``gpu_ms`` the card's time alone, in rows that work on the current stream.
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
POOL = 256
_KORNIA_IMAGES = 8


def fused(size: int, *, antialias: bool) -> Any:
    """The pipeline as gpuaug runs it."""
    return gpuaug.fuse(
        pipelines.classification_kornia(size, cropping="slice"),
        dtype=torch.bfloat16,
        memory_format=torch.channels_last,
        ragged=True,
        antialias=antialias,
    )


def to_bfloat16(images: Tensor) -> Tensor:
    """A competitor's images in gpuaug's output format: bfloat16, channels last."""
    return images.to(torch.bfloat16, memory_format=torch.channels_last)


@cache
def rows_of_pixels(pool: random_images.RaggedImages, count: int) -> gpuaug.Ragged:
    """The first ``count`` images as (H, W, C), for DALI's operators."""
    return gpuaug.collate_ragged([image.permute(1, 2, 0).numpy() for image in pool.images[:count]])


def by_dali(
    options: Namespace, pool: random_images.RaggedImages, batch_size: int, antialias: bool, place: torch.device
) -> Variant:
    """DALI's row, on images in one buffer on the device ``place``."""
    ragged = rows_of_pixels(pool, batch_size).to(place)
    if place.type == "cpu" and options.device.type == "cuda":
        ragged = ragged.pin_memory()
    images = [image.permute(1, 2, 0) for image in ragged]
    call = dali.build_ragged(images, options.size, antialias=antialias, device=options.device)
    # Batches that it prepared while other rows ran.
    return call_rows.call_row("DALI", call, batch_size, launches=None, discard=3)


def on_the_card(
    options: Namespace, pool: random_images.RaggedImages, batch_size: int, antialias: bool, _stack: ExitStack
) -> list[OptionalRow]:
    device = options.device
    some = [image.to(device) for image in pool.images[: min(_KORNIA_IMAGES, batch_size)]]
    ragged = gpuaug.collate_ragged(pool.images[:batch_size]).to(device)
    augment = fused(options.size, antialias=antialias)
    kornia = pipelines.Scaled(pipelines.classification_kornia(options.size, cropping="slice"))

    def one_by_one() -> Tensor:
        return to_bfloat16(torch.cat([kornia(image[None]) for image in some]))

    def by_kornia() -> Variant:
        return call_rows.call_row(KORNIA, one_by_one, batch_size, images=_KORNIA_IMAGES)

    return [
        *([] if antialias else [peer_row(KORNIA, device, by_kornia, needs_gpu=False)]),
        peer_row("DALI", device, partial(by_dali, options, pool, batch_size, antialias, device)),
        call_rows.call_row("gpuaug", lambda: augment(ragged), batch_size, launches=call_rows.FEW_LAUNCHES),
    ]


def from_the_host(
    options: Namespace, pool: random_images.RaggedImages, batch_size: int, antialias: bool, stack: ExitStack
) -> list[OptionalRow]:
    device = options.device

    def by_torchvision() -> Variant:
        transform = pipelines.classification_torchvision(options.size)
        loader = loaders.endless(pool.transformed(transform), batch_size, options)
        return Variant(
            "torchvision, workers", loop(Serial(loader, device, to_bfloat16), _nothing), loaders.queue_length(loader)
        )

    def ours(batches: Any) -> gpuaug.StreamedLoader:
        stage = fused(options.size, antialias=antialias)
        loader = gpuaug.StreamedLoader(batches, [stage], device=device, depth=loaders.DEPTH)
        stack.callback(loader.close)
        return loader

    images, labels = pool.images[:batch_size], pool.labels[:batch_size]
    ready = [[gpuaug.collate_ragged(some), labels] for some in (images, images[::-1])]
    if options.device.type == "cuda":
        ready = [[part.pin_memory() for part in batch] for batch in ready]
    collated = loaders.endless(pool, batch_size, options, collate=gpuaug.collate_ragged, pin=False)
    streamed = iter(ours(loaders.repeat_batches(ready)))
    queue_length = loaders.queue_length(collated)
    return [
        *([by_torchvision()] if antialias else []),
        peer_row("DALI", device, partial(by_dali, options, pool, batch_size, antialias, torch.device("cpu"))),
        Variant("gpuaug, workers", settled_loop(ours(collated), _nothing, 2 * queue_length), queue_length),
        call_rows.call_row("gpuaug", lambda: next(streamed), batch_size, launches=None, discard=loaders.DEPTH + 2),
    ]


def _nothing(*_: object) -> None:
    """The step of a loop that only augments."""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("ragged", __doc__, batch="64,256", size=224, seconds=0.3, repeats=3, spare=2)
    parser.add_argument("--sides", default="300,700", help="least and most pixels of a side (default: %(default)s)")
    options = flags.parse(parser, argv)
    least, most = (int(side) for side in options.sides.split(","))
    pool = random_images.RaggedImages((least, most), count=min(POOL, max(options.batch)))
    places = {"on the card": on_the_card, "from the host": from_the_host}
    return measurement.measure(
        "ragged",
        options,
        [
            (
                {"case": f"{place}, antialiased" if antialias else place, "batch_size": size},
                partial(build, options, pool, size, antialias),
            )
            for size in options.batch
            for place, build in places.items()
            for antialias in (False, True)
        ],
        baseline="DALI",
        ours=("gpuaug, workers", "gpuaug"),
        figures=partial(call_rows.batch_figures, device=options.device),
    )
