"""Run by test_triton.py in a process of its own: every kernel under Triton's interpreter, against the torch executor."""

import sys

import torch
from support import pipelines
from support.executors import disagreement
from support.replay import photographs

from gpuaug.fusion.backends.triton import backend, filter_tiles

# The interpreter takes its time for every block, and for every line of a blur.
backend.TILES = dict.fromkeys(backend.TILES, (16, 32))
backend.COLOUR_TILE = (16, 32)
backend.REST_BLOCK = 256
filter_tiles.ACROSS = 64

UINT8, FLOAT = photographs(3, 3, 21, 37), photographs(2, 3, 21, 37, dtype=torch.float32)
BATCHES = [
    (UINT8, torch.float32, torch.contiguous_format),
    (FLOAT, torch.float16, torch.channels_last),
    (UINT8[:2].to(memory_format=torch.channels_last), torch.float16, torch.contiguous_format),
    (UINT8[:2], torch.float16, torch.channels_last),
]
TWO_CHANNELS = (photographs(2, 2, 21, 37), torch.float32, torch.contiguous_format)


def main(chosen):
    failed = []
    for group in ("EXACT", "RGB_EXACT", "CLOSE", "RGB_CLOSE", "TIES"):
        for name, made in getattr(pipelines, group).items():
            if chosen and name not in chosen:
                continue
            batches = BATCHES[:1] if "blur" in name else BATCHES + ([] if group.startswith("RGB") else [TWO_CHANNELS])
            for images, dtype, memory_format in batches:
                # The interpreter does not fuse products and sums, so a byte's share of 255 may be one unit off.
                exact = group.endswith("EXACT") and images.dtype == torch.uint8
                said = disagreement("" if exact else name, made(), images, dtype, memory_format, 1e-6 if exact else 2e-5)
                if said:
                    failed.append(f"{name}, {tuple(images.shape)} {images.dtype} to {dtype}: {said}")
    return failed


if __name__ == "__main__":
    failed = main(sys.argv[1:])
    sys.exit("\n".join(failed) or 0)
