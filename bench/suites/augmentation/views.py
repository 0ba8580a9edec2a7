"""Several views of each image for self-supervised training: two global and eight local crops of DINO's pipeline.

    python -m bench run views

Random uint8 images of 256 x 256 pixels are on the card. A global view is a crop of 40 to 100 % of the image's area, resized to
224 x 224 pixels; a local view is a crop of 5 to 40 %, resized to 96 x 96 pixels. Both have RandomResizedCrop,
RandomHorizontalFlip, ColorJitter with hue (probability 0.8), RandomGrayscale (0.2), RandomGaussianBlur with a kernel of 23 x 23
pixels (0.5) and Normalize, to bfloat16 and channels last. Here the two global views have the same pipeline; in DINO they differ
in the probabilities of blur and solarisation. Rows:

Kornia                     ten calls of Kornia's pipelines, one per view
gpuaug, a call for each    ten calls of the fused pipelines, one per view
gpuaug                     two calls of the fused pipelines, with views=2 and views=8

Rates are input images per second, each with ten views. ``host_ms`` is the time of the calls on the calling thread, with an idle
GPU; ``gpu_ms`` is the time of the GPU for the calls, without host time.
"""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

import gpuaug
from bench.data import pipelines
from bench.harness import call_rows, flags, measurement
from bench.harness.call_rows import AugmentCall
from bench.harness.optional_rows import OptionalRow

_CROPS = {"global": (7 / 8, (0.4, 1.0), 2), "local": (3 / 8, (0.05, 0.4), 8)}
"""Name of a crop → (side of the view over side of the image, range of the crop's area over the image's, number of views)."""


def fused_pipeline(pipeline: nn.Module, views: int = 1) -> nn.Module:
    """Return the pipeline, fused by gpuaug."""
    return gpuaug.fuse(pipeline, dtype=torch.bfloat16, memory_format=torch.channels_last, views=views)


def variants(options: Namespace, batch_size: int, _stack: ExitStack) -> list[OptionalRow]:
    size = options.size
    images = torch.randint(256, (batch_size, 3, size, size), dtype=torch.uint8, device=options.device)

    def crop_pipelines(cropping: str) -> list[tuple[nn.Module, int]]:
        return [
            (pipelines.view_kornia(round(side_ratio * size), area_range, cropping=cropping), count)
            for side_ratio, area_range, count in _CROPS.values()
        ]

    def kornia_call() -> AugmentCall:
        view_pipelines = crop_pipelines("resample")

        def call() -> list[torch.Tensor]:
            scaled = images.float() / 255
            views = [pipeline(scaled) for pipeline, count in view_pipelines for _ in range(count)]
            return [view.to(torch.bfloat16, memory_format=torch.channels_last) for view in views]

        return call

    def single_view_calls() -> AugmentCall:
        augmenters = [(fused_pipeline(pipeline), count) for pipeline, count in crop_pipelines("slice")]
        return lambda: [augment(images) for augment, count in augmenters for _ in range(count)]

    def multi_view_calls() -> AugmentCall:
        augmenters = [fused_pipeline(pipeline, count) for pipeline, count in crop_pipelines("slice")]
        return lambda: [augment(images) for augment in augmenters]

    return [
        call_rows.call_row("Kornia", kornia_call(), batch_size),
        call_rows.call_row("gpuaug, a call for each", single_view_calls(), batch_size, launches=10 * call_rows.FEW_LAUNCHES),
        call_rows.call_row("gpuaug", multi_view_calls(), batch_size, launches=2 * call_rows.FEW_LAUNCHES),
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("views", __doc__, batch="64,256", seconds=0.3, repeats=3)
    options = flags.parse(parser, argv)
    del options.workers  # unused
    return measurement.measure(
        "views",
        options,
        [({"batch_size": size}, partial(variants, options, size)) for size in options.batch],
        baseline="Kornia",
        ours=("gpuaug, a call for each", "gpuaug"),
        figures=partial(call_rows.batch_figures, device=options.device),
    )
