"""A classifier under heavy augmentation: where it should run, and what streams add.

    python -m bench run classifier classifier_sizes

RandomCrop to half the side, Resize back, RandomRotation 45 degrees, GaussianBlur 7, Normalize; then a net of nine
convolutions of stride two, trained in float32 with SGD. Random uint8 images come from DataLoader workers out of a
small pool. Rows:

serial                       Kornia on the card in the loop, every image with its own draws
workers                      torchvision in the DataLoader workers
torchvision on the GPU       in the loop, as published: the rotation is called once an image (needs a GPU)
two streams, as published    the same one batch ahead on a side stream, racy (needs a GPU)
timm PrefetchLoader          Kornia in the loop again, copied and scaled ahead by timm (where it is installed; needs a GPU)
DALI                         the pipeline in DALI, fed by the same DataLoader (where it is installed; needs a GPU)
streamed                     the same Kornia pipeline as a stage of a StreamedLoader
streamed, fused              the same through gpuaug.fuse
resident                     ceiling: training alone on augmented batches that are on the card already
loader                       ceiling: iterating and copying alone

Workers refill their queues while other rows run; the steps at the start of each window that are discarded cover that.
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
from bench.peers.timm import Prefetched
from gpuaug.benchkit.windows import Variant


def variants(options: Namespace, batch_size: int, stack: ExitStack) -> list[OptionalRow]:
    device = options.device
    plain = random_images.RandomImages(options.size)
    on_workers = random_images.RandomImages(options.size, transform=pipelines.heavy_worker(options.size))
    fused = gpuaug.fuse(pipelines.heavy_kornia(options.size, cropping="slice"))
    kornia = pipelines.Scaled(pipelines.heavy_kornia(options.size)).to(device)
    published = pipelines.Scaled(pipelines.HeavyPublished(options.size))
    train = Trainer(models.Classifier(random_images.CLASSES, options.width).to(device), autocast=None)

    def nothing(images: torch.Tensor) -> torch.Tensor:
        return images

    def looped(name: str, kind: Any, dataset: Any, prepare: Any, step: Any = train) -> Variant:
        loader = loaders.endless(dataset, batch_size, options)
        return Variant(name, loop(kind(loader, device, prepare), step), loaders.queue_length(loader))

    def ours(name: str, stage: Any) -> Variant:
        return streamed_row(name, loaders.endless(plain, batch_size, options), stage, train, options, stack)

    def apart() -> Trainer:
        # A network of its own: the race may pass it any values, which the other rows must not train on.
        return Trainer(deepcopy(train.model), autocast=None)

    def on_dali(loader: Any, device: torch.device, prepare: Any) -> Serial:
        return Serial(dali.Batches("seed", loader, batch_size, options.size, device), device, prepare)

    peers: dict[str, Callable[[str], Variant]] = {
        "torchvision on the GPU": lambda name: looped(name, Serial, plain, published),
        "two streams, as published": lambda name: looped(name, PublishedTwoStreams, plain, published, apart()),
        "timm PrefetchLoader": lambda name: looped(name, Prefetched, plain, kornia.transform),
        "DALI": lambda name: looped(name, on_dali, plain, nothing),
    }
    resident = loaders.repeat_batches(
        [(kornia(images), labels) for images, labels in loaders.sample_batches(plain, batch_size, 4, device)]
    )
    return [
        looped("serial", Serial, plain, kornia),
        looped("workers", Serial, on_workers, nothing),
        *(peer_row(name, device, partial(make, name)) for name, make in peers.items()),
        ours("streamed", kornia),
        ours("streamed, fused", fused),
        Variant("resident", loop(resident, train)),
        looped("loader", Serial, plain, nothing, lambda *_: None),
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
