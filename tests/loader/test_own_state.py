"""Loaders and datasets with a ``state_dict`` of their own: when it is read, and errors of states that cannot be read."""

import copy
import sys
from types import ModuleType

import pytest
import torch
from support.loader.checkpoints import Tape
from support.loader.resumed_loaders import Loaded, noisy
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from gpuaug import StreamedLoader

EPOCHS = 3
DATA = Loaded()


class Mutated(DataLoader):
    """A shuffled loader whose ``state_dict`` changes a state that was loaded and not yet begun, as LitData's does."""

    def __init__(self, **options):
        super().__init__(DATA, 3, **options)
        self.epoch, self.loaded, self.calls, self.next = 0, None, 0, 0

    def __iter__(self):
        held, self.loaded = self.loaded or {"epoch": self.epoch + 1, "next": 0}, None
        self.epoch, self.next = held["epoch"], held["next"]
        order = torch.randperm(14, generator=torch.Generator().manual_seed(self.epoch)).split(3)
        numbers = super().__iter__()
        for number in range(self.next, len(order)):
            next(numbers)
            self.next = number + 1
            yield order[number]

    def state_dict(self):
        self.calls += 1
        if self.loaded is not None:
            self.loaded.update(epoch=1, next=0)
        return {"epoch": self.epoch + (self.next == 5), "next": self.next % 5}

    def load_state_dict(self, state):
        self.loaded = dict(state)


@pytest.mark.parametrize("options", [{}, pytest.param({"num_workers": 2}, marks=pytest.mark.slow)], ids=str)
def test_a_loaders_own_state_is_read_once_per_batch_and_never_before_the_first(options):
    def run(source, state, epochs):
        loader, epoch_batches, states = StreamedLoader(source, [noisy], device="cpu", seed=7), [], []
        if state is not None:
            loader.load_state_dict(state)
        copy.deepcopy(loader.state_dict())
        assert source.calls == 0
        for _ in range(epochs):
            epoch_batches.append([])
            for batch in loader:
                epoch_batches[-1].append(batch.tolist())
                states.append(copy.deepcopy(loader.state_dict()))
        assert source.calls == len(states) + epochs, "once per batch, and at the end of each epoch"
        return epoch_batches, states

    whole, states = run(Mutated(**options), None, EPOCHS)
    for number, state in enumerate(states):
        epoch, batch = divmod(number, 5)
        if batch == 4:
            continue  # the state of the last batch has the position of the next epoch
        rest, _ = run(Mutated(**options), state, EPOCHS - epoch)
        assert rest == [whole[epoch][batch + 1 :], *whole[epoch + 1 :]], (epoch, batch)


def test_first_batch_that_fails_leaves_the_position_of_the_last_epoch():
    class Fails(Mutated):
        def __iter__(self):
            if self.epoch == 1:
                raise ZeroDivisionError
            yield from super().__iter__()

    failing = StreamedLoader(Fails(), [noisy], device="cpu", seed=7)
    list(failing)
    with pytest.raises(ZeroDivisionError):
        list(failing)
    resumed, whole = (StreamedLoader(Mutated(), [noisy], device="cpu", seed=7) for _ in range(2))
    resumed.load_state_dict(failing.state_dict())
    assert [[batch.tolist() for batch in whole] for _ in range(2)][1] == [batch.tolist() for batch in resumed]


@pytest.mark.parametrize("has_loader", [True, False])
def test_dataset_whose_state_needs_arguments_names_the_loader_of_its_package(has_loader, monkeypatch):
    class Streamed(Loaded):
        def state_dict(self, num_samples, from_beginning):
            return {}

        def load_state_dict(self, state):
            pass

    class Subclass(Streamed):
        pass

    package = ModuleType("engine")
    own_loader = type("StreamedLoader", (Mutated,), {"__module__": "engine.loaders"})
    vars(package).update({"DataLoader": DataLoader, **({"OwnLoader": own_loader} if has_loader else {})})
    monkeypatch.setitem(sys.modules, "engine", package)
    Streamed.__module__ = "engine.datasets"
    name = r"engine\.OwnLoader" if has_loader else "its package's own loader"
    for dataset in (Streamed(), Subclass()):
        with pytest.raises(TypeError, match=rf"got S\w+: missing a required argument: 'num_samples'\. Use {name} instead\.$"):
            StreamedLoader(StatefulDataLoader(dataset, 3), device="cpu")
    assert len(list(StreamedLoader(own_loader(), device="cpu"))) == 5


def test_error_of_reading_the_state_of_a_stream_is_not_hidden():
    class Fails(Tape):
        def state_dict(self):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(StreamedLoader(StatefulDataLoader(Fails(), 3), device="cpu"))
