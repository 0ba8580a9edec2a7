"""A chain of lanes (copy, two dependent stages) before training, compared with the same work on one stream.

    python -m bench run chain

Page-locked uint8 batches are repeated from a list, so that the loader takes no time. A light augmentation in ten launches is
followed by a frozen convolutional encoder, and a network on its feature maps, which takes about as long, is trained. Rows:

serial                     copy, augment, encode, train, on one stream
one lane, eager            both stages in one TransformStage
two lanes, eager           a TransformStage and a FeatureStage with capture="never"
two lanes                  the same with the encoder in a CUDA graph
two lanes, one ahead       the same with depth=1
two lanes, four ahead      the same with depth=4
"""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

import gpuaug
from bench.data import loaders, models, random_images
from bench.harness import flags, measurement
from bench.harness.loops import Serial, Trainer, autocast_dtype, frozen, loop, under_autocast
from gpuaug.benchkit.windows import Variant

_MAX_DEPTH = 4


def variants(options: Namespace, batch_size: int, stack: ExitStack) -> list[Variant]:
    device = options.device
    batches = loaders.repeat_batches(
        loaders.sample_batches(random_images.RandomImages(options.size), batch_size, 8, device, pin=True)
    )
    augment = models.LightAugmentation().to(device)
    encoder = frozen(models.Encoder(options.width), device)
    encode = under_autocast(encoder, device)
    train = Trainer(models.Tail(random_images.CLASSES, options.width).to(device), autocast=autocast_dtype(device))

    def augment_and_encode(images: torch.Tensor) -> torch.Tensor:
        return encode(augment(images))

    def feature_stage(capture: str) -> gpuaug.FeatureStage:
        return gpuaug.FeatureStage(encoder, autocast=autocast_dtype(device), capture=capture)

    lane_settings = {
        "one lane, eager": ([gpuaug.TransformStage(augment_and_encode, name="both")], loaders.DEPTH),
        "two lanes, eager": ([augment, feature_stage("never")], loaders.DEPTH),
        "two lanes": ([augment, feature_stage("auto")], loaders.DEPTH),
        "two lanes, one ahead": ([augment, feature_stage("auto")], 1),
        "two lanes, four ahead": ([augment, feature_stage("auto")], _MAX_DEPTH),
    }
    rows = [Variant("serial", loop(Serial(batches, device, augment_and_encode), train))]
    for name, (stages, depth) in lane_settings.items():
        streamed = gpuaug.StreamedLoader(batches, stages, device=device, depth=depth)
        stack.callback(streamed.close)
        rows.append(Variant(name, loop(streamed, train), discard=_MAX_DEPTH + 2))
    return rows


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("chain", __doc__, batch="8,32,128")
    parser.add_argument("--width", type=int, default=64, help="channels of the first level (default: %(default)s)")
    options = flags.parse(parser, argv)
    return measurement.measure(
        "chain",
        options,
        [({"batch_size": size}, partial(variants, options, size)) for size in options.batch],
        baseline="serial",
        ours=("one lane, eager", "two lanes, eager", "two lanes", "two lanes, one ahead", "two lanes, four ahead"),
    )
