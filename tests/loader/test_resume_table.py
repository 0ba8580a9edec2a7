"""The table of loaders in ``docs/resume.md``: what a stop in any epoch, at any batch, once and twice, does to the batches."""

import copy
import re

import datasets
import pytest
import torch
from support.checkpoints import Counter, Shards, Tape
from support.resumed_loaders import Loaded, generator
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from gpuaug import GpuAugError, StreamedLoader

EPOCHS = 3
DATA = Loaded()


def distributed(kind):
    return {"sampler": kind(DATA, num_replicas=2, rank=1, seed=3)}


ORDERS = {
    "in order": dict,
    "`shuffle=True`": lambda: {"shuffle": True},
    "`shuffle=True`, a `generator`": lambda: {"shuffle": True, "generator": generator()},
    "`RandomSampler` with a `generator`": lambda: {"sampler": RandomSampler(DATA, generator=generator())},
    "the same, more samples than the dataset has": lambda: {
        "sampler": RandomSampler(DATA, num_samples=33, generator=generator())
    },
    "`RandomSampler`, `WeightedRandomSampler`, `SubsetRandomSampler`": lambda: {
        "sampler": WeightedRandomSampler(range(1, 15), 14)
    },
    "`WeightedRandomSampler` with a `generator`": lambda: {
        "sampler": WeightedRandomSampler(range(1, 15), 14, generator=generator())
    },
    "`SubsetRandomSampler` with a `generator`": lambda: {"sampler": SubsetRandomSampler(range(3, 14), generator=generator())},
    "`DistributedSampler`, told each epoch": lambda: distributed(DistributedSampler),
}


def read(source, tells):
    """Batches of some epochs, and the state behind each batch and each epoch, with torch's generator as it was then."""
    loader, epochs, states = StreamedLoader(source, device="cpu", seed=7), [], {}
    with loader:
        for epoch in range(EPOCHS):
            if tells:
                loader.set_epoch(epoch)
            epochs.append([])
            for batch in loader:
                epochs[-1].append(batch.tolist())
                states[epoch, len(epochs[-1])] = copy.deepcopy(loader.state_dict()), torch.get_rng_state()
            states[epoch + 1, 0] = copy.deepcopy(loader.state_dict()), torch.get_rng_state()
    return epochs, states


def resumed_from(make, state, position, tells, *, stops_again):
    """What is left of the epoch of a state, and the epochs behind it; with another stop in between."""
    loader, rest = StreamedLoader(make(), device="cpu"), []
    held, torch_state = state
    torch.set_rng_state(torch_state)
    with loader:
        loader.load_state_dict(held)
        for epoch in range(position[0], EPOCHS):
            if tells:
                loader.set_epoch(epoch)
            rest.append([])
            for batch in loader:
                rest[-1].append(batch.tolist())
                if stops_again and len(rest[-1]) == 2:
                    break
            if stops_again and len(rest[-1]) == 2:
                break
        else:
            return rest
        state = copy.deepcopy(loader.state_dict()), torch.get_rng_state()
    done = len(rest) - 1
    again = resumed_from(make, state, (position[0] + done, 2), tells, stops_again=False)
    return [*rest[:done], rest[done] + again[0], *again[1:]]


def measured(make, positions, *, tells=False):
    """``"exact"``, or what the loader does where it cannot be: ``"no state"``, ``"an error"`` or ``"other batches"``."""
    if not hasattr(StreamedLoader(make(), device="cpu"), "state_dict"):
        return "no state"
    torch.manual_seed(3)
    epochs, states = read(make(), tells)
    for epoch, batch in positions(epochs):
        for stops_again in (False, True):
            try:
                rest = resumed_from(make, states[epoch, batch], (epoch, batch), tells, stops_again=stops_again)
            except GpuAugError:
                return "an error"
            if rest != [epochs[epoch][batch:], *epochs[epoch + 1 :]]:
                return f"other batches: from {epoch}, {batch}{', stopped again' if stops_again else ''}"
    return "exact"


def every_position(epochs):
    """The first, a middle and the last batch of each epoch, and the end of each."""
    return [(epoch, batch) for epoch in range(EPOCHS) for batch in (1, 3, len(epochs[epoch]))] + [(1, 0), (2, 0)]


def few_positions(epochs):
    """As many as can be had of workers, which take time to start."""
    return [(0, 1), (1, 3), (2, 0)]


class Held(Loaded):
    """A dataset by index with a state."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __getitem__(self, index):
        self.count += 1
        return torch.tensor([index, self.count])

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def of_hugging_faces(**shuffle):
    def rows():
        found = datasets.Dataset.from_dict({"number": list(range(15))}).to_iterable_dataset(num_shards=2)
        return (found.shuffle(seed=3, **shuffle) if shuffle else found).with_format("torch").map(lambda row: row)

    return rows


def node():
    samples = nodes.SamplerWrapper(RandomSampler(DATA, generator=generator()))
    batches = nodes.Batcher(nodes.Mapper(samples, torch.tensor), 3, drop_last=False)
    return nodes.Loader(nodes.Mapper(batches, torch.stack), restart_on_stop_iteration=False)


def batch_of(rows):
    return torch.stack([row["number"] for row in rows])


STREAMS = {
    "a stream without a state": lambda **options: StatefulDataLoader(Shards(), 3, **options),
    "a stream with `state_dict`": lambda **options: StatefulDataLoader(Tape(), 3, **options),
    "a stream of Hugging Face's": lambda **options: StatefulDataLoader(of_hugging_faces()(), 3, collate_fn=batch_of, **options),
    "the same, shuffled": lambda **options: StatefulDataLoader(
        of_hugging_faces(buffer_size=6)(), 3, collate_fn=batch_of, **options
    ),
}
