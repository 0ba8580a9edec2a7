"""Start and end of the work on each batch in each lane, from a profiler's trace."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpuaug.benchkit.windows import synchronize

LANES = ("host", "copy", "augment", "encode", "train")
"""Lanes of the picture, from top to bottom."""

FIRST_STEP, LAST_STEP = 5, 10
"""The first and the last step that is kept."""

# Names of profiler ranges, and the lane whose work is launched inside them.
_RANGES = {
    "copy": "copy",
    "augment": "augment",
    "encode": "encode",
    "train": "train",
    "gpuaug/copy": "copy",
    "gpuaug/stage/augment": "augment",
    "gpuaug/stage/encode": "encode",
}


def spans(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reduce a Chrome trace to one span for each batch and lane.

    A kernel belongs to the range that contains its launch. Autograd launches kernels from a thread of its own, without ranges:
    these kernels belong to the training step that contains the launch in time.
    """
    ranges: list[dict[str, Any]] = []
    launches: dict[int, dict[str, Any]] = {}
    work: list[dict[str, Any]] = []
    for event in events:
        category = event.get("cat")
        if category == "user_annotation" and event["name"] in {*_RANGES, "next"}:
            ranges.append(event)
        elif category in {"cuda_runtime", "cuda_driver"}:
            launches[event["args"].get("correlation")] = event
        elif category in {"kernel", "gpu_memcpy", "gpu_memset"}:
            work.append(event)
    counts: dict[str, int] = defaultdict(int)
    for found in sorted(ranges, key=lambda event: event["ts"]):
        # Every lane takes the batches in order, so the n-th range of a name belongs to the n-th batch.
        found["batch"] = counts[found["name"]]
        counts[found["name"]] += 1

    busy: dict[tuple[str, int, int], list[float]] = {}
    for event in work:
        launch = launches.get(event["args"].get("correlation"))
        owner = None if launch is None else _owner(launch, ranges)
        if owner is not None:
            key = (_RANGES[owner["name"]], owner["batch"], event["args"].get("stream", 0))
            start, end = busy.setdefault(key, [float("inf"), 0.0])
            busy[key] = [min(start, event["ts"]), max(end, event["ts"] + event["dur"])]
    made = [_span(lane, batch, stream, *times) for (lane, batch, stream), times in busy.items()]
    if not made:
        made = [
            _span(_RANGES[found["name"]], found["batch"], 0, found["ts"], found["ts"] + found["dur"])
            for found in ranges
            if found["name"] in _RANGES
        ]
    made += [
        _span("host", found["batch"], 0, found["ts"], found["ts"] + found["dur"], name=found["name"])
        for found in ranges
        if found["name"] in {"next", "train"}
    ]
    return _cut(made)


def _owner(launch: dict[str, Any], ranges: list[dict[str, Any]]) -> dict[str, Any] | None:
    around = [found for found in ranges if found["ts"] <= launch["ts"] <= found["ts"] + found["dur"]]
    own = [found for found in around if found["tid"] == launch["tid"]]
    found = max(own or [other for other in around if other["name"] == "train"], key=lambda one: one["ts"], default=None)
    return found if found is not None and found["name"] in _RANGES else None


def _span(lane: str, batch: int, stream: int, start: float, end: float, name: str | None = None) -> dict[str, Any]:
    return {
        "name": name or lane,
        "lane": lane,
        "batch": batch,
        "stream": stream,
        "start_ms": start / 1e3,
        "end_ms": end / 1e3,
    }


def _cut(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The spans from the start of ``FIRST_STEP``'s training to the end of ``LAST_STEP``'s, in ms from that start."""
    start = min(span["start_ms"] for span in made if span["lane"] == "train" and span["batch"] == FIRST_STEP)
    end = max(span["end_ms"] for span in made if span["lane"] == "train" and span["batch"] == LAST_STEP)
    kept = [span for span in made if span["end_ms"] > start and span["start_ms"] < end]
    for span in kept:
        span["start_ms"] = round(max(0.0, span["start_ms"] - start), 4)
        span["end_ms"] = round(min(end, span["end_ms"]) - start, 4)
    return sorted(kept, key=lambda span: (LANES.index(span["lane"]), span["start_ms"]))


def profiled(epoch: Callable[[], None], device: torch.device) -> list[dict[str, Any]]:
    """Spans of one epoch, after another one for captures and warm-up."""
    epoch()
    synchronize(device)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities, acc_events=True) as profiler:
        epoch()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return spans(json.loads(path.read_text())["traceEvents"])
