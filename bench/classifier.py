"""A classifier under heavy augmentation: where it should run, and what streams add.

    python -m bench.classifier --json bench/results/classifier.json

RandomCrop to half the side, Resize back, RandomRotation 45 degrees, GaussianBlur 7, Normalize; then a net of nine
convolutions of stride two, trained in float32 with SGD. Random uint8 images come from DataLoader workers out of a
small pool. Rows:

serial                       Kornia on the card in the loop, every image with its own draws
workers                      torchvision in the DataLoader workers
torchvision on the GPU       in the loop, as published: the rotation is called once an image (needs a GPU)
two streams, as published    the same one batch ahead on a side stream, racy (needs a GPU)
streamed                     the same Kornia pipeline as a stage of a StreamedLoader
streamed, fused              the same through gpuaug.fuse
resident                     ceiling: training alone on augmented batches that are on the card already
loader                       ceiling: iterating and copying alone

The workers refill their queue while other rows have their turn; the discarded steps at the start of each window cover
that.
"""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from typing import Any

import torch

import gpuaug
from bench import common, data, models, pipelines
from bench.loops import PublishedTwoStreams, Serial, Trainer, loop
from gpuaug.bench.windows import Variant


def variants(options: Namespace, batch_size: int, stack: ExitStack) -> list[Variant]:
    device = options.device
    plain = data.RandomImages(options.size)
    on_workers = data.RandomImages(options.size, transform=pipelines.heavy_worker(options.size))
    fused = gpuaug.fuse(pipelines.heavy_kornia(options.size, cropping="slice"))
    kornia = pipelines.Scaled(pipelines.heavy_kornia(options.size)).to(device)
    published = pipelines.Scaled(pipelines.HeavyPublished(options.size))
    train = Trainer(models.Classifier(data.CLASSES, options.width).to(device), autocast=None)

    def nothing(images: torch.Tensor) -> torch.Tensor:
        return images

    loops = {"serial": (Serial, plain, kornia, train), "workers": (Serial, on_workers, nothing, train)}
    if device.type == "cuda":
        loops["torchvision on the GPU"] = (Serial, plain, published, train)
        # Its own network: the race may hand it anything, which the other rows must not train on.
        apart = Trainer(deepcopy(train.model), autocast=None)
        loops["two streams, as published"] = (PublishedTwoStreams, plain, published, apart)
    loops["loader"] = (Serial, plain, nothing, lambda *_: None)
    made = []
    for name, (kind, dataset, prepare, step) in loops.items():
        loader = data.endless(dataset, batch_size, options)
        made.append(Variant(name, loop(kind(loader, device, prepare), step), data.queued(loader)))

    stages = {"streamed": kornia, "streamed, fused": fused}
    ours = []
    for name, stage in stages.items():
        loader = data.endless(plain, batch_size, options)
        streamed = gpuaug.StreamedLoader(loader, [stage], device=device, depth=common.DEPTH)
        stack.callback(streamed.close)
        ours.append(Variant(name, loop(streamed, train), data.queued(loader)))
    resident = data.cycle([(kornia(images), labels) for images, labels in data.sample(plain, batch_size, 4, device)])
    # Before the ceiling that the loop above ended with, where a reader looks for it.
    made[-1:-1] = [
        *ours,
        Variant("resident", loop(resident, train)),
    ]
    return made


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__, batch="8,32,128", seconds=0.4, repeats=4)
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer (default: %(default)s)")
    options = common.read(parser, argv)
    return common.measure(
        "classifier",
        options,
        [({"batch_size": size}, partial(variants, options, size)) for size in options.batch],
        baseline="serial",
        ours=("streamed", "streamed, fused"),
        ceilings=("resident", "loader"),
    )


if __name__ == "__main__":
    main()
