"""A training step that is bound by launches: the time that a loader takes from the training thread.

    python -m bench run launch_bound

The GPU waits for the host in such a loop. So the work of a loader on the training thread, and the Python code of its other
threads, make the step longer. DataLoader workers read uint8 images; a ResNet-18 under bfloat16 autocast in channels_last is
trained with SGD, on the same images in every row. Rows:

resident                 no loader: the batch is on the device
CUDA calls alone         only the CUDA calls of ``next()`` of a StreamedLoader without stages, on page-locked batches
CUDA calls alone, fused  the same with the calls of a fused stage: a lane and its event, three allocations, two small kernels
DataLoader, pinned       pin_memory=True and ``.to(device, non_blocking=True)``
StreamedLoader           with defaults, over a DataLoader without pin_memory (feed="ring" on a CPU)
StreamedLoader, fused    the same with RandomResizedCrop, HorizontalFlip, ColorJitter without hue and Normalize, fused

Figures of a row: steps per second, their ratio to *resident*, and the median time of ``next()`` (``next_us``).
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

_MAX_TIMES = 2000
"""Number of times of ``next()`` in the median: those of the last windows, when all slots of a ring are page-locked."""


def calls_alone(batches: Iterable[tuple[Tensor, ...]], device: torch.device, *, fused: bool) -> Iterator[list[Tensor]]:
    """Copy batches, one ahead, with the CUDA calls of a StreamedLoader. ``fused``: with the calls of a fused stage."""
    copy_stream, stage_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
    scratch = torch.zeros(1, device=device)
    consumer_events: deque[torch.cuda.Event] = deque()
    next_batch: tuple[list[Tensor], torch.cuda.Event] | None = None
    for batch in batches:
        consumer_event = torch.cuda.Event(blocking=True)
        consumer = torch.cuda.current_stream(device)
        consumer_event.record(consumer)
        consumer_events.append(consumer_event)
        if len(consumer_events) > 4:
            consumer_events.popleft().query()
        copy_stream.wait_event(consumer_event)
        torch.cuda.set_stream(copy_stream)
        device_batch = [tensor.to(device, non_blocking=True) for tensor in batch]
        event = torch.cuda.Event(blocking=True)
        event.record(copy_stream)
        if fused:
            stage_stream.wait_event(event)
            torch.cuda.set_stream(stage_stream)
            buffers = [torch.empty(device_batch[0].shape, dtype=torch.bfloat16, device=device) for _ in range(3)]
            for _ in range(2):
                scratch.add_(1)
            device_batch[0] = buffers[0]
            event = torch.cuda.Event(blocking=True)
            event.record(stage_stream)
        torch.cuda.set_stream(consumer)
        if next_batch is not None:
            consumer.wait_event(next_batch[1])
            yield next_batch[0]
        next_batch = device_batch, event


def timed_row(name: str, batches: Iterable[Any], step: Callable[[Tensor], object], discard: int = 0) -> Variant:
    """Return a row that measures the time of every ``next``."""
    next_ns: deque[int] = deque(maxlen=_MAX_TIMES)

    def steps() -> Iterator[int]:
        iterator = iter(batches)
        while True:
            start = perf_counter_ns()
            _, labels = next(iterator)
            next_ns.append(perf_counter_ns() - start)
            step(labels)
            yield len(labels)

    return Variant(name, steps, discard, lambda: {"next_us": median(next_ns) / 1e3})


def variants(options: Namespace, batch_size: int, stack: ExitStack) -> list[Variant]:
    device = options.device
    data = RepeatedRandomImages(options.size)
    network = models.get_model(options.model, weights=None).to(device, memory_format=torch.channels_last)
    train = Trainer(network, autocast=autocast_dtype(device))
    images = torch.randn(batch_size, 3, options.size, options.size, device=device).contiguous(memory_format=torch.channels_last)
    step = partial(train, images if autocast_dtype(device) is None else images.bfloat16())

    def gpuaug_row(name: str, *stages: Any) -> Variant:
        loader = loaders.endless(data, batch_size, options, pin=False)
        feed = "auto" if device.type == "cuda" else "ring" if options.workers else "plain"
        streamed = stack.enter_context(gpuaug.StreamedLoader(loader, stages, device=device, feed=feed))
        return timed_row(name, streamed, step, loaders.queue_length(loader))

    pinned_loader = loaders.endless(data, batch_size, options)
    locked_batches = loaders.sample_batches(data, batch_size, 4, device, pin=True)
    fused = gpuaug.fuse(
        pipelines.classification_kornia(options.size, cropping="slice"),
        dtype=autocast_dtype(device) or torch.float32,
        memory_format=torch.channels_last,
    )
    rows = [timed_row("resident", loaders.repeat_batches([[tensor.to(device) for tensor in locked_batches[0]]]), step)]
    if device.type == "cuda":
        rows.append(
            timed_row("CUDA calls alone", calls_alone(loaders.repeat_batches(locked_batches), device, fused=False), step)
        )
        rows.append(
            timed_row("CUDA calls alone, fused", calls_alone(loaders.repeat_batches(locked_batches), device, fused=True), step)
        )
    return [
        *rows,
        timed_row(
            "DataLoader, pinned",
            Serial(pinned_loader, device, lambda images: images),
            step,
            loaders.queue_length(pinned_loader),
        ),
        gpuaug_row("StreamedLoader"),
        gpuaug_row("StreamedLoader, fused", fused),
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
