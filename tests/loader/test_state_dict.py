"""``state_dict``: which loaders have one, which states are refused, and the slots of a ``StatefulDataLoader``."""

import copy
import warnings
from collections.abc import Iterable

import pytest
import torch
import torch.distributed.checkpoint.stateful
import torchdata.stateful_dataloader.stateful
from support.feed.overridden_loaders import AtOnce
from support.files.encoded import encoded
from support.loader.checkpoints import (
    BATCHES,
    Counter,
    Numbers,
    Prepared,
    Shards,
    Tape,
    bits,
    one_worker,
    same,
    shuffled,
    stopped_at,
    streamed,
)
from support.loader.resumed_loaders import Loaded, noisy
from support.video.videos import video
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from gpuaug import (
    ArgumentError,
    ArgumentTypeError,
    DecodeStage,
    GpuAugWarning,
    StreamedLoader,
    collate_encoded,
    read_clip,
)
from gpuaug.decode.decoders import cpu, registry
from gpuaug.decode.decoders.pyav import PyAv
from gpuaug.loader.checkpoint import _RELEASE_OF_VERSION, VERSION


def test_failing_source_state_dict_costs_no_batch():
    loader = StreamedLoader(Counter(fails_at=3), device="cpu")
    for batch in loader:
        if batch.item() == 3:
            with pytest.raises(ZeroDivisionError, match="does not know"):
                loader.state_dict()
    assert loader.state_dict()["batch"] == BATCHES


PLAIN = DataLoader(TensorDataset(torch.ones(4)))
PROTOCOLS = (torch.distributed.checkpoint.stateful.Stateful, torchdata.stateful_dataloader.stateful.Stateful)


@pytest.mark.parametrize("source", [[torch.ones(2)], (torch.ones(2),), PLAIN, Prepared(shuffled())])
def test_state_dict_exists_where_it_is_true(source):
    loader = StreamedLoader(source, device="cpu")
    assert all(hasattr(loader, name) for name in ("state_dict", "load_state_dict"))
    assert all(isinstance(loader, protocol) for protocol in PROTOCOLS)


WITHOUT = {
    "an iterator": lambda: iter([torch.ones(2)]),
    "prepared by a framework": lambda: Prepared(PLAIN),
    "a subclass that overrides how a DataLoader is iterated": lambda: AtOnce(TensorDataset(torch.ones(4))),
    "a stream": lambda: DataLoader(Shards()),
    "batches out of order": lambda: DataLoader(TensorDataset(torch.ones(4)), num_workers=1, in_order=False),
    "a sampler that gives its indices once": lambda: DataLoader(TensorDataset(torch.ones(4)), batch_sampler=iter([[0, 1]])),
}


@pytest.mark.parametrize("kind", WITHOUT)
def test_state_dict_does_not_exist_where_it_would_not_be_true(kind):
    without = StreamedLoader(WITHOUT[kind](), device="cpu")
    assert not any(hasattr(without, name) for name in ("state_dict", "load_state_dict"))
    assert not any(isinstance(without, protocol) for protocol in PROTOCOLS)
    assert list(without)


STATE = {
    "version": VERSION, "seed": 7, "epoch": 1, "batch": 2, "ended": False, "chosen": False,
    "source": {}, "ranks": 1, "stages": {},
}  # fmt: skip
NAMES = "version, seed, epoch, batch, ended, chosen, source, ranks, stages"
STRICT = "To resume with different batches, pass strict=False to load_state_dict."
WRONG = [
    ({**STATE, "seed": "x"}, ArgumentTypeError, "state['seed'] must be a whole number, got 'x'."),
    ({**STATE, "epoch": 1.5}, ArgumentTypeError, "state['epoch'] must be a whole number, got 1.5."),
    ({**STATE, "batch": -1}, ArgumentError, "state['batch'] must be 0 or more, got -1."),
    ({**STATE, "batch": True}, ArgumentTypeError, "state['batch'] must be a whole number, got True."),
    ({**STATE, "seed": 2**64}, ArgumentError, f"state['seed'] must be {2**64 - 1} or less, got {2**64}."),
    ({**STATE, "epoch": 2**64}, ArgumentError, f"state['epoch'] must be {2**64 - 1} or less, got {2**64}."),
    ({**STATE, "ended": "no"}, ArgumentTypeError, "state['ended'] must be True or False, got 'no'."),
    ({**STATE, "chosen": None}, ArgumentTypeError, "state['chosen'] must be True or False, got None."),
    ({**STATE, "version": 0}, ArgumentError, "state['version'] must be 1 or more, got 0."),
    (None, ArgumentTypeError, "state must be a mapping, got NoneType."),
    ([1], ArgumentTypeError, "state must be a mapping, got list."),
    ({**STATE, "ranks": "2"}, ArgumentTypeError, "state['ranks'] must be a whole number, got '2'."),
    ({}, ArgumentError, f"state must have the keys {NAMES}, got no {NAMES}."),
    (
        {key: value for key, value in STATE.items() if key != "ended"},
        ArgumentError,
        f"state must have the keys {NAMES}, got no ended.",
    ),
]


