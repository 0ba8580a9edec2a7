"""Sources that are profiled in tests, and the settings of a short profile."""

import torch
from torch.utils.data import Dataset

SHORT = {"batches": 8, "rounds": 1, "show": False}
PULLED = 90
"""More batches than a short profile takes, so that no epoch begins within a window."""


class Numbers(Dataset):
    """Each sample is its own number, twice: as a tensor (3) and as it is."""

    def __init__(self, count=2 * PULLED, fails_at=None):
        self.count, self.fails_at = count, fails_at

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.fails_at:
            raise ZeroDivisionError(f"sample {index}")
        return torch.full((3,), float(index)), index


class Labelled(Dataset):
    """Samples in dictionaries."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"images": torch.full((4,), float(index)), "label": torch.tensor(index % 10)}


class HostBatches:
    """Batches of the stream layer's double, which a thread pulls and which can be read again."""

    def __init__(self, cuda, count):
        self.cuda, self.count = cuda, count

    def __iter__(self):
        for _ in range(self.count):
            yield self.cuda.host_batch()


def nothing(batch):
    """A step."""
