"""Kernels on clips, of which one row of the parameter table serves all frames, against the torch executor."""

import torch
from support.clips import FRAMES, all_pipelines
from support.executors import disagreement
from support.replay import photographs

UINT8 = photographs(2 * FRAMES, 3, 17, 33)
SMALL = photographs(2 * FRAMES, 1, 9, 19)
"""For blurs, whose every line and tap takes the interpreter's time."""


def failures(*, every):
    """Names of the pipelines whose kernels differ from torch, and how."""
    for name, make in all_pipelines().items():
        slow = "blur" in name or "filter" in name
        images = SMALL if slow and not every and name != "jitter between filters" else UINT8
        formats = [(torch.float32, torch.contiguous_format), (torch.float16, torch.channels_last)]
        for dtype, memory_format in formats if every else formats[:1]:
            if text := disagreement(name, make(), images, dtype, memory_format, frames=FRAMES):
                yield f"{name}, to {dtype}: {text}"
