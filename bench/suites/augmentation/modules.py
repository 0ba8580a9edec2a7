"""Single modules: a batch augmented by one module of Kornia or torchvision, and by gpuaug.fuse of it.

    python -m bench run modules

Images of ``--side`` pixels (224) on the device. A case is a module that is applied to every image. Rows:

library   Kornia: one call for the batch, of float images in [0, 1]. torchvision: one call per uint8 image, for a quarter of the
          batch, because a call draws once
gpuaug    gpuaug.fuse of the module; uint8 images

Rates are images per second. ``host_ms`` and ``gpu_ms``: time of one call for the batch, on the calling thread with an idle
device, and on the device.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import kornia.augmentation as K
import torch
from torchvision.transforms import v2

import gpuaug
from bench.harness import call_rows, flags, measurement
from bench.harness.optional_rows import OptionalRow

LIBRARY = "library"
GPUAUG = "gpuaug"

MODULES: dict[str, Callable[[], Any]] = {
    "RandomBoxBlur": lambda: K.RandomBoxBlur((5, 5), p=1.0),
    "RandomMedianBlur, 3x3": lambda: K.RandomMedianBlur((3, 3), p=1.0),
    "RandomMedianBlur, 5x5": lambda: K.RandomMedianBlur((5, 5), p=1.0),
    "RandomMotionBlur": lambda: K.RandomMotionBlur((3, 11), 35.0, 0.5, p=1.0),
    "RandomJPEG": lambda: K.RandomJPEG((20.0, 90.0), p=1.0),
    "RandomRGBShift": lambda: K.RandomRGBShift(p=1.0),
    "RandomPlanckianJitter": lambda: K.RandomPlanckianJitter("blackbody", p=1.0),
    "RandomSaltAndPepperNoise": lambda: K.RandomSaltAndPepperNoise(0.1, p=1.0),
    "RandomGaussianNoise": lambda: K.RandomGaussianNoise(p=1.0),
    "RandomLinearIllumination": lambda: K.RandomLinearIllumination(p=1.0),
    "RandomLinearCornerIllumination": lambda: K.RandomLinearCornerIllumination(p=1.0),
    "RandomGaussianIllumination": lambda: K.RandomGaussianIllumination(p=1.0),
    "RandomMosaic": lambda: K.RandomMosaic(p=1.0),
    "RandomJigsaw": lambda: K.RandomJigsaw((4, 4), p=1.0),
    "AugMix": v2.AugMix,
    "ElasticTransform": v2.ElasticTransform,
}


def rows(name: str, options: Namespace, batch_size: int, _stack: ExitStack) -> list[OptionalRow]:
    images = torch.randint(0, 256, (batch_size, 3, options.side, options.side), dtype=torch.uint8, device=options.device)
    module = MODULES[name]()
    fused = gpuaug.fuse(module)
    ours = call_rows.call_row(GPUAUG, lambda: fused(images), batch_size, launches=call_rows.MANY_LAUNCHES)
    if isinstance(module, v2.Transform):
        some = images[: max(batch_size // 4, 1)]
        return [call_rows.call_row(LIBRARY, lambda: [module(image) for image in some], batch_size, images=len(some)), ours]
    floats = images.float() / 255
    return [call_rows.call_row(LIBRARY, lambda: module(floats), batch_size), ours]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("modules", __doc__, batch="64", seconds=0.15, repeats=3)
    parser.add_argument("--cases", help="separated by semicolons (default: all)")
    parser.add_argument("--side", type=int, default=224, help="side of the images (default: %(default)s)")
    options = flags.parse(parser, argv)
    names = options.cases.split(";") if options.cases else list(MODULES)
    return measurement.measure(
        "modules",
        options,
        [({"case": name, "batch_size": size}, partial(rows, name, options, size)) for size in options.batch for name in names],
        baseline=LIBRARY,
        ours=(GPUAUG,),
        figures=partial(call_rows.batch_figures, device=options.device),
    )
