"""Host time of one ``next`` in a loader without stages, which only copies.

    python -m bench run handover

Host time in microseconds of each ``next`` of a StreamedLoader without stages, which launches the copy of a later batch and
returns an earlier one. The row ``by hand`` iterates the wrapped loader, and calls ``.to(device, non_blocking=True)`` for each
tensor. The device is synchronised outside of the timed part, so that neither row waits for a copy. Cases:

two tensors, large    64 uint8 images and 64 labels; page-locked batches, repeated from a list
two tensors, small    the same with 8 x 8 pixels
many leaves           a dict of 12 small tensors, page-locked, repeated from a list
DataLoader            the large batch from DataLoader workers, page-locked by DataLoader, ready after a pause
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from statistics import median, quantiles
from typing import Any

import torch

import gpuaug
from bench.data import loaders, random_images
from bench.harness import flags, measurement, timing
from bench.harness.console import print_rows
from gpuaug.benchkit.environment import environment

_LEAVES = 12
_ROUNDS = 5


def by_hand(loader: Iterable, device: torch.device) -> Iterator[Any]:
    """Copy batches to the device as a training loop without gpuaug does."""
    for batch in loader:
        if isinstance(batch, dict):
            yield {key: value.to(device, non_blocking=True) for key, value in batch.items()}
        else:
            yield tuple(value.to(device, non_blocking=True) for value in batch)


def cases(options: Namespace) -> Iterator[tuple[str, Callable[[], Iterable], float]]:
    """Yield (name of the case, function that creates the loader, pause before each call in seconds)."""
    device, (batch_size, *_) = options.device, options.batch

    def cycled_batches(size: int) -> Callable[[], Iterable]:
        batches = loaders.repeat_batches(
            loaders.sample_batches(random_images.RandomImages(size), batch_size, 4, device, pin=True)
        )
        return lambda: batches

    yield "two tensors, large", cycled_batches(options.size), 0.0
    yield "two tensors, small", cycled_batches(8), 0.0
    leaves = {f"leaf{index}": torch.rand(batch_size, 4) for index in range(_LEAVES)}
    if device.type == "cuda":
        leaves = {name: leaf.pin_memory() for name, leaf in leaves.items()}
    yield "many leaves", lambda: loaders.repeat_batches([leaves]), 0.0
    if options.workers:
        images = random_images.RandomImages(options.size)
        yield "DataLoader", lambda: loaders.endless(images, batch_size, options, workers=min(4, options.workers)), 0.01


def rows_of(case: str, make: Callable[[], Iterable], pause_s: float, options: Namespace) -> list[dict[str, Any]]:
    """Measure both rows of a case in turns, and return them."""
    calls = max(_ROUNDS, options.calls // (20 if pause_s else 4 if options.quick else 1))
    times_us: dict[str, list[float]] = {}
    with ExitStack() as stack:
        streamed = gpuaug.StreamedLoader(make(), device=options.device, depth=loaders.DEPTH)
        stack.callback(streamed.close)
        sources = {"by hand": by_hand(make(), options.device), "streamed": iter(streamed)}
        for round_index in range(_ROUNDS + 1):
            for name, batches in sources.items():
                round_us = timing.time_next(batches, calls // _ROUNDS, options.device, pause_s)
                # The first round fills queues and warms up caches.
                times_us.setdefault(name, []).extend(round_us if round_index else [])
    return [
        {
            "case": case,
            "name": name,
            "batch_size": options.batch[0],
            "median_us": median(row_us),
            "p95_us": quantiles(row_us, n=20)[-1],
            "calls": len(row_us),
        }
        for name, row_us in times_us.items()
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("handover", __doc__, batch="64")
    parser.add_argument("--calls", type=int, default=2000, help="timed calls for each row (default: %(default)s)")
    options = flags.parse(parser, argv)
    machine = environment(options.device)
    start = time.perf_counter()
    rows = []
    for case, make, pause_s in cases(options):
        rows += rows_of(case, make, pause_s, options)
        measurement.release(options.device)
    print_rows(rows, "handover: host time of one next")
    settings = {"baseline": "by hand", "ours": ["streamed"], "ceilings": []}
    return measurement.finish("handover", options, rows, settings, machine, start)
