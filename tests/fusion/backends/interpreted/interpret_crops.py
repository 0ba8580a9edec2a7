"""Crops that are skipped by chance."""

import torch
from support.comparison.skipped_crops import SKIPPED, fault_of_skipped_crops

DTYPES = (torch.uint8, torch.float32)


def failures(*, every):
    """Names of the crops that differ, and how."""
    for name in SKIPPED:
        # A kernel is slow at taps: without ``every``, one dtype for each of those that have more than four.
        few = {"smooth": DTYPES[:1], "smooth, cubic": DTYPES[1:]}
        for dtype in DTYPES if every else few.get(name, DTYPES):
            if text := fault_of_skipped_crops(name, dtype, torch.device("cpu")):
                yield f"skipped, {name}, {dtype}: {text}"
