"""Sources of batches: datasets, the loaders around them, and an iterable that is no loader."""

import numpy as np
import torch
from support.ring_batches import Pair, any_bits, values
from torch.utils.data import DataLoader, Dataset

COUNT = 12
"""Batches of most tests: with two workers the first five at most are on their way before slots can have been carved."""


class Made(Dataset):
    """Whole batches, made by a function of their number."""

    def __init__(self, make, count=COUNT):
        self.make = make
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.make(index)


def whole(samples):
    """A collate function that takes a sample for the batch, as it is."""
    return samples[0]


def made(make, count=COUNT, **options):
    return lambda: DataLoader(Made(make, count), collate_fn=whole, **{"num_workers": 2, **options})


def sized(sizes, **options):
    return made(lambda i: (any_bits(i, torch.uint8, sizes[i]), torch.tensor(i)), len(sizes), **options)


class Samples(Dataset):
    """Samples of several kinds, for the default collate function."""

    def __len__(self):
        return 2 * COUNT + 1

    def __getitem__(self, index):
        return {
            "image": values(index, 3, 4, 4),
            "array": np.full((2, 3), index, np.int16),
            "label": index,
            "weight": index / 3,
            "name": f"sample {index}",
            "pair": Pair(torch.tensor(index), [np.float32(index), True]),
            "nothing": torch.empty(0),
        }


def padded(samples):
    """A collate function whose batches differ in shape."""
    images = torch.stack([sample["image"] for sample in samples])
    return {"images": images[..., : 1 + samples[0]["label"] % 4], "names": [sample["name"] for sample in samples]}


def with_workers(dataset, **options):
    return lambda: DataLoader(dataset, **{"num_workers": 2, "batch_size": 2, **options})


class Source:
    """Some other iterable."""

    def __init__(self, make, count=COUNT):
        self.make, self.count = make, count

    def __iter__(self):
        return (self.make(index) for index in range(self.count))


def generator(seed=3):
    return torch.Generator().manual_seed(seed)
