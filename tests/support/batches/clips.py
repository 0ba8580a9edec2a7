"""Clips, and the pipelines that they are compared on: at least one for each kernel."""

import kornia.augmentation as K
from support.batches.ragged import images_of, pack
from support.comparison.replay import photographs
from support.ops import pipelines
from torchvision.transforms import v2

from gpuaug.core.ragged import Ragged, Shapes

FRAMES = 2
SIZES = [(37, 52), (64, 40), (21, 48)]
"""Of ragged clips."""

CHOSEN = (
    *("apply masks", "auto contrast", "channels", "crop, reflected", "either mix", "jitter between filters"),
    *("noise", "noise, same", "noise, salt and pepper", "padded, rotation, flip", "perspective", "photometric", "sharpness"),
    *("torchvision's mixes", "one of torchvision's", "weighted chains", "two passes", "filters, each for some"),
)
"""Names of pipelines of ``support/ops/pipelines.py``."""

FIRST = {
    "blur": lambda: [K.RandomGaussianBlur((3, 5), (0.3, 2.0), p=0.7), K.RandomInvert()],
    "blur of two passes": lambda: [K.RandomGaussianBlur((3, 9), (0.3, 2.0), p=0.7), K.Normalize(0.5, 0.25)],
    # Of two clips that the comparisons of kernels have, one is equalised.
    "CLAHE": lambda: [K.RandomClahe(p=0.8), K.RandomInvert()],
    "equalize": lambda: [K.RandomEqualize(p=0.4), K.RandomInvert()],
    "chosen frames": lambda: [v2.RandomResizedCrop(9), v2.UniformTemporalSubsample(3), v2.ColorJitter(0.4, 0.4)],
    "chosen frames, skipped passes": lambda: [
        K.RandomSharpness(p=0.5),
        K.RandomRotation(30.0, p=0.5),
        K.RandomGaussianBlur((3, 3), (0.3, 2.0), p=0.01),
        v2.UniformTemporalSubsample(3),
    ],
    "chosen frames of a blur": lambda: [v2.GaussianBlur(3), v2.UniformTemporalSubsample(1), v2.RandomInvert()],
    "mosaic": lambda: [K.RandomMosaic(p=1.0), K.RandomInvert()],
    "antialiased crop": lambda: [v2.RandomResizedCrop((9, 11)), v2.ColorJitter(0.4, 0.4)],
}
"""Further pipelines, by name."""


def all_pipelines():
    """(name, function that makes the modules) of each."""
    found = {name: make for group in pipelines.GROUPS for name, make in getattr(pipelines, group).items()}
    return {name: found[name] for name in CHOSEN} | FIRST


def clips(batch=3, frames=FRAMES, channels=3, height=21, width=37, **options):
    """Clips whose frames differ, (B, T, C, H, W)."""
    return photographs(batch * frames, channels, height, width, **options).unflatten(0, (batch, frames))


def still(batch=3, frames=FRAMES, channels=3, height=21, width=37, **options):
    """Clips of equal frames, (B, T, C, H, W)."""
    return photographs(batch, channels, height, width, **options)[:, None].repeat(1, frames, 1, 1, 1)


def clips_of(layout, sizes=SIZES, frames=FRAMES):
    """A ragged batch of clips."""
    batch = pack(images_of([size for size in sizes for _ in range(frames)]), layout)
    shapes = batch.shapes
    return Ragged(batch.data, batch.places, Shapes(shapes.sizes, shapes.channels, layout, frames=frames))
