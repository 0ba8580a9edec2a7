"""Measurements of one part of a training loop: its time, its work on the device, and its host synchronisations.

The *host* is the CPU, where a thread calls the part. A *launch* is a call by which this thread queues a kernel, a copy or a
CUDA graph on the device.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from gpuaug.core.devices import host_waits, synchronize
from gpuaug.core.streams import Lanes

Work = Callable[[], Any]
"""Function that queues the work of one batch on the device."""

_LINK_BYTES = 64_000_000  # size of a copy that measures the bandwidth from host to device
_LINK_COPIES = 12  # number of these copies
_TRACED_CALLS = 3  # number of calls that torch.profiler traces


def figure_text(value: float) -> str:
    """Return a number as text: with three significant digits below 1000, else as an integer."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of several measurements, in milliseconds per batch.

    A measurement is the mean over consecutive batches (a window), or the time of one call on the host. Single batches may
    differ more than windows.
    """

    median: float
    """Median, in milliseconds per batch."""
    low: float
    """Fastest measurement, in milliseconds per batch."""
    high: float
    """Slowest measurement, in milliseconds per batch."""

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Return the spread of one or more measurements, in milliseconds."""
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{figure_text(self.median)} ({figure_text(self.low)}-{figure_text(self.high)})"


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """Work of one call on a GPU, as recorded by ``torch.profiler``."""

    busy_ms: float
    """Time in which the device is busy, in milliseconds, without gaps between kernels."""
    launches: int
    """Number of launches by the host: kernels, copies, graphs."""


def time_alone(work: Work, device: torch.device, repeats: int) -> tuple[Spread, Spread]:
    """Time repeated calls of ``work``, with nothing else running.

    Args:
        work: Function to call.
        device: Device on which the function queues its work.
        repeats: Number of calls that are timed one by one for the host time, and number of successive calls in each of three
            measurements of the wall time.

    Returns:
        (wall time, host time), per call. Wall time: of successive calls, until the device has finished all of them. Host time:
        until a call returns that began on an idle device. On a CPU, both are the time of a single call.
    """
    host_ms = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        work()
        host_ms.append((time.perf_counter() - start) * 1e3)
    if device.type == "cpu":
        return Spread.of(host_ms), Spread.of(host_ms)
    walls_ms = []
    for _ in range(3):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronize(device)
        walls_ms.append((time.perf_counter() - start) * 1e3 / repeats)
    return Spread.of(walls_ms), Spread.of(host_ms)


def trace_device_work(work: Work, device: torch.device) -> DeviceWork | None:
    """Return the device's work for one call; ``None`` if the device is not a GPU, or if another profiler is running."""
    if device.type != "cuda" or torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return None
    synchronize(device)
    # acc_events=True: torch does not warn that it clears the events of earlier cycles, which do not exist here.
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(_TRACED_CALLS):
            work()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text())["traceEvents"], _TRACED_CALLS)


def can_trace(device: torch.device) -> bool:
    """Return whether ``torch.profiler`` can trace the device. Another profiler or settings of the driver may prevent it."""
    device_work = trace_device_work(lambda: torch.ones(1, device=device), device)
    return device_work is not None and device_work.busy_ms > 0


def read_trace(events: list[dict[str, Any]], calls: int) -> DeviceWork:
    """Return the device's work per call.

    Args:
        events: ``"traceEvents"`` of a Chrome trace of ``torch.profiler``. Their times are in microseconds.
        calls: Number of calls in the trace.
    """
    busy_us = 0.0
    end = 0.0  # latest end of the events so far. Time in which several events overlap is counted once
    categories = {"kernel", "gpu_memcpy", "gpu_memset"}
    for event in sorted((event for event in events if event.get("cat") in categories), key=lambda event: float(event["ts"])):
        event_end = event["ts"] + event["dur"]
        busy_us += max(0.0, event_end - max(end, event["ts"]))
        end = max(end, event_end)
    # Names of launches: cudaLaunchKernel, cudaGraphLaunch, cudaMemcpyAsync …
    launches = sum(
        event.get("cat") in {"cuda_runtime", "cuda_driver"} and any(word in event["name"] for word in ("Launch", "Async"))
        for event in events
    )
    return DeviceWork(busy_us / 1e3 / calls, round(launches / calls))


def waits_at(work: Work, device: torch.device) -> str | None:
    """Return ``file:line`` of the user's code at which ``work`` first makes the host wait for a GPU; ``None`` without a wait.

    Explicit waits for an event or a stream are not detected.
    """
    if device.type != "cuda":
        return None
    with host_waits() as lines:
        work()
    return lines[0] if lines else None


def link_gb_per_s(lanes: Lanes) -> float | None:
    """Return the bandwidth of copies from page-locked memory to the GPU, in GB/s; ``None`` without a GPU.

    Copies of 64 MB run on the copy lane, the CUDA stream on which the loader copies batches.
    """
    if lanes.in_line:  # the device has no CUDA streams
        return None
    source = torch.zeros(_LINK_BYTES, dtype=torch.uint8, device="cpu").pin_memory()
    consumer = lanes.consumer()  # the current stream, which ``launching`` makes current again
    event_pairs = []  # (event before a copy, event after it)
    with lanes.launching(consumer):
        lanes.copy.make_current()
        target = torch.empty_like(source, device=lanes.device)
        for _ in range(_LINK_COPIES):
            first = lanes.copy.record_event(timed=True)
            target.copy_(source, non_blocking=True)
            event_pairs.append((first, lanes.copy.record_event(timed=True)))
    synchronize(lanes.device)
    return _LINK_BYTES / median(first.elapsed_time(last) for first, last in event_pairs) / 1e6
