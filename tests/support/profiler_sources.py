"""What is profiled here, with which settings, and how often."""

import time

import torch
from torch.utils.data import Dataset

SHORT = {"batches": 8, "rounds": 1, "show": False}
PULLED = 90
"""More batches than a short profile takes, so that no epoch begins within a window."""


class Numbers(Dataset):
    """Each sample says which it is, and draws. A batch of two takes so many milliseconds."""

    def __init__(self, count=2 * PULLED, batch_ms=0.0, fails_at=None):
        self.count, self.sample_s, self.fails_at = count, batch_ms / 2e3, fails_at

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.fails_at:
            raise ZeroDivisionError(f"sample {index}")
        if self.sample_s:
            time.sleep(self.sample_s)
        return torch.full((3,), float(index)), index


def sleeping(ms):
    """Takes so long, and gives what it is given."""

    def sleep(batch):
        time.sleep(ms / 1e3)
        return batch

    return sleep


def nothing(batch):
    """A step."""


def again(measure, holds, tries=3):
    """What ``measure`` gives when ``holds`` does, for what a machine that is busy for a moment may disturb."""
    for _ in range(tries):
        found = measure()
        if holds(found):
            break
    assert holds(found), str(found)
    return found
