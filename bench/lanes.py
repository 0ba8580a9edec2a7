"""A picture of the lanes: the same loop serial and streamed, from a profile of a few steps.

    python -m bench run lanes
    python -m bench.lanes --draw bench/results/lanes.json

An encoder-decoder with a light augmentation and a frozen encoder as stages, fed with page-locked batches. The first
form profiles and writes the spans: when the host and each lane worked on which batch, in milliseconds. The second
draws them into docs/images, needs no GPU, and is also run by the first with --image. On a CPU the spans are the
host's own.
"""

import json
import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import gpuaug
from bench import common, data, models
from bench.loops import Trainer, frozen, half, under_autocast
from gpuaug.benchkit.environment import environment
from gpuaug.benchkit.windows import synchronize

LANES = ("host", "copy", "augment", "encode", "train")
IMAGE = Path("docs/images/lanes.png")

# Many more than are drawn, because a host that runs ahead launches the last step long before the device comes to it.
_BATCHES = 24
_FIRST, _LAST = 5, 10
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

    A kernel belongs to the range that its launch was in. Autograd launches from a thread of its own, where no range is
    open; what it launches belongs to the training step of that moment.
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
        # Every lane takes the batches in order, so the n-th range of a name is about the n-th batch.
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
    """Keep the steps in the middle, from the moment the first of them began to be trained."""
    start = min(span["start_ms"] for span in made if span["lane"] == "train" and span["batch"] == _FIRST)
    end = max(span["end_ms"] for span in made if span["lane"] == "train" and span["batch"] == _LAST)
    kept = [span for span in made if span["end_ms"] > start and span["start_ms"] < end]
    for span in kept:
        span["start_ms"] = round(max(0.0, span["start_ms"] - start), 4)
        span["end_ms"] = round(min(end, span["end_ms"]) - start, 4)
    return sorted(kept, key=lambda span: (LANES.index(span["lane"]), span["start_ms"]))


def profiled(epoch: Callable[[], None], device: torch.device) -> list[dict[str, Any]]:
    """Spans of one epoch; another runs first, so that captures and warm-up are over."""
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


def epochs(options: Namespace) -> dict[str, Callable[[], None]]:
    """One epoch of each form of the loop, with the ranges that ``spans`` looks for."""
    device, (batch_size, *_) = options.device, options.batch
    batches = data.sample(data.RandomImages(options.size, labels="pixel"), batch_size, 4, device, pin=True)
    batches = batches * (_BATCHES // 4)
    augment = models.Augment().to(device)
    encoder = frozen(models.Encoder(options.width), device)
    encode = under_autocast(encoder, device)
    train = Trainer(models.Decoder(data.CLASSES, options.width).to(device), autocast=half(device))

    def serial() -> None:
        for images, labels in batches:
            with record_function("copy"):
                images, labels = (part.to(device, non_blocking=True) for part in (images, labels))
            with torch.no_grad():
                with record_function("augment"):
                    images = augment(images)
                with record_function("encode"):
                    images = encode(images)
            with record_function("train"):
                train(images, labels)

    stages = [
        gpuaug.TransformStage(augment, name="augment"),
        gpuaug.FeatureStage(encoder, autocast=half(device), name="encode"),
    ]
    loader = gpuaug.StreamedLoader(batches, stages, device=device, depth=common.DEPTH)

    def streamed() -> None:
        iterator = iter(loader)
        for _ in range(_BATCHES):
            with record_function("next"):
                images, labels = next(iterator)
            with record_function("train"):
                train(images, labels)

    return {"serial": serial, "streamed": streamed}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw a result of this experiment as two timelines over the same milliseconds, a colour for each batch."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row["case"] for row in result["rows"]))
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    axes = figure.subplots(len(cases), 1, sharex=True, squeeze=False)[:, 0]
    end = max(row["end_ms"] for row in result["rows"])
    for axis, case in zip(axes, cases, strict=True):
        for row in result["rows"]:
            if row["case"] != case:
                continue
            width = row["end_ms"] - row["start_ms"]
            height = LANES.index(row["lane"])
            colour = colormaps["tab10"](row["batch"] % 10)
            # On the host, waiting for a batch is paler than launching the step.
            pale = row["lane"] == "host" and row["name"] == "next"
            axis.barh(height, width, left=row["start_ms"], height=0.8, color=colour, alpha=0.45 if pale else 0.9)
            if width > end / 60:
                middle = row["start_ms"] + width / 2
                axis.text(middle, height, str(row["batch"]), ha="center", va="center", fontsize=7, color="white")
        axis.set_yticks(range(len(LANES)), LANES)
        axis.invert_yaxis()
        axis.set_title(case, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(f"ms; {_LAST - _FIRST + 1} steps of each loop, a colour and a number for each batch")
    gpu = result["environment"]["gpu"]
    batch_size = result["settings"]["batch"][0]
    figure.suptitle(f"A training loop and its lanes, B={batch_size}, {gpu['name'] if gpu else 'CPU'}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = common.parser(__doc__, batch="32", seconds=0.0, repeats=1)
    parser.add_argument("--width", type=int, default=64, help="channels of the first level (default: %(default)s)")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="measure nothing, draw what was written before")
    parser.add_argument("--image", type=Path, nargs="?", const=IMAGE, help=f"draw there (default: {IMAGE})")
    options = common.read(parser, argv)
    drawn, image = options.draw, options.image
    del options.draw, options.image
    if drawn is not None:
        result = json.loads(drawn.read_text(encoding="utf-8"))
        draw(result, image or IMAGE)
        return result
    found_environment, start = environment(options.device), perf_counter()
    rows = [{"case": case, **span} for case, epoch in epochs(options).items() for span in profiled(epoch, options.device)]
    result = common.finish("lanes", options, rows, {"batches": _BATCHES}, found_environment, start)
    if image is not None:
        draw(result, image)
    return result


if __name__ == "__main__":
    main()
