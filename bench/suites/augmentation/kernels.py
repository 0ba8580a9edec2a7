"""Kernels of one call: their number, time, and share of the copy bandwidth.

    python -m bench kernels --json bench/results/kernels.json

Pipelines are Kornia's in the suite ``augment``, except torchvision's presets. There is a row for each pass: the time of
its kernels in the profiler, the bytes that the pass must read and write (``explain``), and their share of the measured copy
bandwidth. If Kornia runs a part of a pipeline, there is a row for each kernel, without bytes.
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


def case_rows(case: augmenters.Case, batch: augmenters.Batch, bandwidth: float) -> list[dict[str, Any]]:
    """Return a row for each pass of the pipeline, or for each kernel if kernels cannot be assigned to passes."""
    augment = augmenters.fused_pipeline(case, augmenters.OURS)
    for _ in range(3):
        augment(*batch.inputs)
    events = timing.launched_kernels(lambda: augment(*batch.inputs), _CALLS)
    labels = {"case": case.name, "batch_size": len(batch.images)}
    pass_lines = augment.explain().lines
    names = [event["name"] for event in events]
    # Kernels can be assigned to passes if every call launches the same kernels, as many as the plan has.
    count = len(names) // _CALLS
    if not case.masks and names == names[:count] * _CALLS and count == sum(pass_line.launches or 0 for pass_line in pass_lines):
        rows = []
        start = 0
        for pass_line in pass_lines:
            pass_kernels = range(start, start := start + (pass_line.launches or 0))
            pass_us = median(sum(events[call * count + index]["dur"] for index in pass_kernels) for call in range(_CALLS))
            moved_bytes = (pass_line.read_bytes or 0) + (pass_line.written_bytes or 0)
            row = {
                "name": ", ".join(pass_line.modules),
                "kernels": " + ".join(names[index] for index in pass_kernels),
                "gpu_us": pass_us,
            }
            rows.append(labels | row | {"moved_bytes": moved_bytes, "share_of_copy": moved_bytes / (pass_us / 1e6) / bandwidth})
        return rows
    us_by_kernel = {name: sum(event["dur"] for event in events if event["name"] == name) / _CALLS for name in names}
    return [labels | {"name": name, "kernels": names.count(name) / _CALLS, "gpu_us": us} for name, us in us_by_kernel.items()]


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
            rows += case_rows(case, augmenters.random_inputs(case, size, options.size, options.device), bandwidth)
    print_rows(rows, f"kernels: a copy moves {bandwidth / 1e9:,.0f} GB/s")
    settings = {"copy_gb_per_s": bandwidth / 1e9, "ours": [], "ceilings": []}
    return measurement.finish("kernels", options, rows, settings, machine, start)
