"""Reports of ``gpuaug.profile`` on the published experiments and a ResNet-50 step.

    python -m bench run profiles

Rows of a case: each part alone, the loops, and the figures of the whole loop. The verdict is in the settings. ``--timelines
FOLDER`` writes a picture and a trace of each case into the folder. Cases:

classifier, Kornia     the loop of the suite classifier, with eager Kornia as a stage
classifier, fused      the same with a fused stage
encoder-decoder        a frozen encoder as a captured stage
ResNet-50, fused       RandomResizedCrop, flip and ColorJitter in a fused stage, and a step of ResNet-50
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torchvision import models as vision

import gpuaug
from bench.data import loaders, models, pipelines, random_images
from bench.harness import flags, measurement
from bench.harness.console import console
from bench.harness.loops import Trainer, autocast_dtype, frozen
from gpuaug.benchkit.environment import environment

LoaderAndStep = tuple[gpuaug.StreamedLoader, Callable[[Any], object]]


def classifier(options: Namespace, batch_size: int, *, fused: bool) -> LoaderAndStep:
    device = options.device
    if fused:
        augment: Any = gpuaug.fuse(pipelines.heavy_kornia(options.size, cropping="slice"))
    else:
        augment = pipelines.ScaleAndTransform(pipelines.heavy_kornia(options.size)).to(device)
    train = Trainer(models.Classifier(random_images.CLASSES, options.width // 4).to(device), autocast=None)
    stage = gpuaug.TransformStage(augment, name="augment")
    return _streamed_loader(options, batch_size, random_images.RandomImages(options.size), stage), lambda batch: train(*batch)


def encoder_decoder(options: Namespace, batch_size: int) -> LoaderAndStep:
    device = options.device
    encoder = frozen(models.Encoder(options.width), device)
    train = Trainer(models.Decoder(random_images.CLASSES, options.width).to(device), autocast=autocast_dtype(device))
    stage = gpuaug.FeatureStage(encoder, autocast=autocast_dtype(device), name="encode")
    images = random_images.RandomImages(options.size, labels="pixel")
    return _streamed_loader(options, batch_size, images, stage), lambda batch: train(*batch)


def resnet(options: Namespace, batch_size: int) -> LoaderAndStep:
    device = options.device
    pipeline = pipelines.classification_kornia(options.size * 7 // 8, cropping="slice")
    fused = gpuaug.fuse(pipeline, dtype=autocast_dtype(device) or torch.float32, memory_format=torch.channels_last)
    model = vision.get_model(options.model, weights=None).to(device, memory_format=torch.channels_last)
    train = Trainer(model, autocast=autocast_dtype(device))
    stage = gpuaug.TransformStage(fused, name="augment")
    return _streamed_loader(options, batch_size, random_images.RandomImages(options.size), stage), lambda batch: train(*batch)


CASES: dict[str, Callable[[Namespace, int], LoaderAndStep]] = {
    "classifier, Kornia": partial(classifier, fused=False),
    "classifier, fused": partial(classifier, fused=True),
    "encoder-decoder": encoder_decoder,
    "ResNet-50, fused": resnet,
}


def _streamed_loader(options: Namespace, batch_size: int, dataset: Any, stage: gpuaug.Stage) -> gpuaug.StreamedLoader:
    return gpuaug.StreamedLoader(loaders.endless(dataset, batch_size, options), [stage], device=options.device)


def _shorten_paths(line: str) -> str:
    """Make paths in a text relative to ``sys.path``, so that the text is the same on every machine."""
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):
        line = line.replace(f" {folder.rstrip(os.sep)}{os.sep}", " ")
    return line


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("profiles", __doc__, batch="64", repeats=3)
    parser.add_argument(
        "--width",
        type=int,
        default=64,
        help="channels of the encoder's first level, four times the classifier's (default: %(default)s)",
    )
    parser.add_argument("--model", default="resnet50", help="a model of torchvision's (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=40, help="batches of a window (default: %(default)s)")
    parser.add_argument("--timelines", type=Path, metavar="FOLDER", help="write a picture and a trace of each case there")
    options = flags.parse(parser, argv)
    start = perf_counter()
    machine = environment(options.device)
    rows = []
    verdicts = {}
    for case, size in product(CASES, options.batch):
        torch.manual_seed(0)
        loader, step = CASES[case](options, size)
        with loader:
            report = gpuaug.profile(loader, step, batches=options.batches, rounds=options.repeats, show=False)
        console.print(f"\n{case}, batch size {size}", report, sep="\n")
        rows += [{"case": case, "batch_size": size} | row for row in report.rows()]
        verdicts[f"{case}, B={size}"] = [_shorten_paths(line) for line in report.verdict]
        if options.timelines is not None:
            name = f"timeline_{case}_{size}".lower().replace(", ", "_").replace("-", "_")
            for suffix in ("png", "json"):
                report.timeline.save(options.timelines / f"{name}.{suffix}")
        del loader, step, report
        measurement.release(options.device)
    return measurement.finish("profiles", options, rows, {"verdicts": verdicts}, machine, start)
