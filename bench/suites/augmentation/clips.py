"""Clips: one draw for each clip, against the same pipeline on as many images, and against torchvision called for each clip.

    python -m bench run clips

Random uint8 clips of 16 frames of 256 x 256 on the card, to 224 x 224 in bfloat16, nothing else in the loop. Cases:

VideoMAE    its multi-scale crop (sides of 66 to 100 %, as RandomResizedCrop), HorizontalFlip, Normalize
V-JEPA 2    RandomResizedCrop (30 to 100 % of the area), HorizontalFlip, AutoAugment, Normalize, RandomErasing for 25 %

Rows:

torchvision v2, clip by clip    its pipeline on the card, called once for each clip (some of the clips, since it is slow)
gpuaug, images                  gpuaug.fuse on the frames of all clips as a batch of images, each with a draw of its own
gpuaug, clips                   gpuaug.fuse on the clips, each with one draw

Rates are in images, which are frames. ``host_ms`` is the calling thread's time for a batch with an idle card, and ``gpu_ms``
the card's time alone.
"""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torchvision.transforms import v2

import gpuaug
from bench.data import pipelines
from bench.harness import call_rows, flags, measurement
from bench.harness.optional_rows import OptionalRow

CASES = ("VideoMAE", "V-JEPA 2")
TORCHVISION = "torchvision v2, clip by clip"
_TORCHVISION_CLIPS = 4
_SHARE = 7 / 8
"""Side of the crops over the side of the clips."""


def pipeline(case: str, size: int) -> nn.Module:
    """The recipe in torchvision, for clips of ``size`` pixels a side."""
    side = round(_SHARE * size)
    ending = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(pipelines.MEAN, pipelines.STD)]
    if case == "VideoMAE":
        return v2.Compose([v2.RandomResizedCrop(side, scale=(0.66**2, 1.0)), v2.RandomHorizontalFlip(), *ending])
    crop = v2.RandomResizedCrop(side, scale=(0.3, 1.0), ratio=(0.75, 1.35))
    return v2.Compose([crop, v2.RandomHorizontalFlip(), v2.AutoAugment(), *ending, v2.RandomErasing(0.25)])


def variants(options: Namespace, batch_size: int, case: str, _stack: ExitStack) -> list[OptionalRow]:
    size = options.size
    frames = options.frames
    clips = torch.randint(256, (batch_size, frames, 3, size, size), dtype=torch.uint8, device=options.device)
    images = clips.flatten(0, 1)
    few = clips[:_TORCHVISION_CLIPS]
    one_by_one = pipeline(case, size)
    of_images, of_clips = (gpuaug.fuse(pipeline(case, size), dtype=torch.bfloat16) for _ in range(2))
    count = len(images)
    return [
        call_rows.call_row(
            TORCHVISION, lambda: [one_by_one(clip).to(torch.bfloat16) for clip in few], count, images=len(few) * frames
        ),
        call_rows.call_row("gpuaug, images", lambda: of_images(images), count, launches=2 * call_rows.FEW_LAUNCHES),
        call_rows.call_row("gpuaug, clips", lambda: of_clips(clips), count, launches=2 * call_rows.FEW_LAUNCHES),
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("clips", __doc__, batch="32", seconds=0.3, repeats=5)
    parser.add_argument("--frames", type=int, default=16, help="frames of a clip (default: %(default)s)")
    options = flags.parse(parser, argv)
    del options.workers  # nothing is loaded
    return measurement.measure(
        "clips",
        options,
        [
            ({"batch_size": size, "case": case}, partial(variants, options, size, case))
            for size in options.batch
            for case in CASES
        ],
        baseline=TORCHVISION,
        ours=("gpuaug, images", "gpuaug, clips"),
        figures=partial(call_rows.batch_figures, device=options.device),
    )
