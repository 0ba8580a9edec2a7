"""A chain of lanes: copy, then two dependent stages, then training, streamed against the same work on one stream.

    python -m bench run chain

Page-locked uint8 batches on the host, cycled, so the loader costs nothing; a light augmentation in ten launches; a
frozen conv encoder; a trained tail on its feature maps that costs about as much. Rows:

serial                     copy, augment, encode, train, on one stream
one lane, eager            both stages as one TransformStage: is a lane for each worth having?
two lanes, eager           a TransformStage and a FeatureStage with capture="never"
two lanes                  the same with the encoder captured in a CUDA graph
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

_MOST_AHEAD = 4


def variants(options: Namespace, batch_size: int, stack: ExitStack) -> list[Variant]:
    device = options.device
    batches = loaders.repeat_batches(
        loaders.sample_batches(random_images.RandomImages(options.size), batch_size, 8, device, pin=True)
    )
    augment = models.LightAugmentation().to(device)
    encoder = frozen(models.Encoder(options.width), device)
    encode = under_autocast(encoder, device)
    train = Trainer(models.Tail(random_images.CLASSES, options.width).to(device), autocast=autocast_dtype(device))

    def both(images: torch.Tensor) -> torch.Tensor:
        return encode(augment(images))

    def feature(capture: str) -> gpuaug.FeatureStage:
        return gpuaug.FeatureStage(encoder, autocast=autocast_dtype(device), capture=capture)

    chains = {
        "one lane, eager": ([gpuaug.TransformStage(both, name="both")], loaders.DEPTH),
        "two lanes, eager": ([augment, feature("never")], loaders.DEPTH),
        "two lanes": ([augment, feature("auto")], loaders.DEPTH),
        "two lanes, one ahead": ([augment, feature("auto")], 1),
        "two lanes, four ahead": ([augment, feature("auto")], _MOST_AHEAD),
    }
    made = [Variant("serial", loop(Serial(batches, device, both), train))]
    for name, (stages, depth) in chains.items():
        streamed = gpuaug.StreamedLoader(batches, stages, device=device, depth=depth)
        stack.callback(streamed.close)
        made.append(Variant(name, loop(streamed, train), discard=_MOST_AHEAD + 2))
    return made


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
