"""An MLP trained on a frozen ResNet-50, where the encoder takes most of the step.

    python -m bench run frozen_resnet

Batches of 224 x 224 float images are on the card already. The ResNet has random weights, and runs without gradients under
bfloat16 autocast in channels_last. Rows:

serial                  encode and train, on one stream
encoder alone           encode, without a CUDA graph: a ceiling for rows that are not captured
training alone          ceiling: train on features that were encoded before
captured, in line       a captured FeatureStage, depth=0
feature stage, eager    a FeatureStage on its lane, with capture="never"
feature stage           a captured FeatureStage on its lane
"""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from bench.data import loaders, models
from bench.harness import flags, measurement
from bench.harness.frozen_encoder_rows import CEILINGS, OURS, resident_variants
from bench.harness.loops import Trainer, autocast_dtype, frozen, under_autocast
from gpuaug.benchkit.windows import Variant


def variants(options: Namespace, batch_size: int, stack: ExitStack) -> list[Variant]:
    device = options.device
    backbone, features = models.trunk(options.model)
    encoder = frozen(backbone, device, torch.channels_last)
    train = Trainer(models.Mlp(features, 1000).to(device), autocast=autocast_dtype(device))
    return resident_variants(
        encoder,
        under_autocast(encoder, device),
        train,
        loaders.float_batches(options, batch_size),
        options,
        stack,
        memory_format=torch.channels_last,
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("frozen_resnet", __doc__, batch="32,128", size=224)
    parser.add_argument("--model", default="resnet50", help="a ResNet or ViT of torchvision's (default: %(default)s)")
    options = flags.parse(parser, argv)
    return measurement.measure(
        "frozen_resnet",
        options,
        [({"batch_size": size}, partial(variants, options, size)) for size in options.batch],
        baseline="serial",
        ours=OURS,
        ceilings=CEILINGS,
    )
