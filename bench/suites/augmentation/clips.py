"""Video clips with one draw per clip: gpuaug on clips and on single images, and torchvision called once per clip.

    python -m bench run clips

Random uint8 clips of 16 frames of 256 x 256 pixels on the card become 224 x 224 pixels in bfloat16. Cases:

VideoMAE    multi-scale crop (66 to 100 % of the sides, by RandomResizedCrop), RandomHorizontalFlip, Normalize
V-JEPA 2    RandomResizedCrop (30 to 100 % of the area), RandomHorizontalFlip, AutoAugment, Normalize, RandomErasing
            (probability 0.25)

Rows:

torchvision v2, clip by clip    torchvision's pipeline on the card, called once per clip (for some of the clips: it is slow)
gpuaug, images                  gpuaug.fuse on the frames of all clips as a batch of images, with one draw per frame
gpuaug, clips                   gpuaug.fuse on the clips, with one draw per clip

Rates are frames per second. ``host_ms`` is the time of one call on the calling thread, with an idle GPU, and ``gpu_ms`` the
time of the GPU for the call, without host time.
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
_SIDE_SHARE = 7 / 8
"""Side of the result over the side of the clips."""


def pipeline(case: str, size: int) -> nn.Module:
    """Return the recipe in torchvision, for clips of ``size`` pixels per side."""
    side = round(_SIDE_SHARE * size)
    final_transforms = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(pipelines.MEAN, pipelines.STD)]
    if case == "VideoMAE":
        return v2.Compose([v2.RandomResizedCrop(side, scale=(0.66**2, 1.0)), v2.RandomHorizontalFlip(), *final_transforms])
    crop = v2.RandomResizedCrop(side, scale=(0.3, 1.0), ratio=(0.75, 1.35))
    return v2.Compose([crop, v2.RandomHorizontalFlip(), v2.AutoAugment(), *final_transforms, v2.RandomErasing(0.25)])


def variants(options: Namespace, batch_size: int, case: str, _stack: ExitStack) -> list[OptionalRow]:
    size = options.size
    frames = options.frames
    clips = torch.randint(256, (batch_size, frames, 3, size, size), dtype=torch.uint8, device=options.device)
    images = clips.flatten(0, 1)
    torchvision_clips = clips[:_TORCHVISION_CLIPS]
    torchvision_pipeline = pipeline(case, size)
    augment_images, augment_clips = (gpuaug.fuse(pipeline(case, size), dtype=torch.bfloat16) for _ in range(2))
    count = len(images)
    return [
        call_rows.call_row(
            TORCHVISION,
            lambda: [torchvision_pipeline(clip).to(torch.bfloat16) for clip in torchvision_clips],
            count,
            images=len(torchvision_clips) * frames,
        ),
        call_rows.call_row("gpuaug, images", lambda: augment_images(images), count, launches=2 * call_rows.FEW_LAUNCHES),
        call_rows.call_row("gpuaug, clips", lambda: augment_clips(clips), count, launches=2 * call_rows.FEW_LAUNCHES),
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("clips", __doc__, batch="32", seconds=0.3, repeats=5)
    parser.add_argument("--frames", type=int, default=16, help="frames of a clip (default: %(default)s)")
    options = flags.parse(parser, argv)
    del options.workers  # unused
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
