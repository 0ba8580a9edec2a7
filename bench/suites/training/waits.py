"""Times at which a GPU trains and waits: files into a ResNet-50, decoded by DataLoader workers, or by gpuaug.

    python -m bench run waits
    python -m bench waits --photographs DIR --image
    python -m bench waits --draw bench/results/waits.json

Loops over the files of a case of the suite ``files`` (default: plain/resnet50):

DataLoader, workers decode       DataLoader workers decode by torchvision and augment by v2, then a copy
StreamedLoader, workers read     read_encoded, collate_encoded, DecodeStage and gpuaug.fuse

A row is one training step: its start and end on the device, in milliseconds since the start of the first step in the window.
Between two steps the device waits for a batch. The settings have, for each loop, the images per second in the window and the
share of the window in which the device trained. ``--image`` draws the result into docs/images; ``--draw`` draws a stored
result, and needs no GPU.
"""

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench.figures import step_timeline
from bench.harness import flags, measurement
from bench.peers import file_cases
from bench.peers.file_loaders import LOADERS, OURS, TORCHVISION, Batches
from gpuaug.benchkit.environment import environment
from gpuaug.benchkit.windows import synchronize

_READING_WORKERS = 4
_WARM_STEPS_PER_WORKER = 4


def step_times(
    batches: Batches, step: Callable[..., object], *, warm_steps: int, seconds: float, device: torch.device
) -> list[Any]:
    """Return (start in ms, end in ms, number of images) of each training step in a window, after ``warm_steps`` steps."""
    for _ in range(warm_steps):
        step(*next(batches))
    synchronize(device)
    steps = []
    window_start = perf_counter()
    while perf_counter() < window_start + seconds:
        images, labels = next(batches)
        start = _record_time(device)
        step(images, labels)
        steps.append((start, _record_time(device), len(labels)))
        del images
    synchronize(device)
    first_start = steps[0][0]
    return [(_ms_between(first_start, start), _ms_between(first_start, end), count) for start, end, count in steps]


def _record_time(device: torch.device) -> Any:
    """Record an event on the current stream, and return it. On a CPU, return the time in seconds."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms_between(start: Any, end: Any) -> float:
    elapsed = 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)
    return float(round(elapsed, 3))


def measure(options: Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows of both loops, and settings with rate and busy share of each loop."""
    case = file_cases.make(options.case, options.batch[0], options)
    reading_workers = min(_READING_WORKERS, options.cores[0])
    loops = {
        f"DataLoader, {options.cores[0]} workers decode": (TORCHVISION, options.cores[0]),
        f"StreamedLoader, {reading_workers} workers read": (OURS, reading_workers),
    }
    rows: list[dict[str, Any]] = []
    loop_figures: dict[str, Any] = {}
    for name, (row, workers) in loops.items():
        torch.manual_seed(0)
        with ExitStack() as stack:
            batches = LOADERS[row].open(case.files, stack, workers=workers)
            # Workers start at the same time, so that their first batches arrive together. After several batches per worker the
            # loop is steady.
            warm_steps = _WARM_STEPS_PER_WORKER * max(workers, 1)
            steps = step_times(batches, case.step, warm_steps=warm_steps, seconds=options.seconds, device=options.device)
            del batches
        measurement.release(options.device)
        window_ms = steps[-1][1]
        loop_figures[name] = {
            "images_per_s": 1e3 * sum(count for *_, count in steps) / window_ms,
            "busy": sum(end - start for start, end, _ in steps) / window_ms,
        }
        for number, (start_ms, end_ms, _) in enumerate(steps):
            rows.append({"case": name, "name": "step", "step": number, "start_ms": start_ms, "end_ms": end_ms})
    return rows, {"loops": loop_figures, "files": case.title, "model": file_cases.parse_name(options.case).loop}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("waits", __doc__, batch="256", size=224, seconds=3.0, repeats=1, spare=0)
    parser.add_argument(
        "--case", default="plain/resnet50", help="files and model, as in the suite files (default: %(default)s)"
    )
    parser.add_argument("--photographs", type=Path, metavar="DIR", help="for plain and web (default: of installed packages)")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="draw a stored result, and measure nothing")
    default_image = step_timeline.IMAGE
    parser.add_argument("--image", type=Path, nargs="?", const=default_image, help=f"draw there (default: {default_image})")
    options = flags.parse(parser, argv)
    stored_result = options.draw
    image = options.image
    del options.draw, options.image
    if stored_result is not None:
        result: dict[str, Any] = json.loads(stored_result.read_text(encoding="utf-8"))
        step_timeline.draw(result, image or step_timeline.IMAGE)
        return result
    options.cores = (options.workers,)
    options.rate = None
    options.data = None
    options.workers = ()
    start = perf_counter()
    machine = environment(options.device)
    rows, settings = measure(options)
    result = measurement.finish("waits", options, rows, settings, machine, start)
    if image is not None:
        step_timeline.draw(result, image)
    return result
