"""Kernels on clips, of which one row of the parameter table serves all frames, against the torch executor."""

import torch
from support.batches.clips import FRAMES, all_pipelines, clips_of
from support.comparison import readers
from support.comparison.executors import disagreement
from support.comparison.replay import photographs

CONTIGUOUS = torch.contiguous_format
UINT8 = photographs(2 * FRAMES, 3, 17, 31)
SMALL = photographs(2 * FRAMES, 1, 9, 19)
"""For blurs, whose every line and tap takes the interpreter's time."""


def failures(*, every):
    """Names of the pipelines whose kernels differ from torch, and how."""
    for name, make in all_pipelines().items():
        slow = any(word in name for word in ("blur", "filter", "CLAHE"))
        images = SMALL if slow and not every and name != "jitter between filters" else UINT8
        formats = [(torch.float32, CONTIGUOUS), (torch.float16, torch.channels_last)]
        half = name in ("chosen frames", "noise, same", "two passes")  # of a jitter, the second kernel over what is kept
        for dtype, memory_format in formats if every else formats[half:][:1]:
            if text := disagreement(name, make(), images, dtype, memory_format, frames=FRAMES):
                yield f"{name}, to {dtype}: {text}"
    for name in ("crop, views", "blur first, views", "jitter, views"):
        modules, options = readers.SAME[name]
        images = SMALL.expand(-1, 3, -1, -1)
        if text := readers.disagreement(modules, images, torch.float32, CONTIGUOUS, frames=FRAMES, **options):
            yield f"{name}: {text}"
    for name in ("crop, views", "drawn size"):
        modules, _, options = readers.RAGGED[name]
        if text := readers.disagreement(modules, clips_of("hwc", readers.SIZES[:2]), torch.float32, CONTIGUOUS, **options):
            yield f"{name}, ragged: {text}"
