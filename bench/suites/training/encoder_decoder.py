"""Segmentation with a frozen encoder: does it pay to run the encoder beside the training of the decoder?

    python -m bench run encoder_decoder encoder_decoder_sizes encoder_decoder_resident encoder_decoder_alike

Random uint8 images and int64 labels per pixel come from DataLoader workers out of a small pool. The encoder runs
without gradients, the decoder is trained with SGD and cross-entropy, both under bfloat16 autocast. Rows:

serial                       copy, encode, train, on one stream
two streams, as published    the encoder one batch ahead on a side stream, racy (needs a GPU)
timm PrefetchLoader          copied and scaled ahead by timm, encoded in the loop (where it is installed; needs a GPU)
streamed                     StreamedLoader with a FeatureStage, captured in a CUDA graph
streamed, eager encoder      the same with capture="never"
resident                     the serial loop on batches that are on the card already; overlap may beat it
loader                       ceiling: iterating and copying alone

With --resident all batches are on the card and the loader costs nothing, which leaves the feature stage itself; the rows
"encoder alone" and "training alone" show how much there is to overlap.

With --alike the row "streamed" is repeated, on batches that are page-locked already: how much do rates differ between loaders
with lanes of their own ("own lanes"), and between loaders with the same lanes ("same lanes")?
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
from bench.peers.published_two_streams import PublishedTwoStreams
from bench.peers.timm import Prefetched
from gpuaug.benchkit.windows import Variant
from gpuaug.core.streams import Lane, Lanes

ALIKE = {"own lanes": 6, "same lanes": 4}
"""Number of loaders of each kind."""


def from_loader(options: Namespace, batch_size: int, stack: ExitStack) -> list[OptionalRow]:
    """Rows that are fed by DataLoader workers."""
    device = options.device
    encoder, encode, train = _pieces(options)
    dataset = _dataset(options)

    def looped(name: str, kind: Any, prepare: Any, step: Any = train) -> Variant:
        loader = loaders.endless(dataset, batch_size, options)
        return Variant(name, loop(kind(loader, device, prepare), step), loaders.queue_length(loader))

    def ours(name: str, capture: str = "auto") -> Variant:
        stage = gpuaug.FeatureStage(encoder, autocast=autocast_dtype(device), capture=capture)
        return streamed_row(name, loaders.endless(dataset, batch_size, options), stage, train, options, stack)

    def two_streams(name: str) -> Variant:
        # Its own decoder: the race may turn its features into NaN, which the other rows must not train on.
        return looped(name, PublishedTwoStreams, encode, Trainer(deepcopy(train.model), autocast=autocast_dtype(device)))

    peers: dict[str, Callable[[str], Variant]] = {
        "two streams, as published": two_streams,
        "timm PrefetchLoader": lambda name: looped(name, Prefetched, encode),
    }
    resident = loaders.repeat_batches(loaders.sample_batches(dataset, batch_size, 4, device))
    return [
        looped("serial", Serial, encode),
        *(peer_row(name, device, partial(make, name)) for name, make in peers.items()),
        ours("streamed"),
        ours("streamed, eager encoder", capture="never"),
        Variant("resident", loop(Serial(resident, device, encode), train)),
        looped("loader", Serial, lambda images: images, lambda *_: None),
    ]


def from_card(options: Namespace, batch_size: int, stack: ExitStack) -> list[Variant]:
    """Variants whose batches are on the card already."""
    device = options.device
    encoder, encode, train = _pieces(options)
    batches = loaders.sample_batches(_dataset(options), batch_size, 4, device)
    return resident_variants(encoder, encode, train, batches, options, stack)


def alike(options: Namespace, batch_size: int, stack: ExitStack) -> list[Variant]:
    """Equal variants, on lanes of their own and on shared lanes."""
    device = options.device
    encoder, _, train = _pieces(options)
    batches = loaders.repeat_batches(loaders.sample_batches(_dataset(options), batch_size, 4, device, pin=True))

    def ours(name: str) -> Variant:
        stage = gpuaug.FeatureStage(encoder, autocast=autocast_dtype(device))
        loader = gpuaug.StreamedLoader(batches, [stage], device=device, depth=loaders.DEPTH)
        stack.callback(loader.close)
        return Variant(name, loop(loader, train), loaders.DEPTH + 4)

    own = [ours(name) for name in _numbered("own lanes")]
    with _lanes_in_common():
        return [*own, *(ours(name) for name in _numbered("same lanes"))]


def _numbered(kind: str) -> list[str]:
    return [f"{kind}, {number + 1}" for number in range(ALIKE[kind])]


@contextmanager
def _lanes_in_common() -> Iterator[None]:
    """Give all loaders that are made in this context the same lanes.

    A loader waits only for readers of its own batches, so such loaders must not run at once: here only one has a window.
    """
    kept: dict[str, Lane] = {}
    make = Lanes.lane

    def lane(lanes: Lanes, name: str) -> Lane:
        if name not in kept:
            kept[name] = make(lanes, name)
        return kept[name]

    with mock.patch.object(Lanes, "lane", lane):
        yield


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("encoder_decoder", __doc__, batch="8,32,128", seconds=0.5, repeats=4, sweeps=True)
    parser.add_argument("--width", type=int, default=64, help="channels of the first level (default: %(default)s)")
    parser.add_argument("--labels", choices=("int64", "uint8"), default="int64", help="as the loader gives them")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--resident", action="store_true", help="the feature stage alone, batches on the card")
    instead.add_argument("--alike", action="store_true", help="loaders that are the same, beside each other")
    options = flags.parse(parser, argv)
    suite = "encoder_decoder"
    build = from_loader
    if options.resident:
        suite = "encoder_decoder_resident"
        build = from_card
    elif options.alike:
        suite = "encoder_decoder_alike"
        build = alike
    names = [name for kind in ALIKE for name in _numbered(kind)] if options.alike else []
    return measurement.measure(
        suite,
        options,
        [({"batch_size": size}, partial(build, options, size)) for size in options.batch],
        baseline=names[0] if names else "serial",
        ours=names or ("streamed", "streamed, eager encoder", *OURS),
        ceilings=("loader", *CEILINGS),
    )


def _pieces(options: Namespace) -> tuple[torch.nn.Module, Any, Trainer]:
    device = options.device
    encoder = frozen(models.Encoder(options.width), device)
    decoder = models.Decoder(random_images.CLASSES, options.width).to(device)
    return encoder, under_autocast(encoder, device), Trainer(decoder, autocast=autocast_dtype(device))


def _dataset(options: Namespace) -> random_images.RandomImages:
    return random_images.RandomImages(options.size, labels="pixel", dtype=getattr(torch, options.labels))
