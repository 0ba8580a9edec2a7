"""Loops that stop the training thread: ``.item()`` in every step, and a DataLoader without workers.

    python -m bench run items

Both decide which thread should pull batches and launch their work: after ``.item()`` the device has nothing queued
until the thread that waited comes back, and without workers the dataset's own Python runs in this process. ResNet-18
under bfloat16 autocast, a light augmentation, random uint8 images. Cases, each without and with ``.item()`` on the
loss, and each serial against streamed:

workers                batches from DataLoader workers
no workers, Python     num_workers=0, a dataset that holds the GIL all the time
no workers, torch      num_workers=0, a dataset that spends its time in torch, which releases the GIL
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchvision import models

import gpuaug
from bench.data import loaders, random_images
from bench.data.models import LightAugmentation
from bench.harness import flags, measurement
from bench.harness.loops import Serial, Trainer, autocast_dtype, loop
from gpuaug.benchkit.windows import Variant

# Iterations of a Python loop per image, about 0.1 ms: the cost of parsing an annotation in Python.
_TURNS = 3000


def in_python(image: Tensor) -> Tensor:
    total = 0
    for turn in range(_TURNS):
        total ^= turn
    return image


def in_torch(image: Tensor) -> Tensor:
    return image.float().mul_(0.9).clamp_(0, 255).to(torch.uint8)


def variants(
    options: Namespace,
    batch_size: int,
    transform: Callable[[Tensor], Tensor] | None,
    workers: int,
    item: bool,
    stack: ExitStack,
) -> list[Variant]:
    device = options.device
    augment = LightAugmentation().to(device)
    train = Trainer(models.get_model(options.model, weights=None).to(device), autocast=autocast_dtype(device))
    dataset = random_images.RandomImages(options.size, transform=transform)

    def step(images: Tensor, labels: Tensor) -> None:
        loss = train(images, labels)
        if item:
            loss.item()

    serial, pulled = (loaders.endless(dataset, batch_size, options, workers=workers) for _ in range(2))
    streamed = gpuaug.StreamedLoader(pulled, [augment], device=device, depth=loaders.DEPTH)
    stack.callback(streamed.close)
    return [
        Variant("serial", loop(Serial(serial, device, augment), step), loaders.queue_length(serial)),
        Variant("streamed", loop(streamed, step), loaders.queue_length(pulled)),
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("items", __doc__, batch="32")
    parser.add_argument("--model", default="resnet18", help="a model of torchvision's (default: %(default)s)")
    options = flags.parse(parser, argv)
    kinds = {
        "workers": (None, options.workers),
        "no workers, Python": (in_python, 0),
        "no workers, torch": (in_torch, 0),
    }
    return measurement.measure(
        "items",
        options,
        [
            (
                {"case": f"{case}, .item()" if item else case, "batch_size": size},
                partial(variants, options, size, *kind, item),
            )
            for size in options.batch
            for case, kind in kinds.items()
            for item in (False, True)
        ],
        baseline="serial",
        ours=("streamed",),
    )
