"""Two policies that protect a tensor's memory while another stream reads it: plain streams without gpuaug, GPU only.

    python -m bench run lifetimes

A copy stream, a transform stream and a training step on the current stream, two batches ahead, with one of two policies:

record_stream     ``record_stream`` is called for every tensor that another stream reads, so that the allocator waits for it
reverse waits     ``record_stream`` is not called; a stream waits for the readers of its memory before it writes there again

Each policy runs with a short and a long training step, and with a host that runs ahead freely, that calls ``.item()`` in each
step, or that waits for the event of the step four batches back. Every batch is filled with its number, and the training step
counts pixels of another value: if ``wrong`` is not 0, the loop has a race and its time is meaningless.
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

_STEPS_BEHIND = 4
_POLICIES = ("record_stream", "reverse waits")
_STEPS = {"short": 2, "long": 60}
_HOSTS = ("free", "item", "bounded")


@dataclass
class Lanes:
    """Two streams, and batches on the host whose pixels all have the number of the batch."""

    copy: torch.cuda.Stream
    transform: torch.cuda.Stream
    host: list[Tensor]


def prepare(images: Tensor) -> Tensor:
    """Transform with temporary tensors that does not change the value of any pixel."""
    images = images.float()
    images = (images / 255 - 0.5) / 0.25
    return ((images * 0.25 + 0.5) * 255).round().to(torch.bfloat16)


def record_stream_batches(lanes: Lanes, consumer: torch.cuda.Stream) -> Iterator[tuple[Tensor, int]]:
    """Yield (images, number of the batch); ``record_stream`` is called for each tensor that another stream reads."""
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
                ready_event = lanes.transform.record_event()
            prepared.record_stream(consumer)
            ahead.append((prepared, ready_event, number))
            # Otherwise the variables would keep one batch more alive than with the other policy.
            del images, prepared
            index += 1
        prepared, ready_event, number = ahead.popleft()
        consumer.wait_event(ready_event)
        yield prepared, number
        del prepared


def reverse_waits_batches(lanes: Lanes, consumer: torch.cuda.Stream) -> Iterator[tuple[Tensor, int]]:
    """Yield (images, number of the batch); lanes wait for the readers of memory before they write there again.

    The next batch is the first that may write to a block that the loop has freed. Before it, the lanes wait for all work that
    the loop has enqueued so far, which includes every reader of the block.
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
                ready_event = lanes.transform.record_event()
            # The memory of ``images`` returns to the pool of the copy stream, which must not write there before they were read.
            lanes.copy.wait_event(ready_event)
            del images
            ahead.append((prepared, ready_event, number))
            del prepared
            index += 1
        prepared, ready_event, number = ahead.popleft()
        consumer.wait_event(ready_event)
        yield prepared, number
        del prepared


def measure(policy: str, length: str, host: str, options: Namespace) -> dict[str, Any]:
    """Run one combination for ``--seconds``, and return its row: time and memory."""
    batch_size = options.batch[0]
    shape = (batch_size, 3, options.size, options.size)
    # Cached memory of an earlier combination would be counted for this one.
    measurement.release(options.device)
    lanes = Lanes(
        copy=torch.cuda.Stream(),
        transform=torch.cuda.Stream(),
        host=[torch.full(shape, number, dtype=torch.uint8).pin_memory() for number in range(_STEPS_BEHIND + 1)],
    )
    consumer = torch.cuda.current_stream()
    weights = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    consumer.synchronize()
    base_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    step_events: deque[torch.cuda.Event] = deque()
    batches = (record_stream_batches if policy == "record_stream" else reverse_waits_batches)(lanes, consumer)
    steps, start = 0, 0.0
    warmup = 3 * _STEPS_BEHIND
    while steps < warmup + 3 or perf_counter() - start < options.seconds:
        if steps == warmup:
            torch.cuda.synchronize()
            start = perf_counter()
        images, number = next(batches)
        state = weights
        for _ in range(_STEPS[length]):
            state = state @ weights
        # Compared at the end of the step, by when a block that was reused too early has been overwritten.
        wrong += (images != number).sum()
        if host == "item":
            wrong.item()
        elif host == "bounded":
            step_events.append(consumer.record_event())
            if len(step_events) > _STEPS_BEHIND:
                step_events.popleft().synchronize()
        steps += 1
        del images
    host_s = perf_counter() - start
    torch.cuda.synchronize()
    seconds = perf_counter() - start
    batches.close()
    timed_steps = steps - warmup
    return {
        "case": f"{length} step, host {host}",
        "name": policy,
        "batch_size": batch_size,
        "step_ms": 1e3 * seconds / timed_steps,
        "host_ms": 1e3 * host_s / timed_steps,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() - base_bytes,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "steps": timed_steps,
        "wrong": int(wrong),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    options = flags.parse(flags.parser("lifetimes", __doc__, batch="64", seconds=0.7, repeats=1), argv)
    if options.device.type != "cuda":
        print("lifetimes: skipped, it needs a GPU")
        return None
    machine = environment(options.device)
    start = perf_counter()
    rows = [measure(policy, length, host, options) for length in _STEPS for host in _HOSTS for policy in _POLICIES]
    print_rows(rows, "lifetimes: two memory policies")
    return measurement.finish("lifetimes", options, rows, {"baseline": "record_stream"}, machine, start)
