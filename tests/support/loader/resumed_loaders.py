"""Loaders of every order that a ``DataLoader`` can have, to be stopped and gone on with."""

import numpy as np
import torch
from support.loader.checkpoints import stopped_at
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from gpuaug import StreamedLoader

SAMPLES, COUNT = 14, 3


class Loaded(Dataset):
    """Samples that are their index, and which of them this process was asked for."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.asked.append(index)
        return torch.tensor(index)


def generator(seed=5):
    return torch.Generator().manual_seed(seed)


class Epochs(Sampler):
    """An order for each epoch, which it counts itself."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        yield from [(index * 5 + 3 * int(self.epoch)) % SAMPLES for index in range(SAMPLES)]
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch):
        self.epoch = epoch


class EpochsAtOnce(Epochs):
    """The same, which counts before it is read, and by NumPy's numbers."""

    def __iter__(self):
        order = list(super().__iter__())
        self.set_epoch(np.int64(self.epoch))
        return iter(order)


class Pairs(Sampler):
    """Batches of various sizes, in an order that is drawn when the iterator is made, not when it is read."""

    batch_size = np.int64(3)  # at most: a state holds it as a plain number

    def __init__(self):
        self.generator = generator()

    def __iter__(self):
        return iter([[index] * (1 + index % 3) for index in torch.randperm(7, generator=self.generator).tolist()])


class Reversed(Sampler):
    """The batches of another batch sampler, each in reverse."""

    def __init__(self, batch_sampler):
        self.batch_sampler = batch_sampler

    def __len__(self):
        return len(self.batch_sampler)

    def __iter__(self):
        return (batch[::-1] for batch in self.batch_sampler)


DATA = Loaded()
OPTIONS = {
    "in order": lambda: {"batch_size": 2},
    "shuffled by a generator": lambda: {"batch_size": 2, "shuffle": True, "generator": generator()},
    "shuffled by a sampler's own generator": lambda: {"batch_size": 2, "sampler": RandomSampler(DATA, generator=generator())},
    "drawn with replacement, 40": lambda: {
        "batch_size": 3, "sampler": RandomSampler(DATA, replacement=True, num_samples=40, generator=generator()),
        "generator": generator(6), "drop_last": True,
    },
    "several orders in an epoch": lambda: {
        "batch_size": 4, "sampler": RandomSampler(DATA, num_samples=33, generator=generator()),
    },
    "without batches": lambda: {"batch_size": None, "shuffle": True, "generator": generator()},
    "batches of another sampler": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(DATA, generator=generator()), 3, drop_last=False)
    },
    "lists of indices of another sampler": lambda: {
        "batch_size": None, "sampler": BatchSampler(RandomSampler(DATA, generator=generator()), 3, drop_last=False)
    },
    "batches of another batch sampler": lambda: {
        "batch_sampler": Reversed(BatchSampler(RandomSampler(DATA, generator=generator()), 3, drop_last=False))
    },
    "batches that are drawn at once": lambda: {"batch_sampler": Pairs()},
    "an order for each epoch": lambda: {"batch_size": 2, "sampler": Epochs()},
    "an order for each epoch, counted at once": lambda: {"batch_size": 2, "sampler": EpochsAtOnce()},
    "one of two ranks": lambda: {"batch_size": 2, "sampler": DistributedSampler(DATA, num_replicas=2, rank=1, seed=3)},
}  # fmt: skip
GLOBAL = {
    "shuffled by torch's generator": lambda: {"batch_size": 2, "shuffle": True},
    "weighted by torch's generator": lambda: {"batch_size": 2, "sampler": WeightedRandomSampler(range(1, 15), SAMPLES)},
}
QUICK = {"shuffled by a generator", "shuffled by torch's generator"}
WORKERS = [{}, {"num_workers": 2, "prefetch_factor": 3}, {"num_workers": 1, "persistent_workers": True}]


def noisy(images):
    return images + torch.rand(())


def loader(options, workers=None, feed="plain", **own):
    source = DataLoader(Loaded(), **options(), **(workers or {}))
    return StreamedLoader(source, [noisy], device="cpu", feed=feed, **{"seed": 7, **own})


def values(batches):
    return [batch.tolist() for batch in batches]


def begun_in_second_epoch(made):
    torch.manual_seed(1)
    with made:
        list(made)
        return stopped_at(COUNT, made)
