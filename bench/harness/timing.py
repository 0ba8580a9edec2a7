"""Time of one operation: a ``next``, a call on the GPU, each kernel of it, a copy."""

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

# For a clock of at most 2 GHz. A sleep that is too short is detected and doubled.
_CYCLES_PER_MS = 2_000_000
# Well below the number of launches that fit into a stream's queue before the host waits.
_QUEUED_LAUNCHES = 512
_COPIED_BYTES = 1 << 29
_LINK_BYTES, _LINK_COPIES = 64_000_000, 20


def time_next(batches: Iterator[Any], calls: int, device: torch.device, pause_s: float) -> list[float]:
    """Microseconds of each of ``calls`` calls of ``next``, without the time between them."""
    taken = []
    for _ in range(calls):
        synchronize(device)
        if pause_s:
            time.sleep(pause_s)
        start = time.perf_counter()
        batch = next(batches)
        taken.append(1e6 * (time.perf_counter() - start))
        del batch
    return taken


def launched_kernels(call: Callable[[], Any], calls: int) -> list[dict[str, Any]]:
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
    """GPU milliseconds of one call, or ``None`` if the call waits for the GPU.

    Events around one call on an idle GPU would time the host, which launches more slowly than the GPU works. So calls are
    queued behind a sleeping kernel. A measurement counts only if all calls were queued before that kernel ended.

    Args:
        call: Works on the current stream.
        launches: Approximate number of kernels of a call; bounds the number of calls that are queued.
        host_ms: Approximate host time of a call; the GPU sleeps longer than that.
    """
    calls = max(1, min(16, int(_QUEUED_LAUNCHES / max(1.0, launches))))
    patience = 1
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
            # Queued calls hold their memory, and allocating more may wait for the GPU: try with fewer calls.
            calls //= 2
        elif patience < 4:
            patience *= 2
        else:
            break
    return median(found) if found else None


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy on the device reads plus writes."""
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    taken_ms = gpu_ms(lambda: target.copy_(source), launches=1, host_ms=0.1)
    assert taken_ms is not None, "a copy on the device does not wait"
    return 2 * _COPIED_BYTES / (taken_ms / 1e3)


def link_gb_per_s(device: torch.device) -> float:
    """GB per second of single copies of 64 MB from page-locked memory to an idle device."""
    source = torch.zeros(_LINK_BYTES, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device=device)
    found = []
    for _ in range(_LINK_COPIES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return _LINK_BYTES / median(found) / 1e6
