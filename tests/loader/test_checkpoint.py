"""A run that is taken up from a checkpoint goes on as if it had never stopped."""

import io
import threading
from collections.abc import Iterable

import pytest
import torch
import torch.distributed.checkpoint.stateful
import torchdata.stateful_dataloader.stateful
from support.waiting import WAIT_S, until
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from gpuaug import ArgumentError, ArgumentTypeError, IteratorEndedError, StreamedLoader, TransformStage

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


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("feed", ["plain", "ring"])
def test_the_rest_of_an_epoch_is_that_of_the_run_that_went_on(kind, feed):
    make = SOURCES[kind]
    feed = "plain" if kind == "workers that persist" else feed
    expected, states = [], []
    with streamed(make, kind=kind, feed=feed) as whole:
        batches = iter(whole)
        states.append(saved(whole.state_dict()))
        for batch in batches:
            expected.append(bits(batch))
            states.append(saved(whole.state_dict()))
    assert len(expected) == BATCHES
    states[4] = stopped_at(4, streamed(make, kind=kind, feed=feed))
    for count in (0, 1, 4, BATCHES - 1, BATCHES):
        state = states[count]
        with streamed(make, kind=kind, feed=feed) as resumed:
            resumed.load_state_dict(state)
            rest = [bits(batch) for batch in resumed]
        assert same(rest, expected[count:]), count


@pytest.mark.parametrize("depth", [0, 2, 5])
@pytest.mark.parametrize("kind", ["in this process", "two workers", "a stream with a state, in this process"])
def test_the_state_is_the_wrapped_loaders_at_the_batch_that_was_handed_over(kind, depth):
    by_itself, loader = SOURCES[kind](), streamed(SOURCES[kind], kind=kind, depth=depth)
    alone, read_ahead = iter(by_itself), iter(loader)
    for count in range(1, BATCHES + 1):
        next(alone), next(read_ahead)
        state = loader.state_dict()
        source = state.pop("source")
        assert state == {"seed": 7, "epoch": 0, "batch": count, "ended": False, "chosen": False}
        assert repr(without_seeds(source)) == repr(without_seeds(by_itself.state_dict()))


@pytest.mark.parametrize("kind", ["in this process", "two workers"])
def test_each_of_two_iterators_has_its_own_state(kind):
    loader = streamed(SOURCES[kind])
    older = iter(loader)
    next(older), next(older)
    newer = iter(loader)
    next(newer)
    next(older)
    yielded = loader.state_dict()
    assert (yielded["epoch"], yielded["batch"]) == (0, 3)
    older.close(), newer.close()
    resumed = streamed(SOURCES[kind])
    resumed.load_state_dict(yielded)
    assert same([bits(batch) for batch in resumed], [bits(batch) for batch in streamed(SOURCES[kind])][3:])


def without_seeds(state):
    """What workers seed themselves by is drawn anew in each process."""
    if not isinstance(state, dict):
        return state
    return {key: without_seeds(value) for key, value in state.items() if key != "_base_seed"}


@pytest.mark.parametrize("kind", ["in this process", "two workers", "a stream"])
def test_epochs_that_follow_have_the_batches_of_the_wrapped_loader(kind):
    make, count = SOURCES[kind], 3
    by_itself = make()
    alone = iter(by_itself)
    for _ in range(count):
        next(alone)
    taken_up = make()
    taken_up.load_state_dict(by_itself.state_dict())
    sources = [[bits(batch) for batch in taken_up] for _ in range(3)]
    loader = StreamedLoader(make(), device="cpu")
    loader.load_state_dict(stopped_at(count, StreamedLoader(make(), device="cpu")))
    assert all(same([bits(batch) for batch in loader], expected) for expected in sources)


def test_the_draws_of_epochs_that_follow_are_those_of_the_run_that_went_on():
    def loader():
        return StreamedLoader(Counter(), [lambda images: torch.rand(3)], device="cpu", seed=7)

    went_on, resumed = loader(), loader()
    resumed.load_state_dict(stopped_at(3, loader()))
    epochs = [torch.cat(list(went_on)).tolist() for _ in range(3)]
    assert [torch.cat(list(resumed)).tolist() for _ in range(3)] == [epochs[0][9:], *epochs[1:]]
    assert epochs[1] != epochs[2]


