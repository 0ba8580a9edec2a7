"""A ResNet-50 training step with Kornia's augmentation before it: in the loop, and streamed.

    python -m bench.resnet_step --json bench/results/resnet_step.json

RandomResizedCrop 224, RandomHorizontalFlip, ColorJitter, Normalize on uint8 images of 256 x 256 from DataLoader
workers; ResNet-50 under bfloat16 autocast in channels_last, SGD. Kornia issues hundreds of launches a batch, so
streams alone may not help: that row is here to show when they do not. Rows: "serial" (Kornia in the loop), "streamed"
(the same pipeline as a stage), "streamed, fused" (the same through gpuaug.fuse), and the ceilings "resident" (training
alone, augmented batches on the card already) and "loader" (iterating and copying alone).
"""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torchvision import models

import gpuaug
from bench import common, data, pipelines
from bench.loops import Serial, Trainer, half, loop
from gpuaug.bench.windows import Variant


def variants(options: Namespace, batch_size: int, stack: ExitStack) -> list[Variant]:
    device = options.device
    dataset = data.RandomImages(options.size)
    size = options.size * 7 // 8
    augment = pipelines.Scaled(pipelines.classification_kornia(size)).to(device)
    fused = gpuaug.fuse(
        pipelines.classification_kornia(size, cropping="slice"),
        dtype=half(device) or torch.float32,
        memory_format=torch.channels_last,
    )
    model = models.get_model(options.model, weights=None)
    train = Trainer(model.to(device, memory_format=torch.channels_last), autocast=half(device))

    def train_channels_last(images: torch.Tensor, labels: torch.Tensor) -> None:
        train(images.contiguous(memory_format=torch.channels_last), labels)

    loaders = [data.endless(dataset, batch_size, options) for _ in range(4)]
    discard = data.queued(loaders[0])
    streamed, streamed_fused = (
        gpuaug.StreamedLoader(loader, [stage], device=device, depth=common.DEPTH)
        for loader, stage in ((loaders[1], augment), (loaders[3], fused))
    )
    stack.callback(streamed.close)
    stack.callback(streamed_fused.close)
    resident = [(augment(images), labels) for images, labels in data.sample(dataset, batch_size, 2, device)]
    copying = Serial(loaders[2], device, lambda images: images)
    return [
        Variant("serial", loop(Serial(loaders[0], device, augment), train_channels_last), discard),
        Variant("streamed", loop(streamed, train_channels_last), discard),
        Variant("streamed, fused", loop(streamed_fused, train_channels_last), discard),
        Variant("resident", loop(data.cycle(resident), train_channels_last)),
        Variant("loader", loop(copying, lambda *_: None), discard),
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__, batch="64,256", seconds=1.0)
    parser.add_argument("--model", default="resnet50", help="a model of torchvision's (default: %(default)s)")
    options = common.read(parser, argv)
    return common.measure(
        "resnet_step",
        options,
        [({"batch_size": size}, partial(variants, options, size)) for size in options.batch],
        baseline="serial",
        ours=("streamed", "streamed, fused"),
        ceilings=("resident", "loader"),
    )


if __name__ == "__main__":
    main()
