"""The table of loaders in ``docs/resume.md``: what a stop in any epoch, at any batch, once and twice, does to the batches."""

import copy
import re
from functools import partial

import pytest
import torch
from support.loader.checkpoints import Counter, Shards, Tape, stopped_at
from support.loader.resumed_loaders import GLOBAL, OPTIONS, WORKERS, Loaded, generator, noisy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from gpuaug import GpuAugError, StreamedLoader

EPOCHS = 3
DATA = Loaded()


def distributed(kind):
    return {"sampler": kind(DATA, num_replicas=2, rank=1, seed=3)}


class Hidden(Sampler):
    """Draws from a generator that is not an attribute ``generator``, when the iterator is created."""

    def __init__(self):
        self.order = generator()

    def __len__(self):
        return 14

    def __iter__(self):
        return iter(torch.randperm(14, generator=self.order).tolist())


class HiddenLate(Hidden):
    """Draws when the iterator is read. The first batches of all epochs are equal."""

    def __iter__(self):
        yield from range(3)
        yield from (3 + torch.randperm(11, generator=self.order)).tolist()


class Counting(Hidden):
    """Counts epochs without ``set_epoch``."""

    epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter([(index * 5 + self.epoch) % 14 for index in range(14)])


class CountingLate(Counting):
    """Counts epochs when the iterator is read."""

    def __iter__(self):
        yield from super().__iter__()


HIDDEN = {
    f"{sampler.__name__}, {where}": options
    for sampler in (Hidden, HiddenLate, Counting, CountingLate)
    for where, options in {
        "sampler": lambda sampler=sampler: {"batch_size": 3, "sampler": sampler()},
        "batch sampler": lambda sampler=sampler: {"batch_sampler": BatchSampler(sampler(), 3, drop_last=False)},
        "sampler of batches": lambda sampler=sampler: {
            "batch_size": None,
            "sampler": BatchSampler(sampler(), 3, drop_last=False),
            "collate_fn": torch.tensor,
        },
    }.items()
}
"""Arguments of a ``DataLoader`` whose order depends on more than an epoch and a ``generator``."""


SEEDED, WEIGHTS = "with a `generator`", range(1, 15)
ORDERS = {
    "in order": dict,
    "`shuffle=True`, a `generator`": lambda: {"shuffle": True, "generator": generator()},
    f"`RandomSampler` {SEEDED}": lambda: {"sampler": RandomSampler(DATA, generator=generator())},
    f"`RandomSampler` {SEEDED}, more samples than the dataset has": lambda: {
        "sampler": RandomSampler(DATA, num_samples=33, generator=generator())
    },
    "`WeightedRandomSampler`": lambda: {"sampler": WeightedRandomSampler(WEIGHTS, 14)},
    f"`WeightedRandomSampler` {SEEDED}": lambda: {"sampler": WeightedRandomSampler(WEIGHTS, 14, generator=generator())},
    "`SubsetRandomSampler`": lambda: {"sampler": SubsetRandomSampler(range(2, 14))},
    f"`SubsetRandomSampler` {SEEDED}": lambda: {"sampler": SubsetRandomSampler(range(2, 14), generator=generator())},
    "`DistributedSampler`, `set_epoch` each epoch": lambda: distributed(DistributedSampler),
    "a sampler whose generator is not its attribute `generator`": lambda: {"sampler": Hidden()},
}


def read(source, tells):
    """Batches of some epochs, and the state behind each batch and each epoch, with torch's generator as it was then."""
    loader, epochs, states = StreamedLoader(source, [noisy], device="cpu", seed=7), [], {}
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
    loader, rest = StreamedLoader(make(), [noisy], device="cpu"), []
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


def measured(make, positions, *, tells=False, make_resumed=None):
    """``"exact"``, or what the loader does where it cannot be: ``"no state"``, ``"an error"`` or ``"other batches"``.

    ``make_resumed`` creates the loader of the resumed run; the default is ``make``.
    """
    if not hasattr(StreamedLoader(make(), device="cpu"), "state_dict"):
        return "no state"
    torch.manual_seed(3)
    epochs, states = read(make(), tells)
    result = "exact"
    for epoch, batch, stops_again in positions(epochs):
        try:
            rest = resumed_from(make_resumed or make, states[epoch, batch], (epoch, batch), tells, stops_again=stops_again)
        except GpuAugError:
            result = "an error"
            continue
        if rest != [epochs[epoch][batch:], *epochs[epoch + 1 :]]:
            return f"other batches: from {epoch}, {batch}{', stopped again' if stops_again else ''}"
    return result


def some_positions(epochs):
    """Stops in each epoch: at its first, a middle and its last batch. Every other resumed run stops again.

    Returns:
        List of (epoch, number of its batches before the stop, whether the resumed run stops again).
    """
    return [(0, 1, False), (0, len(epochs[0]), True), (1, 0, False), (1, 3, True), (2, len(epochs[2]), False)]


