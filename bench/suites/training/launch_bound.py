"""A training step whose kernels are shorter than their launches: what a loader takes from the training thread.

    python -m bench run launch_bound

The GPU waits for the host in such a loop, so all that a loader does on the training thread, and what its other threads do in
Python meanwhile, makes the step longer. Ready uint8 images from DataLoader workers; a ResNet-18 under bfloat16 autocast in
channels_last, SGD, trained on the same images in every row. Rows:

resident                 no loader: the batch is on the device
CUDA calls alone         the calls of a ``next()`` of a StreamedLoader without stages, by hand, on batches that are page-locked
CUDA calls alone, fused  the same, and those of the fused stage: a lane and its event, three allocations, two small kernels
DataLoader, pinned       pin_memory=True and ``.to(device, non_blocking=True)``
StreamedLoader           with defaults, over a DataLoader without pin_memory (feed="ring" on a CPU)
StreamedLoader, fused    the same with RandomResizedCrop, HorizontalFlip, ColorJitter without hue and Normalize, fused

Figures of a row: steps a second, their ratio to *resident*, and the median time of a ``next()`` (``next_us``).
"""

from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor
from torchvision import models

import gpuaug
from bench.data import loaders, pipelines
from bench.data.random_images import RepeatedRandomImages
from bench.harness import flags, measurement
from bench.harness.loops import Serial, Trainer, autocast_dtype
from gpuaug.benchkit.windows import Variant

_KEPT = 2000
"""Times of ``next()`` that a median is taken of: of the last windows, when all slots of a ring are page-locked."""


def calls_alone(batches: Iterable[tuple[Tensor, ...]], device: torch.device, *, fused: bool) -> Iterator[list[Tensor]]:
    """Batches copied by the calls that StreamedLoader makes for each, one ahead; with those of a fused stage if ``fused``."""
    side, second = torch.cuda.Stream(device), torch.cuda.Stream(device)
    small = torch.zeros(1, device=device)
    earlier: deque[torch.cuda.Event] = deque()
    ready: tuple[list[Tensor], torch.cuda.Event] | None = None
    for batch in batches:
        done = torch.cuda.Event(blocking=True)
        here = torch.cuda.current_stream(device)
        done.record(here)
        earlier.append(done)
        if len(earlier) > 4:
            earlier.popleft().query()
        side.wait_event(done)
        torch.cuda.set_stream(side)
        copied = [part.to(device, non_blocking=True) for part in batch]
        event = torch.cuda.Event(blocking=True)
        event.record(side)
        if fused:
            second.wait_event(event)
            torch.cuda.set_stream(second)
            made = [torch.empty(copied[0].shape, dtype=torch.bfloat16, device=device) for _ in range(3)]
            for _ in range(2):
                small.add_(1)
            copied[0] = made[0]
            event = torch.cuda.Event(blocking=True)
            event.record(second)
        torch.cuda.set_stream(here)
        if ready is not None:
            here.wait_event(ready[1])
            yield ready[0]
        ready = copied, event


def timed(name: str, batches: Iterable[Any], step: Callable[[Tensor], object], discard: int = 0) -> Variant:
    """A row that times every ``next``."""
    taken: deque[int] = deque(maxlen=_KEPT)

    def steps() -> Iterator[int]:
        iterator = iter(batches)
        while True:
            start = perf_counter_ns()
            _, labels = next(iterator)
            taken.append(perf_counter_ns() - start)
            step(labels)
            yield len(labels)

    return Variant(name, steps, discard, lambda: {"next_us": median(taken) / 1e3})


def variants(options: Namespace, batch_size: int, stack: ExitStack) -> list[Variant]:
    device = options.device
    data = RepeatedRandomImages(options.size)
    network = models.get_model(options.model, weights=None).to(device, memory_format=torch.channels_last)
    train = Trainer(network, autocast=autocast_dtype(device))
    images = torch.randn(batch_size, 3, options.size, options.size, device=device).contiguous(memory_format=torch.channels_last)
    step = partial(train, images if autocast_dtype(device) is None else images.bfloat16())

    def ours(name: str, *stages: Any) -> Variant:
        loader = loaders.endless(data, batch_size, options, pin=False)
        feed = "auto" if device.type == "cuda" else "ring" if options.workers else "plain"
        streamed = stack.enter_context(gpuaug.StreamedLoader(loader, stages, device=device, feed=feed))
        return timed(name, streamed, step, loaders.queue_length(loader))

    pinned = loaders.endless(data, batch_size, options)
    locked = loaders.sample_batches(data, batch_size, 4, device, pin=True)
    fused = gpuaug.fuse(
        pipelines.classification_kornia(options.size, cropping="slice"),
        dtype=autocast_dtype(device) or torch.float32,
        memory_format=torch.channels_last,
    )
    rows = [timed("resident", loaders.repeat_batches([[part.to(device) for part in locked[0]]]), step)]
    if device.type == "cuda":
        rows.append(timed("CUDA calls alone", calls_alone(loaders.repeat_batches(locked), device, fused=False), step))
        rows.append(timed("CUDA calls alone, fused", calls_alone(loaders.repeat_batches(locked), device, fused=True), step))
    return [
        *rows,
        timed("DataLoader, pinned", Serial(pinned, device, lambda images: images), step, loaders.queue_length(pinned)),
        ours("StreamedLoader"),
        ours("StreamedLoader, fused", fused),
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("launch_bound", __doc__, batch="32", seconds=0.5, size=224)
    parser.add_argument("--model", default="resnet18", help="a model of torchvision's (default: %(default)s)")
    options = flags.parse(parser, argv)
    return measurement.measure(
        "launch_bound",
        options,
        [({"batch_size": size}, partial(variants, options, size)) for size in options.batch],
        baseline="resident",
        ours=("StreamedLoader", "StreamedLoader, fused"),
        ceilings=("resident", "CUDA calls alone", "CUDA calls alone, fused"),
    )
