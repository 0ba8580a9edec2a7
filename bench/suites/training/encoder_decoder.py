"""Segmentation with a frozen encoder, which runs before or beside the training of the decoder.

    python -m bench run encoder_decoder encoder_decoder_sizes encoder_decoder_resident encoder_decoder_alike

DataLoader workers read random uint8 images and int64 labels per pixel from a small pool. The encoder runs without gradients,
the decoder is trained with SGD and cross-entropy, both under bfloat16 autocast. Rows:

serial                       copy, encode, train, on one stream
two streams, as published    the encoder one batch ahead on a side stream, with a race (needs a GPU)
two streams, both waits      the same by hand without the race: both streams wait for each other (needs a GPU)
timm PrefetchLoader          timm copies and scales ahead, the loop encodes (if it is installed; needs a GPU)
streamed                     StreamedLoader with a FeatureStage, captured in a CUDA graph
streamed, eager encoder      the same with capture="never"
resident                     the serial loop on batches that are on the card already; with overlap, other rows may be faster
loader                       ceiling: iterating and copying alone

With --resident all batches are on the card and the loader takes no time, so that only the feature stage is measured. The rows
"encoder alone" and "training alone" show how much time can overlap.

With --alike the row "streamed" is repeated, on page-locked batches, to show how much rates differ between loaders with
different lanes ("own lanes"), and between loaders with the same lanes ("same lanes").
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any
from unittest import mock

import torch

import gpuaug
from bench.data import loaders, models, random_images
from bench.harness import flags, measurement
from bench.harness.frozen_encoder_rows import CEILINGS, OURS, resident_variants
from bench.harness.loops import Serial, Trainer, autocast_dtype, frozen, loop, streamed_row, under_autocast
from bench.harness.optional_rows import OptionalRow, peer_row
from bench.peers.published_two_streams import PublishedTwoStreams, TwoStreams
from bench.peers.timm import TimmPrefetchLoop
from gpuaug.benchkit.windows import Variant
from gpuaug.core.streams import Lane, Lanes

EQUAL_LOADERS = {"own lanes": 6, "same lanes": 4}
"""Prefix of the names of rows: number of rows."""


def worker_rows(options: Namespace, batch_size: int, stack: ExitStack) -> list[OptionalRow]:
    """Return the rows whose batches come from DataLoader workers."""
    device = options.device
    encoder, encode, train = _networks(options)
    dataset = _dataset(options)

    def loop_row(name: str, loop_type: Any, prepare: Any, step: Any = train) -> Variant:
        loader = loaders.endless(dataset, batch_size, options)
        return Variant(name, loop(loop_type(loader, device, prepare), step), loaders.queue_length(loader))

    def gpuaug_row(name: str, capture: str = "auto") -> Variant:
        stage = gpuaug.FeatureStage(encoder, autocast=autocast_dtype(device), capture=capture)
        return streamed_row(name, loaders.endless(dataset, batch_size, options), stage, train, options, stack)

    def two_streams_row(name: str) -> Variant:
        # A separate decoder: the race may turn features into NaN, which must not reach the decoder of the other rows.
        return loop_row(name, PublishedTwoStreams, encode, Trainer(deepcopy(train.model), autocast=autocast_dtype(device)))

    peers: dict[str, Callable[[str], Variant]] = {
        "two streams, as published": two_streams_row,
        "two streams, both waits": lambda name: loop_row(name, TwoStreams, encode),
        "timm PrefetchLoader": lambda name: loop_row(name, TimmPrefetchLoop, encode),
    }
    resident = loaders.repeat_batches(loaders.sample_batches(dataset, batch_size, 4, device))
    return [
        loop_row("serial", Serial, encode),
        *(peer_row(name, device, partial(make, name)) for name, make in peers.items()),
        gpuaug_row("streamed"),
        gpuaug_row("streamed, eager encoder", capture="never"),
        Variant("resident", loop(Serial(resident, device, encode), train)),
        loop_row("loader", Serial, lambda images: images, lambda *_: None),
    ]


def resident_rows(options: Namespace, batch_size: int, stack: ExitStack) -> list[Variant]:
    """Return the rows whose batches are on the card already."""
    device = options.device
    encoder, encode, train = _networks(options)
    batches = loaders.sample_batches(_dataset(options), batch_size, 4, device)
    return resident_variants(encoder, encode, train, batches, options, stack)


def equal_loaders(options: Namespace, batch_size: int, stack: ExitStack) -> list[Variant]:
    """Return rows that differ only in their lanes, which are separate or shared."""
    device = options.device
    encoder, _, train = _networks(options)
    batches = loaders.repeat_batches(loaders.sample_batches(_dataset(options), batch_size, 4, device, pin=True))

    def gpuaug_row(name: str) -> Variant:
        stage = gpuaug.FeatureStage(encoder, autocast=autocast_dtype(device))
        loader = gpuaug.StreamedLoader(batches, [stage], device=device, depth=loaders.DEPTH)
        stack.callback(loader.close)
        return Variant(name, loop(loader, train), loaders.DEPTH + 4)

    separate_rows = [gpuaug_row(name) for name in _row_names("own lanes")]
    with _shared_lanes():
        return [*separate_rows, *(gpuaug_row(name) for name in _row_names("same lanes"))]


def _row_names(prefix: str) -> list[str]:
    return [f"{prefix}, {number + 1}" for number in range(EQUAL_LOADERS[prefix])]


@contextmanager
def _shared_lanes() -> Iterator[None]:
    """Give all loaders that are created in this context the same lanes.

    A loader waits only for readers of its batches, so such loaders must not run at the same time. Here windows take turns.
    """
    lanes_by_name: dict[str, Lane] = {}
    create_lane = Lanes.lane

    def lane(lanes: Lanes, name: str) -> Lane:
        if name not in lanes_by_name:
            lanes_by_name[name] = create_lane(lanes, name)
        return lanes_by_name[name]

    with mock.patch.object(Lanes, "lane", lane):
        yield


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("encoder_decoder", __doc__, batch="8,32,128", seconds=0.5, repeats=4, sweeps=True)
    parser.add_argument("--width", type=int, default=64, help="channels of the first level (default: %(default)s)")
    parser.add_argument(
        "--labels", choices=("int64", "uint8"), default="int64", help="dtype of the labels (default: %(default)s)"
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--resident", action="store_true", help="batches on the card, without a DataLoader")
    modes.add_argument("--alike", action="store_true", help="several equal loaders")
    options = flags.parse(parser, argv)
    suite = "encoder_decoder"
    build = worker_rows
    if options.resident:
        suite = "encoder_decoder_resident"
        build = resident_rows
    elif options.alike:
        suite = "encoder_decoder_alike"
        build = equal_loaders
    names = [name for prefix in EQUAL_LOADERS for name in _row_names(prefix)] if options.alike else []
    return measurement.measure(
        suite,
        options,
        [({"batch_size": size}, partial(build, options, size)) for size in options.batch],
        baseline=names[0] if names else "serial",
        ours=names or ("streamed", "streamed, eager encoder", *OURS),
        ceilings=("loader", *CEILINGS),
    )


def _networks(options: Namespace) -> tuple[torch.nn.Module, Any, Trainer]:
    device = options.device
    encoder = frozen(models.Encoder(options.width), device)
    decoder = models.Decoder(random_images.CLASSES, options.width).to(device)
    return encoder, under_autocast(encoder, device), Trainer(decoder, autocast=autocast_dtype(device))


def _dataset(options: Namespace) -> random_images.RandomImages:
    return random_images.RandomImages(options.size, labels="pixel", dtype=getattr(torch, options.labels))
