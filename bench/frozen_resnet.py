"""An MLP trained on a frozen ResNet-50: what the feature stage gains where the encoder is most of the step.

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

from bench import common, data, models
from bench.features import CEILINGS, OURS, resident_variants
from bench.loops import Trainer, frozen, half, under_autocast
from gpuaug.benchkit.windows import Variant


def variants(options: Namespace, batch_size: int, stack: ExitStack) -> list[Variant]:
    device = options.device
    trunk, features = models.trunk(options.model)
    encoder = frozen(trunk, device, torch.channels_last)
    train = Trainer(models.Mlp(features, 1000).to(device), autocast=half(device))
    return resident_variants(
        encoder,
        under_autocast(encoder, device),
        train,
        float_batches(options, batch_size),
        options,
        stack,
        memory_format=torch.channels_last,
    )


def float_batches(options: Namespace, batch_size: int) -> list[Any]:
    """Four normalised batches on the card, laid out as the encoder wants them."""
    batches = data.sample(data.RandomImages(options.size), batch_size, 4, options.device)
    return [((images.float() / 255 - 0.5).contiguous(memory_format=torch.channels_last), labels) for images, labels in batches]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__, batch="32,128", size=224)
    parser.add_argument("--model", default="resnet50", help="a ResNet of torchvision's (default: %(default)s)")
    options = common.read(parser, argv)
    return common.measure(
        "frozen_resnet",
        options,
        [({"batch_size": size}, partial(variants, options, size)) for size in options.batch],
        baseline="serial",
        ours=OURS,
        ceilings=CEILINGS,
    )


if __name__ == "__main__":
    main()
