"""Sources with a state, loaders around them, and how a run is stopped at a batch."""

import io

import torch
import torch.distributed.checkpoint.stateful
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from gpuaug import StreamedLoader, TransformStage

BATCHES = 8


class Numbers(Dataset):
    """Each sample says which it is."""

    def __len__(self):
        return 2 * BATCHES - 1

    def __getitem__(self, index):
        return torch.full((3, 5), float(index)), index


class Shards(IterableDataset):
    """A stream without a state, in shards by worker."""

    def __iter__(self):
        worker = get_worker_info()
        step, first = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        yield from (torch.tensor([float(index)]) for index in range(first, 2 * BATCHES, step))


class Tape(IterableDataset):
    """A stream that says where it is by an object that goes on changing."""

    def __init__(self):
        self.at = {"next": 0}

    def __iter__(self):
        while self.at["next"] < 2 * BATCHES:
            self.at["next"] += 1
            yield torch.tensor([float(self.at["next"])])
        self.at["next"] = 0

    def state_dict(self):
        return self.at

    def load_state_dict(self, state):
        self.at = dict(state)


def shuffled(**options):
    return StatefulDataLoader(Numbers(), 2, shuffle=True, generator=torch.Generator().manual_seed(5), **options)


def one_worker():
    return shuffled(num_workers=1)


SOURCES = {
    "in this process": shuffled,
    "two workers": lambda: shuffled(num_workers=2),
    "one worker, every third state": lambda: shuffled(num_workers=1, snapshot_every_n_steps=3),
    "workers that persist": lambda: shuffled(num_workers=2, persistent_workers=True),
    "a stream": lambda: StatefulDataLoader(Shards(), 2, num_workers=2),
    "a stream with a state": lambda: StatefulDataLoader(Tape(), 2, num_workers=1),
    "a stream with a state, in this process": lambda: StatefulDataLoader(Tape(), 2),
}


def noisy(images):
    return images + torch.rand_like(images)


def shifted(images):
    return images + torch.rand(())


def streamed(make, **options):
    on = None if "stream" in options.pop("kind", "") else 0
    stages = [TransformStage(noisy, on=on, name="first"), TransformStage(shifted, on=on, name="second")]
    return StreamedLoader(make(), stages, device="cpu", **{"seed": 7, **options})


def bits(batch):
    parts = batch if isinstance(batch, (list, tuple)) else [batch]
    return [part.clone() for part in parts]


def same(some, others):
    return len(some) == len(others) and all(
        len(one) == len(two) and all(torch.equal(*pair) for pair in zip(one, two, strict=True))
        for one, two in zip(some, others, strict=True)
    )


def saved(state):
    """The state as it comes out of a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def stopped_at(count, loader):
    """The state of a loader whose loop has had ``count`` batches, and is then left."""
    iterator = iter(loader)
    for _ in range(count):
        next(iterator)
    state = saved(loader.state_dict())
    iterator.close()
    loader.close()
    return state


class Counter:
    """Any iterable may have a state: where it stands, in an object that it goes on changing."""

    def __init__(self, fails_at=None):
        self.state, self.fails_at = {"next": 0}, fails_at

    def __iter__(self):
        while self.state["next"] < BATCHES:
            self.state["next"] += 1
            yield torch.tensor([float(self.state["next"])])
        self.state["next"] = 0

    def state_dict(self):
        if self.state["next"] == self.fails_at:
            raise ZeroDivisionError("it does not know")
        return self.state

    def load_state_dict(self, state):
        self.state = dict(state)


class Prepared:
    """As Accelerate's loaders: they have the methods whether or not what they prepared has a state."""

    def __init__(self, base_dataloader):
        self.base_dataloader = base_dataloader

    def __iter__(self):
        return iter(self.base_dataloader)

    def state_dict(self):
        return self.base_dataloader.state_dict()

    def load_state_dict(self, state):
        self.base_dataloader.load_state_dict(state)
