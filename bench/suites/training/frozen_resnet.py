"""An MLP trained on a frozen ResNet-50: the gain of the feature stage where the encoder is most of the step.

    python -m bench run frozen_resnet

Batches of 224 x 224 float images are on the card already; the trunk has random weights and runs without gradients
under bfloat16 autocast in channels_last. Rows: the serial loop, the encoder and the training alone (ceilings), the
feature stage in line (captured, no lane), on its lane without a capture, and as it comes: captured and on its lane.
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
    trunk, features = models.trunk(options.model)
    encoder = frozen(trunk, device, torch.channels_last)
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
    parser.add_argument("--model", default="resnet50", help="a ResNet of torchvision's (default: %(default)s)")
    options = flags.parse(parser, argv)
    return measurement.measure(
        "frozen_resnet",
        options,
        [({"batch_size": size}, partial(variants, options, size)) for size in options.batch],
        baseline="serial",
        ours=OURS,
        ceilings=CEILINGS,
    )
