"""Loops that block the training thread: ``.item()`` in every step, and a DataLoader without workers.

    python -m bench run items

After ``.item()`` nothing is queued on the device until the thread that waited goes on, and without workers the Python code of
the dataset runs in this process. ResNet-18 under bfloat16 autocast, a light augmentation, random uint8 images. Cases, each
without and with ``.item()`` of the loss, with the rows ``serial`` and ``streamed``:

workers                batches from DataLoader workers
no workers, Python     num_workers=0, a dataset whose Python code holds the GIL
no workers, torch      num_workers=0, a dataset whose time is spent in torch, which releases the GIL
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

# Iterations of a Python loop per image, about 0.1 ms, as long as parsing an annotation in Python.
_PYTHON_ITERATIONS = 3000


def python_transform(image: Tensor) -> Tensor:
    total = 0
    for number in range(_PYTHON_ITERATIONS):
        total ^= number
    return image


def torch_transform(image: Tensor) -> Tensor:
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

    serial_loader, streamed_source = (loaders.endless(dataset, batch_size, options, workers=workers) for _ in range(2))
    streamed = gpuaug.StreamedLoader(streamed_source, [augment], device=device, depth=loaders.DEPTH)
    stack.callback(streamed.close)
    return [
        Variant("serial", loop(Serial(serial_loader, device, augment), step), loaders.queue_length(serial_loader)),
        Variant("streamed", loop(streamed, step), loaders.queue_length(streamed_source)),
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("items", __doc__, batch="32")
    parser.add_argument("--model", default="resnet18", help="a model of torchvision's (default: %(default)s)")
    options = flags.parse(parser, argv)
    cases = {
        "workers": (None, options.workers),
        "no workers, Python": (python_transform, 0),
        "no workers, torch": (torch_transform, 0),
    }
    return measurement.measure(
        "items",
        options,
        [
            (
                {"case": f"{case}, .item()" if item else case, "batch_size": size},
                partial(variants, options, size, *settings, item),
            )
            for size in options.batch
            for case, settings in cases.items()
            for item in (False, True)
        ],
        baseline="serial",
        ours=("streamed",),
    )
