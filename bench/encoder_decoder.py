"""Segmentation with a frozen encoder: does it pay to run the encoder beside the training of the decoder?

    python -m bench run encoder_decoder encoder_decoder_sizes encoder_decoder_resident

Random uint8 images and int64 labels per pixel come from DataLoader workers out of a small pool. The encoder runs
without gradients, the decoder is trained with SGD and cross-entropy, both under bfloat16 autocast. Rows:

serial                       copy, encode, train, on one stream
two streams, as published    the encoder one batch ahead on a side stream, racy (needs a GPU)
timm PrefetchLoader          copied and scaled ahead by timm, encoded in the loop (where it is installed; needs a GPU)
streamed                     StreamedLoader with a FeatureStage, captured in a CUDA graph
streamed, auto               the same with depth="auto", once it has decided
streamed, eager encoder      the same with capture="never"
resident                     the serial loop on batches that are on the card already; overlap may beat it
loader                       ceiling: iterating and copying alone

With --resident all batches are on the card and the loader costs nothing, so what is left is the feature stage itself;
the rows "encoder alone" and "training alone" show what there is to overlap.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from typing import Any

import torch

import gpuaug
from bench import common, data, models
from bench.features import CEILINGS, OURS, resident_variants
from bench.loops import Prefetched, PublishedTwoStreams, Serial, Trainer, frozen, half, loop, streamed, under_autocast
from bench.rows import Made, peer
from gpuaug.bench.windows import Variant


def from_loader(options: Namespace, batch_size: int, stack: ExitStack) -> list[Made]:
    """Rows that are fed by DataLoader workers."""
    device = options.device
    encoder, encode, train = _pieces(options)
    dataset = _dataset(options)

    def looped(name: str, kind: Any, prepare: Any, step: Any = train) -> Variant:
        loader = data.endless(dataset, batch_size, options)
        return Variant(name, loop(kind(loader, device, prepare), step), data.queued(loader))

    def ours(name: str, capture: str = "auto", depth: Any = common.DEPTH) -> Variant:
        stage = gpuaug.FeatureStage(encoder, autocast=half(device), capture=capture)
        return streamed(name, data.endless(dataset, batch_size, options), stage, train, options, stack, depth)

    def two_streams(name: str) -> Variant:
        # Its own decoder: the race may turn its features into NaN, which the other rows must not train on.
        return looped(name, PublishedTwoStreams, encode, Trainer(deepcopy(train.model), autocast=half(device)))

    peers: dict[str, Callable[[str], Variant]] = {
        "two streams, as published": two_streams,
        "timm PrefetchLoader": lambda name: looped(name, Prefetched, encode),
    }
    resident = data.cycle(data.sample(dataset, batch_size, 4, device))
    return [
        looped("serial", Serial, encode),
        *(peer(name, device, partial(make, name)) for name, make in peers.items()),
        ours("streamed"),
        ours("streamed, auto", depth="auto"),
        ours("streamed, eager encoder", capture="never"),
        Variant("resident", loop(Serial(resident, device, encode), train)),
        looped("loader", Serial, lambda images: images, lambda *_: None),
    ]


def from_card(options: Namespace, batch_size: int, stack: ExitStack) -> list[Variant]:
    """Variants whose batches are on the card already."""
    device = options.device
    encoder, encode, train = _pieces(options)
    batches = data.sample(_dataset(options), batch_size, 4, device)
    return resident_variants(encoder, encode, train, batches, options, stack)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__, batch="8,32,128", seconds=0.5, repeats=4, sweeps=True)
    parser.add_argument("--width", type=int, default=64, help="channels of the first level (default: %(default)s)")
    parser.add_argument("--labels", choices=("int64", "uint8"), default="int64", help="as the loader gives them")
    parser.add_argument("--resident", action="store_true", help="the feature stage alone, batches on the card")
    options = common.read(parser, argv)
    build = from_card if options.resident else from_loader
    return common.measure(
        "encoder_decoder_resident" if options.resident else "encoder_decoder",
        options,
        [({"batch_size": size}, partial(build, options, size)) for size in options.batch],
        baseline="serial",
        ours=("streamed", "streamed, auto", "streamed, eager encoder", *OURS),
        ceilings=("loader", *CEILINGS),
    )


def _pieces(options: Namespace) -> tuple[torch.nn.Module, Any, Trainer]:
    device = options.device
    encoder = frozen(models.Encoder(options.width), device)
    decoder = models.Decoder(data.CLASSES, options.width).to(device)
    return encoder, under_autocast(encoder, device), Trainer(decoder, autocast=half(device))


def _dataset(options: Namespace) -> data.RandomImages:
    return data.RandomImages(options.size, labels="pixel", dtype=getattr(torch, options.labels))


if __name__ == "__main__":
    main()
