"""Loaders that override how a ``DataLoader`` is iterated: each in another way."""

import queue
import random
import threading

import torch
from support.feed.ring_inputs import Samples
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader


class AsTheyAre(DataLoader):
    """A generator, which starts workers at its first next, as the loaders of LitData and MosaicML Streaming do."""

    def __iter__(self):
        yield from super().__iter__()


class AtOnce(DataLoader):
    """Starts workers in ``iter``."""

    def __iter__(self):
        return super().__iter__()


class OtherIterator(DataLoader):
    """Has a different iterator, which hides torch's."""

    def _get_iterator(self):
        return (batch for batch in super()._get_iterator())


class Itself(DataLoader):
    """Is its own iterator."""

    def __iter__(self):
        self.batches = super().__iter__()
        return self

    def __next__(self):
        return next(self.batches)


class OfTorchdata(StatefulDataLoader):
    """A generator around torchdata's loader."""

    def __iter__(self):
        yield from super().__iter__()


class InAThread(DataLoader):
    """Another thread reads up to four batches ahead."""

    def __iter__(self):
        ready = queue.Queue(4)

        def read():
            for batch in iterator:
                ready.put(batch)
            ready.put(None)

        iterator = super().__iter__()
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        yield from iter(ready.get, None)
        thread.join()


class Continued(DataLoader):
    """One iterator for all epochs, whose workers run on. The first epoch starts them."""

    batches = None

    def __init__(self, dataset, batch_size=1, **options):
        rounds = [range(start, min(start + batch_size, len(dataset))) for start in range(0, len(dataset), batch_size)] * 5
        super().__init__(dataset, batch_sampler=list(map(list, rounds)), **options)
        self.length = len(rounds) // 5

    def __len__(self):
        return self.length

    def __iter__(self):
        self.batches = self.batches or super().__iter__()
        for _ in range(self.length):
            yield next(self.batches)


class Twice(DataLoader):
    """Reads the data set twice per epoch, by new workers."""

    def __iter__(self):
        yield from super().__iter__()
        yield from super().__iter__()


class SideBySide(DataLoader):
    """Two iterators at the same time, each with workers."""

    def __iter__(self):
        yield from zip(super().__iter__(), super().__iter__(), strict=True)


class AtTheEnd(DataLoader):
    """Keeps all batches of the epoch, more than there are slots, before it returns the first."""

    def __iter__(self):
        yield from reversed(list(super().__iter__()))


class Moved:
    """An object that moves itself."""

    def __init__(self, batch):
        self.image, self.label = batch["image"], batch["label"]

    def to(self, device):
        self.image, self.label = self.image.to(device), self.label.to(device)
        return self

    def __eq__(self, other):
        return torch.equal(self.image, other.image) and torch.equal(self.label, other.label)

    __hash__ = None


class Wrapped(DataLoader):
    """Objects that move themselves."""

    def __iter__(self):
        return map(Moved, super().__iter__())


ACTIONS = {
    "return": lambda batch, _: batch,
    "drop": lambda *_: None,
    "add a member": lambda batch, kept: (batch, torch.tensor([len(kept)]), "text"),
    "join": lambda batch, kept: [batch, *({**each, "image": each["image"] + 1} for each in kept[:2])],
    "concatenate": lambda batch, kept: torch.cat([each["image"] for each in (batch, *kept)]),
    "part": lambda batch, _: {"image": batch["image"][:, 1:], "label": batch["label"]},
    "change": lambda batch, _: {**batch, "image": batch["image"].mul_(2)},
    "replace": lambda batch, _: {**batch, "image": batch["image"].clone()},
    "array": lambda batch, _: batch["image"].numpy(),
    "wrap": lambda batch, _: Moved(batch),
    "scalars": lambda batch, _: batch["label"].tolist(),
}
"""What a loader may return for a batch, also with batches that it has kept; ``None``: nothing."""


class AtRandom(DataLoader):
    """Keeps batches, and returns what random actions make of them, in random order."""

    def __init__(self, *arguments, seed, **options):
        super().__init__(*arguments, **options)
        self.seed = seed

    def __iter__(self):
        draws = random.Random(self.seed)
        self.seed += 1
        kept = []
        for batch in super().__iter__():
            kept.append(batch)
            while kept and draws.random() < 0.6:
                batch = kept.pop(draws.randrange(len(kept)))
                result = ACTIONS[draws.choice(list(ACTIONS))](batch, kept)
                if result is not None:
                    yield result
        yield from kept


KINDS = [AsTheyAre, AtOnce, OtherIterator, Itself, OfTorchdata, Continued, Wrapped, Twice, SideBySide, AtTheEnd]


def made(kind, **options):
    return lambda: kind(Samples(), **{"num_workers": 2, "batch_size": 2, **options})
