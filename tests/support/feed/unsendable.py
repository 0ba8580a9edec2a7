"""Batches that no worker can send. Without an import of torchvision, which takes a worker that is spawned two seconds."""

import torch


class Unsendable:
    """A leaf that cannot be pickled."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        raise TypeError(f"number {self.number} cannot be sent")


def with_unsendable(samples):
    """Collate batches. Batches that begin with a sample from 10 to 19 hold an object that cannot be sent."""
    number = int(samples[0])
    return torch.tensor(samples), Unsendable(number) if 10 <= number < 20 else number