def test_an_epoch_that_has_ended_is_followed_by_the_next():
    make = SOURCES["two workers"]
    ended = streamed(make)
    list(ended)
    state = saved(ended.state_dict())
    assert (state["epoch"], state["batch"], state["ended"]) == (0, BATCHES, True)
    resumed = streamed(make)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["ended"]
    assert same([bits(batch) for batch in resumed], [bits(batch) for batch in ended])
    assert resumed.state_dict()["epoch"] == 1


def test_a_state_from_before_the_first_batch():
    make = SOURCES["two workers"]
    loader = streamed(make)
    loader.set_epoch(4)
    state = saved(loader.state_dict())
    assert (state["epoch"], state["batch"], state["ended"]) == (4, 0, False)
    expected = [bits(batch) for batch in loader]
    assert loader.state_dict()["epoch"] == 4
    resumed = streamed(make)
    resumed.load_state_dict(state)
    assert same([bits(batch) for batch in resumed], expected)


def test_the_state_that_was_loaded_is_there_until_a_batch_was_handed_over():
    make = SOURCES["in this process"]
    state = stopped_at(3, streamed(make))
    resumed = streamed(make)
    resumed.load_state_dict(state)
    assert repr(resumed.state_dict()) == repr(state)
    next(iter(resumed))
    assert resumed.state_dict()["batch"] == 4


def test_the_seed_travels_with_the_state():
    make = SOURCES["in this process"]
    expected = [bits(batch) for batch in streamed(make)]
    resumed = streamed(make, seed=8)
    resumed.load_state_dict(stopped_at(2, streamed(make)))
    assert resumed.seed == 7
    assert same([bits(batch) for batch in resumed], expected[2:])


def test_a_loop_that_sets_the_epoch_is_taken_up_in_the_middle_of_it():
    make = SOURCES["in this process"]
    whole = streamed(make)
    whole.set_epoch(3)
    expected = [bits(batch) for batch in whole]
    stopped = streamed(make)
    stopped.set_epoch(3)
    resumed = streamed(make)
    resumed.load_state_dict(stopped_at(2, stopped))
    resumed.set_epoch(3)
    assert same([bits(batch) for batch in resumed], expected[2:])


