"""What the loader is put around here, and what fails in it."""

import torch
from torch.utils.data import Dataset, IterableDataset

from gpuaug import StreamedLoader

DEPTHS = [0, 1, 2, 5, 50]


class Numbers(Dataset):
    """The numbers up to ``count``; at ``failing`` it does something else instead."""

    def __init__(self, count=10, failing=None, fail=None):
        self.count = count
        self.failing = failing
        self.fail = fail

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.failing:
            self.fail()
        return torch.tensor(index)


class Opened(list):
    """Counts the loops over it."""

    opened = 0

    def __iter__(self):
        self.opened += 1
        return super().__iter__()


class NumberStream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(5))


def streamed(loader, *stages, **options):
    return StreamedLoader(loader, stages, device="cpu", **options)


def noise(x):
    """Different at each call, unless its draws are keyed."""
    return x + torch.rand(4)


def values(loader):
    return [batch.tolist() for batch in loader]


def raises(error):
    def fail():
        raise error

    return fail


class OwnError(Exception):
    def __init__(self, number, *, text):
        super().__init__(number)
        self.text = text


def failing_at(index, error):
    def transform(x):
        if x.flatten()[0] == index:
            raise error
        return x

    return transform


def failure(loader):
    """The batches that arrive, and the error after them."""
    arrived, batches = [], iter(loader)
    while True:
        try:
            arrived.append(next(batches).tolist())
        except StopIteration:
            raise AssertionError("nothing failed") from None
        except BaseException as error:
            return arrived, error
