"""Two ways to keep a tensor's memory while another stream reads it, without gpuaug: plain streams, GPU only.

    python -m bench run lifetimes

A copy stream, a transform stream and a training step on the current stream, two batches ahead, written twice:

record_stream     every tensor that crosses to another stream is recorded there, so that the allocator waits for its readers
reverse waits     nothing is recorded: a stream waits for the readers of its memory before it writes there again

Each with a short and a long training step, and with a host that runs ahead freely, that calls ``.item()`` in each
step, or that waits for the event of the step four batches back. Every batch is filled with its own number, and the
training step counts pixels with another value: if ``wrong`` is not 0, the loop has a race and its time is meaningless.
"""

from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bench.data import loaders
from bench.harness import flags, measurement
from bench.harness.console import print_rows
from gpuaug.benchkit.environment import environment

_BEHIND = 4
_POLICIES = ("record_stream", "reverse waits")
_STEPS = {"short": 2, "long": 60}
_HOSTS = ("free", "item", "bounded")


@dataclass
class Lanes:
    """Two streams, and batches on the host in which every pixel has the batch's number."""

    copy: torch.cuda.Stream
    transform: torch.cuda.Stream
    host: list[Tensor]


def prepare(images: Tensor) -> Tensor:
    """A transform with temporaries of its own that keeps the value of every pixel."""
    images = images.float()
    images = (images / 255 - 0.5) / 0.25
    return ((images * 0.25 + 0.5) * 255).round().to(torch.bfloat16)


def recorded(lanes: Lanes, consumer: torch.cuda.Stream) -> Iterator[tuple[Tensor, int]]:
    """The pipeline with ``record_stream`` on each tensor that crosses streams."""
    ahead: deque[tuple[Tensor, torch.cuda.Event, int]] = deque()
    index = 0
    while True:
        while len(ahead) <= loaders.DEPTH:
            number = index % len(lanes.host)
            with torch.cuda.stream(lanes.copy):
                images = lanes.host[number].to("cuda", non_blocking=True)
            lanes.transform.wait_stream(lanes.copy)
            images.record_stream(lanes.transform)
            with torch.cuda.stream(lanes.transform):
                prepared = prepare(images)
                ready = lanes.transform.record_event()
            prepared.record_stream(consumer)
            ahead.append((prepared, ready, number))
            # A variable that stays alive would keep one more batch than the other policy.
            del images, prepared
            index += 1
        prepared, ready, number = ahead.popleft()
        consumer.wait_event(ready)
        yield prepared, number
        del prepared


def reversed_waits(lanes: Lanes, consumer: torch.cuda.Stream) -> Iterator[tuple[Tensor, int]]:
    """The pipeline with waits back to the writer.

    The lanes' next batch is the first that may write to a block which the loop has freed. Before that, the lanes wait for all
    work that the loop has enqueued so far, which includes every reader of the block.
    """
    ahead: deque[tuple[Tensor, torch.cuda.Event, int]] = deque()
    index = 0
    while True:
        while len(ahead) <= loaders.DEPTH:
            number = index % len(lanes.host)
            enqueued = consumer.record_event()
            lanes.copy.wait_event(enqueued)
            lanes.transform.wait_event(enqueued)
            with torch.cuda.stream(lanes.copy):
                images = lanes.host[number].to("cuda", non_blocking=True)
            lanes.transform.wait_stream(lanes.copy)
            with torch.cuda.stream(lanes.transform):
                prepared = prepare(images)
                ready = lanes.transform.record_event()
            # The copied batch's memory returns to the copy stream's pool: that stream must not write before the batch was read.
            lanes.copy.wait_event(ready)
            del images
            ahead.append((prepared, ready, number))
            del prepared
            index += 1
        prepared, ready, number = ahead.popleft()
        consumer.wait_event(ready)
        yield prepared, number
        del prepared


def measure(policy: str, length: str, host: str, options: Namespace) -> dict[str, Any]:
    """Time and memory of one combination, run for ``--seconds``."""
    batch_size = options.batch[0]
    shape = (batch_size, 3, options.size, options.size)
    # Memory that an earlier combination left would count as this one's.
    measurement.release(options.device)
    lanes = Lanes(
        copy=torch.cuda.Stream(),
        transform=torch.cuda.Stream(),
        host=[torch.full(shape, number, dtype=torch.uint8).pin_memory() for number in range(_BEHIND + 1)],
    )
    consumer = torch.cuda.current_stream()
    weights = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    consumer.synchronize()
    base_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    behind: deque[torch.cuda.Event] = deque()
    batches = (recorded if policy == "record_stream" else reversed_waits)(lanes, consumer)
    steps, start = 0, 0.0
    warmup = 3 * _BEHIND
    while steps < warmup + 3 or perf_counter() - start < options.seconds:
        if steps == warmup:
            torch.cuda.synchronize()
            start = perf_counter()
        images, number = next(batches)
        state = weights
        for _ in range(_STEPS[length]):
            state = state @ weights
        # Read at the end of the step, when a block that was reused too early has been overwritten.
        wrong += (images != number).sum()
        if host == "item":
            wrong.item()
        elif host == "bounded":
            behind.append(consumer.record_event())
            if len(behind) > _BEHIND:
                behind.popleft().synchronize()
        steps += 1
        del images
    host_s = perf_counter() - start
    torch.cuda.synchronize()
    seconds = perf_counter() - start
    batches.close()
    counted = steps - warmup
    return {
        "case": f"{length} step, host {host}",
        "name": policy,
        "batch_size": batch_size,
        "step_ms": 1e3 * seconds / counted,
        "host_ms": 1e3 * host_s / counted,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() - base_bytes,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "steps": counted,
        "wrong": int(wrong),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    options = flags.read(flags.parser("lifetimes", __doc__, batch="64", seconds=0.7, repeats=1), argv)
    if options.device.type != "cuda":
        print("lifetimes: skipped, it needs a GPU")
        return None
    found_environment = environment(options.device)
    start = perf_counter()
    rows = [measure(policy, length, host, options) for length in _STEPS for host in _HOSTS for policy in _POLICIES]
    print_rows(rows, "lifetimes: two memory policies")
    return measurement.finish("lifetimes", options, rows, {"baseline": "record_stream"}, found_environment, start)
