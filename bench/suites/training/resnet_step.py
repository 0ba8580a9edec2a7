"""A ResNet-50 training step after an augmentation by Kornia, in the loop or streamed.

    python -m bench run resnet_step

RandomResizedCrop 224, RandomHorizontalFlip, ColorJitter, Normalize on uint8 images of 256 x 256 from DataLoader workers;
ResNet-50 under bfloat16 autocast in channels_last, SGD. Kornia launches hundreds of kernels per batch, so streams alone may not
help. Rows:

serial             Kornia in the loop
streamed           the same pipeline as a stage
streamed, fused    the same through gpuaug.fuse
resident           ceiling: training alone on augmented batches that are on the card already
loader             ceiling: iterating and copying alone
"""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torchvision import models

import gpuaug
from bench.data import loaders, pipelines, random_images
from bench.harness import flags, measurement
from bench.harness.loops import Serial, Trainer, autocast_dtype, loop, streamed_row
from gpuaug.benchkit.windows import Variant


def variants(options: Namespace, batch_size: int, stack: ExitStack) -> list[Variant]:
    device = options.device
    dataset = random_images.RandomImages(options.size)
    size = options.size * 7 // 8
    augment = pipelines.ScaleAndTransform(pipelines.classification_kornia(size)).to(device)
    fused = gpuaug.fuse(
        pipelines.classification_kornia(size, cropping="slice"),
        dtype=autocast_dtype(device) or torch.float32,
        memory_format=torch.channels_last,
    )
    model = models.get_model(options.model, weights=None)
    train = Trainer(model.to(device, memory_format=torch.channels_last), autocast=autocast_dtype(device))

    def train_channels_last(images: torch.Tensor, labels: torch.Tensor) -> None:
        train(images.contiguous(memory_format=torch.channels_last), labels)

    def loop_row(name: str, prepare: Any, step: Any) -> Variant:
        loader = loaders.endless(dataset, batch_size, options)
        return Variant(name, loop(Serial(loader, device, prepare), step), loaders.queue_length(loader))

    def gpuaug_row(name: str, stage: Any) -> Variant:
        loader = loaders.endless(dataset, batch_size, options)
        return streamed_row(name, loader, stage, train_channels_last, options, stack)

    resident = [(augment(images), labels) for images, labels in loaders.sample_batches(dataset, batch_size, 2, device)]
    return [
        loop_row("serial", augment, train_channels_last),
        gpuaug_row("streamed", augment),
        gpuaug_row("streamed, fused", fused),
        Variant("resident", loop(loaders.repeat_batches(resident), train_channels_last)),
        loop_row("loader", lambda images: images, lambda *_: None),
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("resnet_step", __doc__, batch="64,256", seconds=1.0)
    parser.add_argument("--model", default="resnet50", help="a model of torchvision's (default: %(default)s)")
    options = flags.parse(parser, argv)
    return measurement.measure(
        "resnet_step",
        options,
        [({"batch_size": size}, partial(variants, options, size)) for size in options.batch],
        baseline="serial",
        ours=("streamed", "streamed, fused"),
        ceilings=("resident", "loader"),
    )
