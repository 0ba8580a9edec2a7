"""Time of single operations: a ``next``, a call on the GPU, its kernels, a copy."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpuaug.benchkit.windows import synchronize

# Assumes a clock of at most 2 GHz. A sleep that is too short is detected and doubled.
_CYCLES_PER_MS = 2_000_000
# Well below the number of launches in a stream's queue at which the host waits.
_QUEUED_LAUNCHES = 512
_COPIED_BYTES = 1 << 29
_LINK_BYTES, _LINK_COPIES = 64_000_000, 20


def time_next(batches: Iterator[Any], calls: int, device: torch.device, pause_s: float) -> list[float]:
    """Measure ``calls`` calls of ``next``, with a pause of ``pause_s`` before each. Returns the microseconds of each."""
    times_us = []
    for _ in range(calls):
        synchronize(device)
        if pause_s:
            time.sleep(pause_s)
        start = time.perf_counter()
        batch = next(batches)
        times_us.append(1e6 * (time.perf_counter() - start))
        del batch
    return times_us


def launched_kernels(call: Callable[[], Any], calls: int) -> list[dict[str, Any]]:
    """Return the trace events of the kernels of ``calls`` calls, in the order of their start, without copies and fills."""
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
    """Return the GPU milliseconds of one call, or ``None`` if the call waits for the GPU.

    Events around one call on an idle GPU would time the host, which launches kernels more slowly than the GPU executes them. So
    calls are queued behind a sleeping kernel. A measurement counts only if all calls were queued before that kernel ended.

    Args:
        call: Function that works on the current stream.
        launches: Approximate number of kernels of a call, which limits the number of calls that are queued.
        host_ms: Approximate host time of a call in milliseconds. The GPU sleeps longer than that.
    """
    calls = max(1, min(16, int(_QUEUED_LAUNCHES / max(1.0, launches))))
    sleep_factor = 1
    times_ms: list[float] = []
    while len(times_ms) < 3:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(int(_CYCLES_PER_MS * sleep_factor * (1 + 2 * host_ms * calls)))
        start.record()
        for _ in range(calls):
            call()
        sleep_ended = start.query()
        end.record()
        torch.cuda.synchronize()
        if not sleep_ended:
            times_ms.append(start.elapsed_time(end) / calls)
        elif calls > 1:
            # Queued calls hold their memory, and further allocations may wait for the GPU. Try with fewer calls.
            calls //= 2
        elif sleep_factor < 4:
            sleep_factor *= 2
        else:
            break
    return median(times_ms) if times_ms else None


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a copy within the device reads plus writes."""
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = gpu_ms(lambda: target.copy_(source), launches=1, host_ms=0.1)
    assert copy_ms is not None, "a copy on the device does not wait"
    return 2 * _COPIED_BYTES / (copy_ms / 1e3)


def link_gb_per_s(device: torch.device) -> float:
    """Return the GB per second of single copies of 64 MB from page-locked memory to an idle device."""
    source = torch.zeros(_LINK_BYTES, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device=device)
    times_ms = []
    for _ in range(_LINK_COPIES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    return _LINK_BYTES / median(times_ms) / 1e6