def few_positions(epochs):
    """Stops of loaders with workers, which take time to start."""
    return [(*position, stops_again) for position in [(0, 1), (1, 3), (2, 0)] for stops_again in (False, True)]


def middle_and_end_of_second_epoch(epochs):
    return [(1, 3, False), (2, 0, False)]


def first_and_second_epoch(epochs):
    return [(0, len(epochs[0]), False), (1, 3, True)]


def middle_of_second_epoch(epochs):
    return [(1, 3, True)]


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


def node():
    samples = nodes.SamplerWrapper(RandomSampler(DATA, generator=generator()))
    batches = nodes.Batcher(nodes.Mapper(samples, torch.tensor), 3, drop_last=False)
    return nodes.Loader(nodes.Mapper(batches, torch.stack), restart_on_stop_iteration=False)


def batch_of(rows):
    return torch.stack([row["number"] for row in rows])


def of_hugging_faces(**shuffle):
    def stream(**options):
        import datasets  # takes a second

        found = datasets.Dataset.from_dict({"number": list(range(15))}).to_iterable_dataset(num_shards=2)
        found = found.shuffle(seed=3, **shuffle) if shuffle else found
        return StatefulDataLoader(found.with_format("torch"), 3, collate_fn=batch_of, **options)

    return stream


def of(kind, dataset, order):
    return lambda **options: kind(dataset(), 3, **order(), **options)


PLAIN, STATEFUL, PERSISTENT = "`DataLoader`", "`StatefulDataLoader`", {"num_workers": 2, "persistent_workers": True}
MADE = {
    **{(PLAIN, order): of(DataLoader, Loaded, options) for order, options in ORDERS.items()},
    **{(STATEFUL, order): of(StatefulDataLoader, Loaded, options) for order, options in ORDERS.items()},
    (PLAIN, "`shuffle=True`"): lambda **options: DataLoader(DATA, 3, shuffle=True, **options),
    (STATEFUL, "`shuffle=True`"): lambda **options: StatefulDataLoader(DATA, 3, shuffle=True, **options),
    (PLAIN, "a stream"): lambda **options: DataLoader(Shards(), 3, **options),
    (PLAIN, "`in_order=False`, with workers"): lambda **_: DataLoader(DATA, 3, num_workers=2, in_order=False),
    ("a list of batches", "in order"): lambda **_: list(torch.arange(14).split(3)),
    ("a generator", "in order"): lambda **_: iter(torch.arange(14).split(3)),
    ("an iterable with `state_dict`", "its own"): lambda **_: Counter(),
    (STATEFUL, "torchdata's `StatefulDistributedSampler`, `set_epoch` each epoch"): of(
        StatefulDataLoader, Loaded, lambda: distributed(StatefulDistributedSampler)
    ),
    (STATEFUL, f"`RandomSampler` {SEEDED}, a dataset with `state_dict`"): of(
        StatefulDataLoader, Held, ORDERS[f"`RandomSampler` {SEEDED}"]
    ),
    (STATEFUL, "a stream without a state"): lambda **options: StatefulDataLoader(Shards(), 3, **options),
    (STATEFUL, "a stream with `state_dict`"): lambda **options: StatefulDataLoader(Tape(), 3, **options),
    (STATEFUL, "a stream with `state_dict`, persistent workers"): lambda **_: StatefulDataLoader(Tape(), 3, **PERSISTENT),
    (STATEFUL, "a stream of Hugging Face's"): of_hugging_faces(),
    (STATEFUL, "a stream of Hugging Face's, shuffled, `set_epoch` each epoch"): of_hugging_faces(buffer_size=6),
    ("`Loader` of torchdata's nodes", f"`RandomSampler` {SEEDED}"): lambda **_: node(),
}
"""Loaders, by the first two columns of the table."""

QUICK = [
    (STATEFUL, order, {"num_workers": count})
    for order, count in (
        (f"`WeightedRandomSampler` {SEEDED}", 1),
        ("a stream without a state", 2),
        ("a stream of Hugging Face's, shuffled, `set_epoch` each epoch", 1),
    )
]


@pytest.fixture(scope="module")
def table(request):
    page = (request.config.rootpath / "docs" / "resume.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (exact|an error|no state) \|$", page, re.MULTILINE)
    return {(loader, order): result for loader, order, result in rows}


def test_the_table_has_every_loader(table):
    assert list(table) == sorted(MADE, key=list(table).index)
    assert set(table.values()) == {"exact", "an error", "no state"}


