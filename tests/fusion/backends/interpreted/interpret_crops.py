"""The kernel that draws crops on the device, against crops drawn on the host."""

import torch
from support.device_crops import CROPS, disagreement, fault_of_shared_tables, some_sizes

OPTIONS = ({}, {"points": True, "masks": True})
SAMPLES, FEW_SAMPLES = 100, 24


def failures(*, every):
    """Names of the crops that differ, and how."""
    device = torch.device("cpu")
    if text := fault_of_shared_tables(device):
        yield text
    for number, (name, crop) in enumerate(CROPS.items()):
        for options in OPTIONS if every else OPTIONS[number % 2 :][:1]:
            text = disagreement(crop, some_sizes(SAMPLES if every else FEW_SAMPLES), device, **options)
            if text:
                yield f"{name}, {options}: {text}"
