"""Kernels of one call: their number, time, and share of the copy bandwidth.

    python -m bench kernels --json bench/results/kernels.json

A row for each pass of each of Kornia's pipelines of the suite ``augment``, but for torchvision's presets: the time of its
kernels by the profiler, the bytes that the pass has to read and write (``explain``), and their share of the measured copy
bandwidth. Where Kornia runs a part of a pipeline, a row for each kernel, without bytes.
"""

from argparse import Namespace
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

from bench.harness import flags, measurement, timing
from bench.harness.console import console, print_rows
from bench.peers import augmenters
from gpuaug.benchkit.environment import environment

_CALLS = 8


def passes(case: augmenters.Case, batch: augmenters.Batch, bandwidth: float) -> list[dict[str, Any]]:
    """A row for each pass of the pipeline, or for each kernel."""
    augment = augmenters.fused(case, augmenters.OURS)
    for _ in range(3):
        augment(*batch.inputs)
    events = timing.launched_kernels(lambda: augment(*batch.inputs), _CALLS)
    labels = {"case": case.name, "batch_size": len(batch.images)}
    lines = augment.explain().lines
    names = [event["name"] for event in events]
    # Every call launches the same kernels in the same order, as many as in the plan.
    count = len(names) // _CALLS
    if not case.masks and names == names[:count] * _CALLS and count == sum(line.launches or 0 for line in lines):
        rows = []
        first = 0
        for line in lines:
            own = range(first, first := first + (line.launches or 0))
            taken_us = median(sum(events[call * count + index]["dur"] for index in own) for call in range(_CALLS))
            moved = (line.read_bytes or 0) + (line.written_bytes or 0)
            row = {"name": ", ".join(line.modules), "kernels": " + ".join(names[index] for index in own), "gpu_us": taken_us}
            rows.append(labels | row | {"moved_bytes": moved, "share_of_copy": moved / (taken_us / 1e6) / bandwidth})
        return rows
    taken = {name: sum(event["dur"] for event in events if event["name"] == name) / _CALLS for name in names}
    return [labels | {"name": name, "kernels": names.count(name) / _CALLS, "gpu_us": us} for name, us in taken.items()]


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    parser = flags.parser("kernels", __doc__, batch="256")
    options: Namespace = flags.parse(parser, argv)
    if options.device.type != "cuda":
        console.print("kernels: skipped, there is no GPU")
        return None
    machine = environment(options.device)
    start = perf_counter()
    bandwidth = timing.copy_bandwidth(options.device)
    rows = []
    for size in options.batch:
        for case in augmenters.cases(options.size):
            if case.preset:
                continue
            rows += passes(case, augmenters.sample(case, size, options.size, options.device), bandwidth)
    print_rows(rows, f"kernels: a copy moves {bandwidth / 1e9:,.0f} GB/s")
    settings = {"copy_gb_per_s": bandwidth / 1e9, "ours": [], "ceilings": []}
    return measurement.finish("kernels", options, rows, settings, machine, start)