@pytest.mark.parametrize(("loader", "order"), MADE)
def test_the_table_says_what_a_stop_does(loader, order, table):
    positions = middle_and_end_of_second_epoch if "persistent" in order else some_positions
    found = measured(MADE[loader, order], positions, tells=order.endswith("`set_epoch` each epoch"))
    assert found == table[loader, order]


NOT_SET_BACK = {
    ("an iterable with `state_dict`", "its own"),
    *[key for key in MADE if key[0] == "`Loader` of torchdata's nodes"],
    (STATEFUL, f"`RandomSampler` {SEEDED}, a dataset with `state_dict`"),
    (STATEFUL, "a stream with `state_dict`"),
}
"""Loaders, read in this process, that a state from before the first batch does not set back: loading it raises an error."""

HAS_STATE = {key: make for key, make in MADE.items() if hasattr(StreamedLoader(make(), device="cpu"), "state_dict")}
SET_BACK = [
    *[pytest.param(*key, {}, id=", ".join(key)) for key in HAS_STATE if "persistent" not in key[1] and "not its" not in key[1]],
    *[
        pytest.param(kind, order, options, id=f"{kind}, {order}, workers", marks=() if order in quick else pytest.mark.slow)
        for kind, order in HAS_STATE
        if kind in (PLAIN, STATEFUL) and "not its" not in order and "persistent" not in order
        for options, quick in [
            ({"num_workers": 1}, ["a stream with `state_dict`"]),
            (PERSISTENT, ["`shuffle=True`, a `generator`"]),
        ]
        if options is not PERSISTENT or f"{order}, persistent workers" not in [other for _, other in MADE]
    ],
]


@pytest.mark.parametrize(("kind", "order", "options"), SET_BACK)
@pytest.mark.every(2)
def test_a_state_from_before_the_first_batch_begins_the_run_anew(kind, order, options):
    tells = order.endswith("`set_epoch` each epoch")

    def run(loader, epochs=2):
        torch.manual_seed(3)
        result = []
        for epoch in range(epochs):
            if tells:
                loader.set_epoch(epoch)
            result.append([batch.tolist() for batch in loader])
        return result

    def read_one(loader):
        batches = iter(loader)
        next(batches)
        batches.close()

    with StreamedLoader(MADE[kind, order](**options), device="cpu", seed=7) as loader:
        first = copy.deepcopy(loader.state_dict())
        expected = run(loader)
    with StreamedLoader(MADE[kind, order](**options), device="cpu", seed=7) as loader:
        loader.load_state_dict(first)
        read_one(loader)
        second = copy.deepcopy(loader.state_dict())
        for has_read in (read_one, run, lambda loader: loader.load_state_dict(second)):
            has_read(loader)
            if (kind, order) in NOT_SET_BACK and not options.get("num_workers"):
                with pytest.raises(GpuAugError, match="has been read"):
                    loader.load_state_dict(first)
                continue
            loader.load_state_dict(first)
            assert repr(loader.state_dict()) == repr(first)
            assert run(loader) == expected


OTHER_SAMPLERS = [
    pytest.param(kind, options, id=f"{kind}, {options}", marks=[pytest.mark.slow] * bool(options))
    for kind in [*OPTIONS, *GLOBAL]
    for options in WORKERS
]


@pytest.mark.parametrize(("kind", "options"), OTHER_SAMPLERS)
def test_any_sampler_that_depends_on_its_epoch_and_its_generators_is_exact(kind, options):
    positions = few_positions if options else first_and_second_epoch
    assert measured(lambda: DataLoader(Loaded(), **{**OPTIONS, **GLOBAL}[kind](), **options), positions) == "exact"


def every_position_but_the_first(epochs):
    """Stops at the ends of epochs and after each batch but the first, which ``HiddenLate`` has in every epoch."""
    return [(epoch, 0, False) for epoch in range(1, EPOCHS)] + [
        (epoch, batch, False) for epoch in range(EPOCHS) for batch in range(2, len(epochs[epoch]) + 1)
    ]