@pytest.mark.parametrize(("state", "kind", "text"), WRONG)
def test_invalid_state_dict_is_refused_and_changes_nothing(state, kind, text):
    loader = streamed(shuffled)
    iterator = iter(loader)
    batches = [bits(next(iterator))]
    with pytest.raises(kind) as raised:
        loader.load_state_dict(state)
    assert str(raised.value) == f"{text} Pass what state_dict() of a StreamedLoader returned."
    batches += [bits(batch) for batch in iterator]
    assert same(batches, [bits(batch) for batch in streamed(shuffled)])


@pytest.mark.parametrize("strict", [True, False])
def test_state_of_another_version_is_refused_with_the_release_that_reads_it(strict):
    way_out = 'Resume with the release that saved it: pip install "gpuaug=={}".'
    way_outs = {version: way_out.format(release) for version, release in _RELEASE_OF_VERSION.items()}
    assert [*way_outs, VERSION] == list(range(1, VERSION + 1)), "each older version is of a release"
    for version, way_out in {
        **way_outs,
        VERSION + 1: "A newer release of gpuaug saved this state. Install that release.",
    }.items():
        with pytest.raises(ArgumentError) as raised:
            streamed(shuffled).load_state_dict({"version": version}, strict=strict)
        assert str(raised.value) == f"state['version'] must be {VERSION}, got {version}. {way_out}"


@pytest.mark.parametrize("name", ["stages", "decoders"])
@pytest.mark.parametrize(("entries", "got"), [(1, "1"), ({"first": None}, "{'first': None}"), ({1: "first"}, "{1: 'first'}")])
def test_entries_by_stage_are_text(name, entries, got):
    with pytest.raises(ArgumentTypeError) as raised:
        streamed(shuffled).load_state_dict({**STATE, name: entries})
    assert f"state[{name!r}] must be a mapping of names to text, got {got}" in str(raised.value)


def test_refused_state_of_another_loader_leaves_iterators_open():
    plain = DataLoader(Numbers(), 2)
    for make, state, text in [
        (
            one_worker,
            stopped_at(2, streamed(shuffled)),
            "num_workers must be 0, as in the saved run, got 1. A StatefulDataLoader resumes with the same "
            "number of workers only; a plain DataLoader with any number.",
        ),
        (
            shuffled,
            stopped_at(2, streamed(lambda: plain)),
            "state['source'] must be the state of a StatefulDataLoader, got {'epochs': {}, 'generators': {}, "
            "'order': {'batches': 2, 'checksum': 2432700938}, 'rank': 0, ...}. "
            "Pass what state_dict() of a StreamedLoader around a StatefulDataLoader returned.",
        ),
    ]:
        loader = streamed(make)
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(ArgumentError) as raised:
            loader.load_state_dict(state)
        assert str(raised.value) == text
        assert len(list(iterator)) == BATCHES - 1


class Rewound(StatefulDataLoader):
    """Iterated in a way of its own."""

    def __iter__(self):
        return super().__iter__()


