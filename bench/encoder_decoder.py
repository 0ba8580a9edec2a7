"""Segmentation with a frozen encoder: does it pay to run the encoder beside the training of the decoder?

    python -m bench.encoder_decoder --json bench/results/encoder_decoder.json
    python -m bench.encoder_decoder --resident --json bench/results/encoder_decoder_resident.json

Random uint8 images and int64 labels per pixel come from DataLoader workers out of a small pool. The encoder runs
without gradients, the decoder is trained with SGD and cross-entropy, both under bfloat16 autocast. Rows:

serial                       copy, encode, train, on one stream
two streams, as published    the encoder one batch ahead on a side stream, racy (needs a GPU)
streamed                     StreamedLoader with a FeatureStage, captured in a CUDA graph
streamed, eager encoder      the same with capture="never"
resident                     the serial loop on batches that are on the card already; overlap may beat it
loader                       ceiling: iterating and copying alone

With --resident all batches are on the card and the loader costs nothing, so what is left is the feature stage itself;
the rows "encoder alone" and "training alone" show what there is to overlap.
"""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from typing import Any

import torch

import gpuaug
from bench import common, data, models
from bench.features import CEILINGS, OURS, resident_variants
from bench.loops import PublishedTwoStreams, Serial, Trainer, frozen, half, loop, under_autocast
from gpuaug.bench.windows import Variant


def from_loader(options: Namespace, batch_size: int, stack: ExitStack) -> list[Variant]:
    """Variants that are fed by DataLoader workers."""
    device = options.device
    encoder, encode, train = _pieces(options)
    dataset = _dataset(options)

    def fed() -> tuple[Any, int]:
        loader = data.endless(dataset, batch_size, options)
        return loader, data.queued(loader)

    variants = []
    loader, discard = fed()
    variants.append(Variant("serial", loop(Serial(loader, device, encode), train), discard))
    if device.type == "cuda":
        loader, discard = fed()
        # Its own decoder: the race may turn its features into NaN, which the other rows must not train on.
        apart = Trainer(deepcopy(train.model), autocast=half(device))
        variants.append(Variant("two streams, as published", loop(PublishedTwoStreams(loader, device, encode), apart), discard))
    for name, capture in {"streamed": "auto", "streamed, eager encoder": "never"}.items():
        loader, discard = fed()
        stage = gpuaug.FeatureStage(encoder, autocast=half(device), capture=capture)
        streamed = gpuaug.StreamedLoader(loader, [stage], device=device, depth=common.DEPTH)
        stack.callback(streamed.close)
        variants.append(Variant(name, loop(streamed, train), discard))
    resident = data.cycle(data.sample(dataset, batch_size, 4, device))
    variants.append(Variant("resident", loop(Serial(resident, device, encode), train)))
    loader, discard = fed()
    variants.append(Variant("loader", loop(Serial(loader, device, lambda images: images), lambda *_: None), discard))
    return variants


def from_card(options: Namespace, batch_size: int, stack: ExitStack) -> list[Variant]:
    """Variants whose batches are on the card already."""
    device = options.device
    encoder, encode, train = _pieces(options)
    batches = data.sample(_dataset(options), batch_size, 4, device)
    return resident_variants(encoder, encode, train, batches, options, stack)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__, batch="8,32,128", seconds=0.5, repeats=4)
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
        ours=("streamed", "streamed, eager encoder", *OURS),
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
