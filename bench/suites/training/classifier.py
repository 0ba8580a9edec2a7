"""A classifier with heavy augmentation in workers, in the training loop, or on lanes.

    python -m bench run classifier classifier_sizes

RandomCrop to half of the side, Resize to the full side, RandomRotation by up to 45 degrees, GaussianBlur 7, Normalize; then a
network of nine convolutions of stride two, trained in float32 with SGD. DataLoader workers read random uint8 images from a
small pool. Rows:

serial                       Kornia on the card in the loop, with separate draws for every image
workers                      torchvision in the DataLoader workers
torchvision on the GPU       in the loop, as published: the rotation is called once per image (needs a GPU)
two streams, as published    the same, one batch ahead on a side stream, with a race (needs a GPU)
timm PrefetchLoader          Kornia in the loop; timm copies and scales ahead (if it is installed; needs a GPU)
DALI                         the pipeline in DALI, fed by the same DataLoader (if it is installed; needs a GPU)
streamed                     the same Kornia pipeline as a stage of a StreamedLoader
streamed, fused              the same through gpuaug.fuse
resident                     ceiling: training alone on augmented batches that are on the card already
loader                       ceiling: iterating and copying alone

Workers refill their queues while other rows run. So steps at the start of each window are discarded.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from typing import Any

import torch

import gpuaug
from bench.data import loaders, models, pipelines, random_images
from bench.harness import flags, measurement
from bench.harness.loops import Serial, Trainer, loop, streamed_row
from bench.harness.optional_rows import OptionalRow, peer_row
from bench.peers import dali
from bench.peers.published_two_streams import PublishedTwoStreams
from bench.peers.timm import TimmPrefetchLoop
from gpuaug.benchkit.windows import Variant


def variants(options: Namespace, batch_size: int, stack: ExitStack) -> list[OptionalRow]:
    device = options.device
    dataset = random_images.RandomImages(options.size)
    augmented_dataset = random_images.RandomImages(options.size, transform=pipelines.heavy_worker(options.size))
    fused = gpuaug.fuse(pipelines.heavy_kornia(options.size, cropping="slice"))
    kornia_transform = pipelines.ScaleAndTransform(pipelines.heavy_kornia(options.size)).to(device)
    published_transform = pipelines.ScaleAndTransform(pipelines.HeavyPublished(options.size))
    train = Trainer(models.Classifier(random_images.CLASSES, options.width).to(device), autocast=None)

    def identity(images: torch.Tensor) -> torch.Tensor:
        return images

    def loop_row(name: str, loop_type: Any, dataset: Any, prepare: Any, step: Any = train) -> Variant:
        loader = loaders.endless(dataset, batch_size, options)
        return Variant(name, loop(loop_type(loader, device, prepare), step), loaders.queue_length(loader))

    def gpuaug_row(name: str, stage: Any) -> Variant:
        return streamed_row(name, loaders.endless(dataset, batch_size, options), stage, train, options, stack)

    def separate_trainer() -> Trainer:
        # A separate network: the race may pass it arbitrary values, which must not change the network of the other rows.
        return Trainer(deepcopy(train.model), autocast=None)

    def dali_loop(loader: Any, device: torch.device, prepare: Any) -> Serial:
        return Serial(dali.Batches("seed", loader, batch_size, options.size, device), device, prepare)

    peers: dict[str, Callable[[str], Variant]] = {
        "torchvision on the GPU": lambda name: loop_row(name, Serial, dataset, published_transform),
        "two streams, as published": lambda name: loop_row(
            name, PublishedTwoStreams, dataset, published_transform, separate_trainer()
        ),
        "timm PrefetchLoader": lambda name: loop_row(name, TimmPrefetchLoop, dataset, kornia_transform.transform),
        "DALI": lambda name: loop_row(name, dali_loop, dataset, identity),
    }
    resident = loaders.repeat_batches(
        [(kornia_transform(images), labels) for images, labels in loaders.sample_batches(dataset, batch_size, 4, device)]
    )
    return [
        loop_row("serial", Serial, dataset, kornia_transform),
        loop_row("workers", Serial, augmented_dataset, identity),
        *(peer_row(name, device, partial(make, name)) for name, make in peers.items()),
        gpuaug_row("streamed", kornia_transform),
        gpuaug_row("streamed, fused", fused),
        Variant("resident", loop(resident, train)),
        loop_row("loader", Serial, dataset, identity, lambda *_: None),
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("classifier", __doc__, batch="8,32,128", seconds=0.4, repeats=4, sweeps=True)
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer (default: %(default)s)")
    options = flags.parse(parser, argv)
    return measurement.measure(
        "classifier",
        options,
        [({"batch_size": size}, partial(variants, options, size)) for size in options.batch],
        baseline="serial",
        ours=("streamed", "streamed, fused"),
        ceilings=("resident", "loader"),
    )
