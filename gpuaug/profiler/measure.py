"""Measurements of one piece of work: its time alone, its work on the device, and its host synchronisations."""

import json
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from gpuaug.core.streams import Lanes, ms_between

Work = Callable[[], Any]
"""Queues one batch's work on the device."""

_LINK_BYTES, _LINK_COPIES = 64_000_000, 12
_PROFILED = 3
_PACKAGES = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))
_NOT_THE_USERS = (*_PACKAGES, warnings.__file__, "<")


def figure(value: float) -> str:
    """Three digits of a figure, for people."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of several measurements, in milliseconds a batch.

    A measurement is a window's mean over its batches, or one call of a part on the host: not the spread of single batches.
    """

    median: float
    """The middle measurement, in milliseconds a batch."""
    low: float
    """The fastest measurement."""
    high: float
    """The slowest measurement."""

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """From one value or more."""
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{figure(self.median)} ({figure(self.low)}-{figure(self.high)})"


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Work on a GPU, as ``torch.profiler`` sees it."""

    busy_ms: float
    """Milliseconds in which the device is busy with it, without gaps between kernels."""
    launches: int
    """Launches by the host: kernels, copies, graphs."""


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def alone(work: Work, device: torch.device, repeats: int) -> tuple[Spread, Spread]:
    """(wall, host) of repeated calls: time from one call to the next, and the host's time to queue one on an idle device."""
    host = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        work()
        host.append((time.perf_counter() - start) * 1e3)
    if device.type == "cpu":
        return Spread.of(host), Spread.of(host)
    walls = []
    for _ in range(3):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronize(device)
        walls.append((time.perf_counter() - start) * 1e3 / repeats)
    return Spread.of(walls), Spread.of(host)


def on_device(work: Work, device: torch.device) -> OnDevice | None:
    """Work of one call on a GPU; ``None`` elsewhere, or if another profiler is running."""
    if device.type != "cuda" or torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return None
    synchronize(device)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(_PROFILED):
            work()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text())["traceEvents"], _PROFILED)


def can_look(device: torch.device) -> bool:
    """Whether ``torch.profiler`` sees the device's work. Another profiler, or the driver's settings, may prevent it."""
    did = on_device(lambda: torch.ones(1, device=device), device)
    return did is not None and did.busy_ms > 0


def read_trace(events: list[dict[str, Any]], calls: int) -> OnDevice:
    """The device's work for one of ``calls`` calls, from the events of a Chrome trace."""
    busy_us, end = 0.0, 0.0
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    for event in sorted((event for event in events if event.get("cat") in kinds), key=lambda event: float(event["ts"])):
        last = event["ts"] + event["dur"]
        busy_us += max(0.0, last - max(end, event["ts"]))
        end = max(end, last)
    launches = sum(
        event.get("cat") in {"cuda_runtime", "cuda_driver"} and any(kind in event["name"] for kind in ("Launch", "Async"))
        for event in events
    )
    return OnDevice(busy_us / 1e3 / calls, round(launches / calls))


def waits_at(work: Work, device: torch.device) -> str | None:
    """First line of the user's code, ``file:line``, at which a call makes the host wait for a GPU; ``None`` without one.

    Explicit waits for an event or a stream cannot be seen.
    """
    if device.type != "cuda":
        return None
    found: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("warn")  # which itself warns, that it is a prototype
        warnings.filterwarnings("always", message="called a synchronizing CUDA operation")
        # Called in the middle of the operation that waits, so the stack says whose it is.
        warnings.showwarning = lambda *_args, **_kwargs: found.append(place(traceback.extract_stack()[:-1]))
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return found[0] if found else None


def place(stack: Sequence[traceback.FrameSummary]) -> str:
    """``file:line`` of the innermost code in a stack that is neither torch's nor this package's."""
    outside = [frame for frame in stack if not frame.filename.startswith(_NOT_THE_USERS)]
    found = (outside or stack)[-1]
    return f"{found.filename}:{found.lineno}"


def link_gb_per_s(lanes: Lanes) -> float | None:
    """GB/s of 64 MB copies from page-locked memory, alone on the copy lane; ``None`` without a GPU."""
    if lanes.in_line:
        return None
    source = torch.zeros(_LINK_BYTES, dtype=torch.uint8).pin_memory()
    consumer = lanes.consumer()
    pairs = []
    with lanes.launching(consumer):
        lanes.copy.make_current()
        target = torch.empty_like(source, device=lanes.device)
        for _ in range(_LINK_COPIES):
            first = lanes.copy.record_event(timed=True)
            target.copy_(source, non_blocking=True)
            pairs.append((first, lanes.copy.record_event(timed=True)))
    synchronize(lanes.device)
    return _LINK_BYTES / median(ms_between(*pair) for pair in pairs) / 1e6