class Reordered(Sampler):
    """An order for each epoch, as a sampler of a distributed run has it."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 2 * BATCHES

    def __iter__(self):
        return iter([(index * 5 + 3 * self.epoch) % (2 * BATCHES) for index in range(2 * BATCHES)])

    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.parametrize("chosen", [True, False])
def test_a_sampler_is_told_the_epoch_again_if_it_was_told_before(chosen):
    def make():
        return StreamedLoader(
            StatefulDataLoader(TensorDataset(torch.arange(2 * BATCHES)), 2, sampler=Reordered()), device="cpu"
        )

    def begun():
        loader = make()
        if chosen:
            loader.set_epoch(3)
        else:
            list(loader)
        return loader

    expected = [bits(batch) for batch in begun()]
    once, twice = make(), make()
    once.load_state_dict(stopped_at(2, begun()))
    twice.load_state_dict(stopped_at(2, once))
    assert same([bits(batch) for batch in twice], expected[4:])


def test_whether_the_epoch_was_set_is_each_iterators_own():
    loader = streamed(shuffled)
    loader.set_epoch(3)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer)
    assert (loader.state_dict()["epoch"], loader.state_dict()["chosen"]) == (4, False)
    next(older)
    assert (loader.state_dict()["epoch"], loader.state_dict()["chosen"]) == (3, True)


def test_the_seed_may_be_replaced_between_epochs():
    loader = StreamedLoader(Counter(), [lambda images: torch.rand(3)], device="cpu", seed=7)
    other = StreamedLoader(Counter(), [lambda images: torch.rand(3)], device="cpu", seed=8)
    list(loader), list(other)
    loader.seed = 8
    assert same([bits(batch) for batch in loader], [bits(batch) for batch in other])


def test_what_a_caller_does_to_a_state_stays_with_him():
    loader = streamed(shuffled)
    next(iter(loader))
    loader.state_dict()["source"].clear()
    state = loader.state_dict()
    assert state["source"]
    loader.load_state_dict(state)
    state["source"].clear()
    assert len(list(loader)) == BATCHES - 1


def test_a_loader_that_has_reached_its_end_with_its_last_batch_starts_over():
    loader = streamed(lambda: Prepared(shuffled()))
    state = stopped_at(BATCHES, streamed(lambda: Prepared(shuffled())))
    state["source"]["_iterator_finished"] = True  # as under Accelerate, which reads one batch ahead of those it gives
    loader.load_state_dict(state)
    next(iter(loader))
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (1, 1)


def test_an_end_that_another_thread_brings_about_is_none_of_the_epoch():
    asked = threading.Event()

    class Slow(Counter):
        def __iter__(self):
            for batch in super().__iter__():
                if batch.item() == 3:
                    asked.set()
                    until(lambda: not any(feed.is_open for feed in list(loader._feed_iterators)))
                yield batch

    def close():
        assert asked.wait(WAIT_S)
        loader.close()

    loader = StreamedLoader(Slow(), device="cpu", depth=0)
    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(IteratorEndedError):
        list(loader)
    closing.join()
    assert (loader.state_dict()["batch"], loader.state_dict()["ended"]) == (2, False)


def test_a_failed_batch_is_taken_up_again():
    make, failing = SOURCES["two workers"], [5]

    def fails_once(images):
        failing[0] -= 1
        if failing[0] == 0:
            raise ZeroDivisionError("once")
        return images + torch.rand(())

    expected = [bits(batch) for batch in StreamedLoader(make(), [lambda images: images + torch.rand(())], device="cpu", seed=1)]
    loader = StreamedLoader(make(), [fails_once], device="cpu", seed=1)
    with pytest.raises(ZeroDivisionError):
        list(loader)
    resumed = StreamedLoader(make(), [fails_once], device="cpu", seed=1)
    resumed.load_state_dict(loader.state_dict())
    assert same([bits(batch) for batch in resumed], expected[4:])


def test_an_epoch_whose_first_batch_fails_begins_with_it():
    make, fails = SOURCES["two workers"], [True]

    def stage(images):
        if fails[0]:
            raise ZeroDivisionError("at first")
        return images + torch.rand(())

    loader = StreamedLoader(make(), [stage], device="cpu", seed=1)
    with pytest.raises(ZeroDivisionError):
        list(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (0, 0)
    fails[0] = False
    resumed = StreamedLoader(make(), [stage], device="cpu", seed=1)
    resumed.load_state_dict(state)
    assert same(
        [bits(batch) for batch in resumed], [bits(batch) for batch in StreamedLoader(make(), [stage], device="cpu", seed=1)]
    )


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


def test_any_iterable_may_have_a_state():
    loader = StreamedLoader(Counter(), device="cpu", depth=5)
    for batch in loader:
        if batch.item() == 3:
            break
    state = loader.state_dict()
    assert (state["source"], state["batch"]) == ({"next": 3}, 3)
    resumed = StreamedLoader(Counter(), device="cpu")
    resumed.load_state_dict(state)
    assert [batch.item() for batch in resumed] == list(range(4, BATCHES + 1))
    assert (resumed.state_dict()["batch"], resumed.state_dict()["ended"]) == (BATCHES, True)


def test_a_state_that_cannot_be_had_costs_no_batch():
    loader = StreamedLoader(Counter(fails_at=3), device="cpu")
    for batch in loader:
        if batch.item() == 3:
            with pytest.raises(ZeroDivisionError, match="does not know"):
                loader.state_dict()
    assert loader.state_dict()["batch"] == BATCHES


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


PLAIN = DataLoader(TensorDataset(torch.ones(4)))


@pytest.mark.parametrize("source", [[torch.ones(2)], PLAIN, iter([torch.ones(2)]), Prepared(PLAIN)])
def test_there_is_a_state_only_where_the_wrapped_loader_has_one(source):
    without, around = StreamedLoader(source, device="cpu"), StreamedLoader(Prepared(shuffled()), device="cpu")
    for name in ("state_dict", "load_state_dict"):
        assert not hasattr(without, name)
        assert hasattr(around, name)
    for protocol in (torch.distributed.checkpoint.stateful.Stateful, torchdata.stateful_dataloader.stateful.Stateful):
        assert not isinstance(without, protocol)
        assert isinstance(around, protocol)
    assert list(without)


WRONG = [
    (None, ArgumentTypeError, "state must be a mapping, got NoneType."),
    ([1], ArgumentTypeError, "state must be a mapping, got list."),
    (
        {},
        ArgumentError,
        "state must hold seed, epoch, batch, ended, chosen, source, got one without seed, epoch, batch, ended, chosen, source.",
    ),
    (
        {"seed": 3, "epoch": 1, "batch": 2, "chosen": False, "source": {}},
        ArgumentError,
        "state must hold seed, epoch, batch, ended, chosen, source, got one without ended.",
    ),
]


@pytest.mark.parametrize(("state", "kind", "text"), WRONG)
def test_a_state_of_something_else_changes_nothing(state, kind, text):
    loader = streamed(shuffled)
    iterator = iter(loader)
    batches = [bits(next(iterator))]
    with pytest.raises(kind) as raised:
        loader.load_state_dict(state)
    assert str(raised.value) == f"{text} Pass what state_dict() of a StreamedLoader returned."
    batches += [bits(batch) for batch in iterator]
    assert same(batches, [bits(batch) for batch in streamed(shuffled)])


def test_an_iterator_that_is_open_ends_when_a_state_is_loaded():
    loader = streamed(SOURCES["two workers"])
    state = stopped_at(2, streamed(SOURCES["two workers"]))
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(state)
    with pytest.raises(IteratorEndedError, match="before its loader is closed or given a state, got next\\(\\) after that"):
        list(iterator)
    assert len(list(loader)) == BATCHES - 2


class Rewound(StatefulDataLoader):
    """Iterated in a way of its own."""

    def __iter__(self):
        return super().__iter__()


def test_a_stateful_loader_has_slots_and_is_left_as_it_was():
    own = shuffled(num_workers=2, pin_memory=True)
    before = {name: value for name, value in vars(own).items() if name != "_iterator"}
    loader = StreamedLoader(own, device="cpu", feed="ring")
    assert repr(loader).endswith("feed=ring)")
    for _ in range(2):
        list(loader)
    assert loader.stats().slot_batches > BATCHES
    assert {name: value for name, value in vars(own).items() if name != "_iterator"} == before
    assert own.state_dict()["_iterator_finished"]
    own.pin_memory = False
    assert all(isinstance(images, torch.Tensor) for images, _ in own), "by itself it collates as ever"


def test_a_stateful_loader_has_its_slots_again_after_it_was_left():
    loader = StreamedLoader(shuffled(num_workers=2), device="cpu", feed="ring")
    list(loader)
    for _ in range(6):
        before = loader.stats().slot_batches
        for number, _ in enumerate(loader):
            if number == 3:
                break
        assert loader.stats().slot_batches == before + 4


def test_a_stateful_loader_that_fails_to_start_is_left_as_it_was():
    own = shuffled(num_workers=1, multiprocessing_context="spawn", worker_init_fn=lambda _: None)
    before = own.collate_fn
    with pytest.raises((AttributeError, TypeError), match=r"(?i)pickle"):
        next(iter(StreamedLoader(own, device="cpu", feed="ring")))
    assert own.collate_fn is before


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: shuffled(num_workers=1, persistent_workers=True), "its workers persist, and so does its state in them"),
        (lambda: Rewound(Numbers(), 2, num_workers=1), "Rewound is iterated in a way of its own"),
    ],
)
def test_a_stateful_loader_whose_batches_come_as_they_are(make, reason):
    with pytest.raises(ArgumentError, match=reason):
        StreamedLoader(make(), device="cpu", feed="ring")


def test_a_loader_without_a_state_is_not_asked_for_one():
    class Silent(Iterable):
        def __iter__(self):
            return iter([torch.ones(1)])

        def state_dict(self):
            raise AssertionError("nobody could load it")

    assert len(list(StreamedLoader(Silent(), device="cpu"))) == 1
