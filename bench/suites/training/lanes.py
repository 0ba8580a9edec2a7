"""A picture of the lanes: the same loop serial and streamed, from a profile of a few steps.

    python -m bench run lanes
    python -m bench lanes --draw bench/results/lanes.json

An encoder-decoder with a light augmentation and a frozen encoder as stages, fed with page-locked batches. The first form
profiles and writes the spans: start and end of the work on each batch, on the host and on each lane, in milliseconds. The
second draws them into docs/images, needs no GPU, and is also run by the first with --image. On a CPU the spans are the host's
own.
"""

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import record_function

import gpuaug
from bench.data import loaders, models, random_images
from bench.figures import lane_timeline
from bench.harness import flags, lane_spans, measurement
from bench.harness.loops import Trainer, frozen, half, under_autocast
from gpuaug.benchkit.environment import environment

# Many more steps than are drawn: a host that runs ahead launches the last step long before the device reaches it.
_BATCHES = 24


def epochs(options: Namespace) -> dict[str, Callable[[], None]]:
    """One epoch of each form of the loop, with the ranges that ``spans`` looks for."""
    device, (batch_size, *_) = options.device, options.batch
    batches = loaders.sample(random_images.RandomImages(options.size, labels="pixel"), batch_size, 4, device, pin=True)
    batches = batches * (_BATCHES // 4)
    augment = models.LightAugmentation().to(device)
    encoder = frozen(models.Encoder(options.width), device)
    encode = under_autocast(encoder, device)
    train = Trainer(models.Decoder(random_images.CLASSES, options.width).to(device), autocast=half(device))

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
    loader = gpuaug.StreamedLoader(batches, stages, device=device, depth=loaders.DEPTH)

    def streamed() -> None:
        iterator = iter(loader)
        for _ in range(_BATCHES):
            with record_function("next"):
                images, labels = next(iterator)
            with record_function("train"):
                train(images, labels)

    return {"serial": serial, "streamed": streamed}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("lanes", __doc__, batch="32", seconds=0.0, repeats=1)
    parser.add_argument("--width", type=int, default=64, help="channels of the first level (default: %(default)s)")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="measure nothing, draw what was written before")
    parser.add_argument(
        "--image", type=Path, nargs="?", const=lane_timeline.IMAGE, help=f"draw there (default: {lane_timeline.IMAGE})"
    )
    options = flags.read(parser, argv)
    drawn, image = options.draw, options.image
    del options.draw, options.image
    if drawn is not None:
        result = json.loads(drawn.read_text(encoding="utf-8"))
        lane_timeline.draw(result, image or lane_timeline.IMAGE)
        return result
    found_environment = environment(options.device)
    start = perf_counter()
    rows = [
        {"case": case, **span} for case, epoch in epochs(options).items() for span in lane_spans.profiled(epoch, options.device)
    ]
    result = measurement.finish("lanes", options, rows, {"batches": _BATCHES}, found_environment, start)
    if image is not None:
        lane_timeline.draw(result, image)
    return result
