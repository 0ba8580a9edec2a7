"""When a GPU trains and when it waits: files into a ResNet-50, by DataLoader workers that decode, and by this library.

    python -m bench run waits
    python -m bench waits --photographs DIR --image
    python -m bench waits --draw bench/results/waits.json

Loops, over the files of a case of the suite ``files`` (default: plain/resnet50):

DataLoader, workers decode       DataLoader workers decode by torchvision and augment by v2, then a copy
StreamedLoader, workers read     read_encoded, collate_encoded, DecodeStage and gpuaug.fuse

A row is one training step: its start and its end on the device, in milliseconds from the start of the window's first step.
Between two steps the device waits for a batch. The settings have the images per second of each loop in its window, and the
share of the window in which the device trained. ``--image`` draws the result into docs/images; ``--draw`` draws an earlier
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


def step_times(batches: Batches, step: Callable[..., object], *, warm: int, seconds: float, device: torch.device) -> list[Any]:
    """(start in ms, end in ms, number of images) of each training step of a window, after ``warm`` steps."""
    for _ in range(warm):
        step(*next(batches))
    synchronize(device)
    moments = []
    began = perf_counter()
    while perf_counter() < began + seconds:
        images, labels = next(batches)
        start = _now(device)
        step(images, labels)
        moments.append((start, _now(device), len(labels)))
        del images
    synchronize(device)
    first = moments[0][0]
    return [(_ms_between(first, start), _ms_between(first, end), count) for start, end, count in moments]


def _now(device: torch.device) -> Any:
    """A moment on the device's current stream; on a CPU, the clock's time in seconds."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms_between(start: Any, end: Any) -> float:
    elapsed = 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)
    return float(round(elapsed, 3))


def measure(options: Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of both loops, and the rate and busy share of each."""
    case = file_cases.make(options.case, options.batch[0], options)
    reading = min(_READING_WORKERS, options.cores[0])
    loops = {
        f"DataLoader, {options.cores[0]} workers decode": (TORCHVISION, options.cores[0]),
        f"StreamedLoader, {reading} workers read": (OURS, reading),
    }
    rows: list[dict[str, Any]] = []
    loop_figures: dict[str, Any] = {}
    for name, (row, workers) in loops.items():
        torch.manual_seed(0)
        with ExitStack() as stack:
            batches = LOADERS[row].open(case.files, stack, workers=workers)
            # Workers begin together, and their first batches arrive together: the loop is steady only after several of each.
            warm = _WARM_STEPS_PER_WORKER * max(workers, 1)
            steps = step_times(batches, case.step, warm=warm, seconds=options.seconds, device=options.device)
            del batches
        measurement.release(options.device)
        window_ms = steps[-1][1]
        loop_figures[name] = {
            "images_per_s": 1e3 * sum(count for *_, count in steps) / window_ms,
            "busy": sum(end - start for start, end, _ in steps) / window_ms,
        }
        for number, (began_ms, ended_ms, _) in enumerate(steps):
            rows.append({"case": name, "name": "step", "step": number, "start_ms": began_ms, "end_ms": ended_ms})
    return rows, {"loops": loop_figures, "files": case.title, "model": file_cases.kind(options.case).loop}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("waits", __doc__, batch="256", size=224, seconds=3.0, repeats=1, spare=0)
    parser.add_argument(
        "--case", default="plain/resnet50", help="files and model, as in the suite files (default: %(default)s)"
    )
    parser.add_argument("--photographs", type=Path, metavar="DIR", help="for plain and web (default: of installed packages)")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="measure nothing, draw an earlier result")
    usual = step_timeline.IMAGE
    parser.add_argument("--image", type=Path, nargs="?", const=usual, help=f"draw there (default: {usual})")
    options = flags.parse(parser, argv)
    drawn = options.draw
    image = options.image
    del options.draw, options.image
    if drawn is not None:
        earlier: dict[str, Any] = json.loads(drawn.read_text(encoding="utf-8"))
        step_timeline.draw(earlier, image or step_timeline.IMAGE)
        return earlier
    options.cores = (options.workers,)
    options.rate = None
    options.data = None
    options.workers = ()
    start = perf_counter()
    measured_on = environment(options.device)
    rows, settings = measure(options)
    result = measurement.finish("waits", options, rows, settings, measured_on, start)
    if image is not None:
        step_timeline.draw(result, image)
    return result
