"""What the GPU does for one call: gpuaug's kernels, their time, and their share of what a copy moves.

    python -m bench.kernels --json bench/results/kernels.json

A row for each pass of each pipeline of ``bench.augment``: the time of its kernels by the profiler, the bytes that the
pass has to read and write (``explain``), and how much of the measured copy bandwidth that is. Where Kornia runs some
of a pipeline, a row for each kernel, without bytes. ``bench.augment`` takes its measures of the GPU from here too.
"""

import json
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench import common, peers
from gpuaug.benchkit.environment import environment

_CALLS = 8
# Of no more than two GHz: a sleep that is too short is seen and doubled.
_CYCLES_PER_MS = 2_000_000
# Well below the launches that a stream takes in before the host has to wait for it.
_QUEUED_LAUNCHES = 512
_COPIED_BYTES = 1 << 29


def launched(call: Callable[[], Any], calls: int) -> list[dict[str, Any]]:
    """The kernels of ``calls`` calls in their order, copies and fills left out, as the profiler's trace has them."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])


def gpu_ms(call: Callable[[], Any], *, launches: float, host_ms: float) -> float | None:
    """Milliseconds that the GPU takes for one call, or nothing if the call waits for the GPU.

    Events around one call on an idle GPU would time the host, which launches more slowly than the GPU works. So the
    calls are queued behind a sleeping kernel: a measurement counts only if all of them were launched before it ended.

    Args:
        call: Works on the current stream.
        launches: Kernels of a call, about: that many are queued at once.
        host_ms: What a call takes on the host, about: the GPU sleeps longer.
    """
    calls, patience = max(1, min(16, int(_QUEUED_LAUNCHES / max(1.0, launches)))), 1
    found: list[float] = []
    while len(found) < 3:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(int(_CYCLES_PER_MS * patience * (1 + 2 * host_ms * calls)))
        start.record()
        for _ in range(calls):
            call()
        awake = start.query()
        end.record()
        torch.cuda.synchronize()
        if not awake:
            found.append(start.elapsed_time(end) / calls)
        elif calls > 1:
            # Memory that a queued call holds is not free for the next, and allocating may wait: one call finds all it needs.
            calls //= 2
        elif patience < 4:
            patience *= 2
        else:
            break
    return median(found) if found else None


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy on the device reads and writes, together."""
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    taken_ms = gpu_ms(lambda: target.copy_(source), launches=1, host_ms=0.1)
    assert taken_ms is not None, "a copy on the device does not wait"
    return 2 * _COPIED_BYTES / (taken_ms / 1e3)


def passes(case: peers.Case, batch: peers.Batch, bandwidth: float) -> list[dict[str, Any]]:
    """A row for each pass of the pipeline, or for each kernel."""
    augment = peers.fused(case)
    for _ in range(3):
        augment(*batch.parts)
    events = launched(lambda: augment(*batch.parts), _CALLS)
    labels = {"case": case.name, "batch_size": len(batch.images)}
    lines = augment.explain().lines
    names = [event["name"] for event in events]
    # In every call the same kernels in the same order, and as many as the plan says.
    count = len(names) // _CALLS
    if not case.masks and names == names[:count] * _CALLS and count == sum(line.launches or 0 for line in lines):
        rows, first = [], 0
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
    parser = common.parser(__doc__, batch="256")
    options: Namespace = common.read(parser, argv)
    if options.device.type != "cuda":
        common.console.print("kernels: skipped, there is no GPU")
        return None
    found_environment, start = environment(options.device), perf_counter()
    bandwidth = copy_bandwidth(options.device)
    rows = []
    for size in options.batch:
        for case in peers.cases(options.size):
            rows += passes(case, peers.sample(case, size, options.size, options.device), bandwidth)
    common.show(rows, f"kernels: a copy moves {bandwidth / 1e9:,.0f} GB/s")
    settings = {"copy_gb_per_s": bandwidth / 1e9, "ours": [], "ceilings": []}
    return common.finish("kernels", options, rows, settings, found_environment, start)


if __name__ == "__main__":
    main()