def test_stateful_dataloader_uses_ring_and_is_not_changed():
    own = shuffled(num_workers=1, pin_memory=True)
    before = {name: value for name, value in vars(own).items() if name != "_iterator"}
    loader = StreamedLoader(own, device="cpu", feed="ring")
    assert "feed=ring (" in repr(loader)
    for _ in range(2):
        list(loader)
    assert loader.stats().slot_batches > BATCHES
    assert {name: value for name, value in vars(own).items() if name != "_iterator"} == before
    assert own.state_dict()["_iterator_finished"]
    own.pin_memory = False
    assert all(isinstance(images, torch.Tensor) for images, _ in own), "by itself it collates as ever"


def test_stateful_dataloader_that_fails_to_start_is_not_changed():
    own = shuffled(num_workers=1, multiprocessing_context="spawn", worker_init_fn=lambda _: None)
    before = own.collate_fn
    with pytest.raises((AttributeError, TypeError), match=r"(?i)pickle|local object"):
        next(iter(StreamedLoader(own, device="cpu", feed="ring")))
    assert own.collate_fn is before


@pytest.mark.parametrize("kind", [StatefulDataLoader, Rewound])
def test_stateful_dataloaders_with_persistent_workers_cannot_use_ring(kind):
    with pytest.raises(ArgumentError, match="persistent workers hold the state of the loader"):
        StreamedLoader(kind(Numbers(), 2, num_workers=1, persistent_workers=True), device="cpu", feed="ring")


def test_state_dict_without_load_state_dict_is_not_called():
    class Silent(Iterable):
        def __iter__(self):
            return iter([torch.ones(1)])

        def state_dict(self):
            raise AssertionError("nobody could load it")

    assert len(list(StreamedLoader(Silent(), device="cpu"))) == 1


DECODED = {
    "images": (encoded, cpu.Cpu, "jpeg", "find_clips"),
    "clips": (lambda: read_clip(video(), 2), PyAv, "jpeg, clips", "find"),
}
"""Files, the class of their decoder, its key in a state, and the function that finds the other decoders."""


@pytest.mark.parametrize("case", DECODED)
def test_state_names_the_decoders_and_another_one_is_refused(monkeypatch, case):
    make, kind, key, other = DECODED[case]
    # Decoders that no batch needs are not looked for, so no warning tells of them.
    monkeypatch.setattr(registry, other, lambda *_: pytest.fail(f"{other} was called"))

    class Files(Counter):
        def __iter__(self):
            return (collate_encoded([(make(), number.item())]) for number in super().__iter__())

    def loader():
        return StreamedLoader(Files(), [DecodeStage(name="jpeg")], device="cpu")

    first = loader()
    next(iter(first))
    state = first.state_dict()
    assert state["decoders"] == {key: f"{kind.name}: {kind().version}"}
    same_decoder = loader()
    with warnings.catch_warnings(action="error"):
        same_decoder.load_state_dict(state)
    assert same_decoder.state_dict()["decoders"] == state["decoders"]
    monkeypatch.setattr(kind, "version", "another 2.0")
    another = loader()
    text = (
        f"The decoder of stage {key!r} must be {state['decoders'][key]}, as in the state, got {kind.name}: another 2.0. "
        "Pixels may differ by a few values; for equal pixels, resume with the decoder that made the checkpoint."
    )
    with pytest.raises(ArgumentError) as raised:
        another.load_state_dict(state)
    assert str(raised.value) == f"{text} {STRICT}"
    with pytest.warns(GpuAugWarning, match="Batches from 1 on differ from an uninterrupted run") as warned:
        another.load_state_dict(state, strict=False)
    assert len(warned) == 1
    assert "decoders" not in StreamedLoader(Counter(), device="cpu").state_dict()


# Loaders and datasets with a state of their own


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


def test_dataset_whose_state_needs_arguments_is_refused():
    class Streamed(Loaded):
        def state_dict(self, num_samples, from_beginning):
            return {}

        def load_state_dict(self, state):
            pass

    advice = r"Use the loader of its package, such as its StreamingDataLoader\.$"
    with pytest.raises(TypeError, match=rf"got Streamed: missing a required argument: 'num_samples'\. {advice}"):
        StreamedLoader(StatefulDataLoader(Streamed(), 3), device="cpu")


def test_error_of_reading_the_state_of_a_stream_is_not_hidden():
    class Fails(Tape):
        def state_dict(self):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(StreamedLoader(StatefulDataLoader(Fails(), 3), device="cpu"))