class Bulk(Loaded):
    """Accepts lists of indices."""

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("options", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.every(5)
def test_order_that_no_state_describes_is_never_another_silently(options, kind):
    assert measured(lambda: kind(Bulk(), **options()), every_position_but_the_first) == "an error"


def test_order_that_no_state_describes_is_accepted_if_not_strict():
    def make():
        return StreamedLoader(DataLoader(DATA, 3, sampler=Hidden()), device="cpu", seed=7)

    ended = make()
    for _ in range(2):
        list(ended)
    resumed = make()
    with pytest.raises(GpuAugError, match=r"To continue with another order, pass strict=False to load_state_dict\.$"):
        resumed.load_state_dict(ended.state_dict())
    resumed.load_state_dict(ended.state_dict(), strict=False)
    assert len(list(resumed)) == len(resumed)


QUICK_ORDERS = ("`shuffle=True`, a `generator`", "`WeightedRandomSampler`", f"`RandomSampler` {SEEDED}")
PERSISTENT_WORKER = {"num_workers": 1, "persistent_workers": True}
IN_WORKERS = [
    *(pytest.param(*row, middle_of_second_epoch) for row in QUICK),
    *(
        pytest.param(*row, options, few_positions, marks=pytest.mark.slow)
        for row in MADE
        for options in ({"num_workers": 2}, PERSISTENT)
        if row[0] in (PLAIN, STATEFUL)
    ),
]


@pytest.mark.parametrize(("loader", "order", "options", "positions"), IN_WORKERS)
def test_the_table_holds_with_workers(loader, order, options, positions, table):
    found = measured(lambda: MADE[loader, order](**options), positions, tells=order.endswith("`set_epoch` each epoch"))
    persists = order.endswith("with `state_dict`") and options is PERSISTENT
    assert found == ("an error" if persists else table[loader, order])


ONE_WORKER = {"num_workers": 1}
OTHER_PERSISTENCE = [
    pytest.param(*row, options, id=f"{row[0]}, {row[1]}, {number}", marks=() if row[1] in QUICK_ORDERS else pytest.mark.slow)
    for row in MADE
    if row[0] in (PLAIN, STATEFUL) and row[1] in (*ORDERS, "`shuffle=True`") and "not its" not in row[1]
    for number, options in enumerate(
        [(PERSISTENT_WORKER, ONE_WORKER), (ONE_WORKER, PERSISTENT_WORKER), (PERSISTENT_WORKER, {})]
    )
    if options[1] or row[0] == PLAIN  # a StatefulDataLoader resumes with the same number of workers only
]


@pytest.mark.parametrize(("loader", "order", "options"), OTHER_PERSISTENCE)
@pytest.mark.every(2)
def test_other_persistent_workers_are_exact_or_an_error(loader, order, options):
    makes = [partial(MADE[loader, order], **given) for given in options]
    tells = order.endswith("`set_epoch` each epoch")
    found = measured(makes[0], middle_of_second_epoch, tells=tells, make_resumed=makes[1])
    shares_generator = order in (
        "`shuffle=True`",
        "`shuffle=True`, a `generator`",
        "`WeightedRandomSampler`",
        "`SubsetRandomSampler`",
    )
    assert found == ("an error" if shares_generator or loader == STATEFUL else "exact")


def test_stream_of_hugging_faces_that_is_not_told_its_epoch():
    assert measured(of_hugging_faces(buffer_size=6), middle_of_second_epoch) == "exact"
    assert measured(of_hugging_faces(), middle_of_second_epoch, tells=True) == "exact"


@pytest.mark.parametrize("buffer_size", [None, 6])
def test_stream_of_hugging_faces_is_read_again_only_if_it_is_shuffled(buffer_size):
    import datasets  # takes a second

    numbers_read = []

    def read(example):
        numbers_read.append(example["number"])
        return example

    def made():
        stream = datasets.Dataset.from_dict({"number": list(range(15))}).to_iterable_dataset().map(read)
        stream = stream if buffer_size is None else stream.shuffle(seed=1, buffer_size=buffer_size)
        return StreamedLoader(StatefulDataLoader(stream, 3), device="cpu", depth=0)

    resumed = made()
    resumed.load_state_dict(stopped_at(2, made()))
    numbers_read.clear()
    batches = list(resumed)
    assert len(batches) == 3
    assert len(numbers_read) == (9 if buffer_size is None else 15)


@pytest.mark.parametrize(
    ("kind", "sampler"),
    [
        (DataLoader, DistributedSampler),
        (StatefulDataLoader, DistributedSampler),
        (StatefulDataLoader, StatefulDistributedSampler),
    ],
)
def test_set_epoch_of_another_epoch_begins_that(kind, sampler):
    def made():
        return StreamedLoader(kind(DATA, 3, **distributed(sampler)), device="cpu")

    whole, resumed = made(), made()
    resumed.load_state_dict(stopped_at(2, made()))
    for loader in (whole, resumed):
        loader.set_epoch(4)
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in whole]
    assert (resumed.state_dict()["epoch"], resumed.state_dict()["batch"]) == (4, len(whole))


@pytest.mark.parametrize("sampler", [DistributedSampler, StatefulDistributedSampler])
def test_epoch_that_a_sampler_was_told_by_the_program_is_resumed(sampler):
    def made(epoch):
        source = StatefulDataLoader(DATA, 3, **distributed(sampler))
        source.sampler.set_epoch(epoch)
        return StreamedLoader(source, device="cpu")

    resumed = made(0)
    resumed.load_state_dict(stopped_at(1, made(3)))
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in made(3)][1:]
