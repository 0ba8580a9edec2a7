"""The kernel that draws crops on the device, against crops drawn on the host; and crops that are skipped by chance."""

import kornia.augmentation as K
import torch
from support.comparison.device_crops import (
    BEHIND,
    CROPS,
    SIZE,
    SKIPPED,
    disagreement,
    fault_of_shared_tables,
    fault_of_skipped_crops,
    some_sizes,
)

OPTIONS = ({}, {"points": True, "masks": True})
DTYPES = (torch.uint8, torch.float32)
SAMPLES, FEW_SAMPLES = 100, 24
DEVICE = torch.device("cpu")


def checks(*, every):
    """(name, how the kernels differ or an empty string)."""
    yield "shared tables", fault_of_shared_tables(DEVICE)
    sizes = some_sizes(SAMPLES if every else FEW_SAMPLES)
    for number, (name, crop) in enumerate(CROPS.items()):
        for options in OPTIONS if every else OPTIONS[number % 2 :][:1]:
            yield f"{name}, {options}", disagreement(crop, sizes, DEVICE, **options)
    for name, make in BEHIND.items():
        crop, few = K.RandomResizedCrop(SIZE), some_sizes(FEW_SAMPLES)
        yield name, disagreement(crop, few, DEVICE, points=True, masks=True, behind=[make()])
    for name in SKIPPED:
        # A kernel is slow at taps: without ``every``, one dtype for each of those that have more than four.
        few = {"smooth": DTYPES[:1], "smooth, cubic": DTYPES[1:]}
        for dtype in DTYPES if every else few.get(name, DTYPES):
            yield f"skipped, {name}, {dtype}", fault_of_skipped_crops(name, dtype, DEVICE)


def failures(*, every):
    """Names of the crops that differ, and how."""
    yield from (f"{name}: {text}" for name, text in checks(every=every) if text)
