"""A plain ``DataLoader``, or a list, goes on after the batches that were had, and loads none of them."""

import gc
from multiprocessing import active_children

import pytest
import torch
from support.loader.checkpoints import saved, stopped_at
from support.loader.resumed_loaders import (
    COUNT,
    GLOBAL,
    OPTIONS,
    QUICK,
    SAMPLES,
    WORKERS,
    Epochs,
    Loaded,
    begun_in_second_epoch,
    generator,
    loader,
    noisy,
    values,
)
from support.process import processes
from support.process.waiting import until
from torch.utils.data import DataLoader

from gpuaug import GpuAugError, StreamedLoader
from gpuaug.loader.inspection import restored_at_end

IN_PROCESS, TWO_WORKERS, PERSISTENT = WORKERS
QUICK_WORKERS = {"shuffled by torch's generator": TWO_WORKERS, "shuffled by a generator": PERSISTENT}
"""Workers of the cases that are not slow, by kind of loader."""

KINDS = [
    pytest.param(
        kind,
        workers,
        id=f"{kind}, {name}",
        marks=[pytest.mark.slow] if workers and workers is not QUICK_WORKERS.get(kind) else [],
    )
    for kind in [*OPTIONS, *GLOBAL]
    for workers, name in zip(WORKERS, ["in process", "workers", "persistent workers"], strict=True)
]


@pytest.mark.parametrize(("kind", "workers"), KINDS)
def test_epoch_goes_on_with_the_next_batch(kind, workers):
    options = {**OPTIONS, **GLOBAL}[kind]
    feed = "plain" if workers.get("persistent_workers") and kind in GLOBAL else "ring"
    # A DataLoader with workers calls iter(sampler) twice per epoch, and persistent workers have one seed for all epochs.
    has_own_batches = kind == "batches that are drawn at once" or workers.get("persistent_workers")
    torch.manual_seed(1)
    with loader(options, workers if has_own_batches else None, depth=0) as whole:
        epochs = [values(whole) for _ in range(3)]
    state = begun_in_second_epoch(loader(options, workers, feed, depth=5))
    before = torch.get_rng_state()  # as the program keeps it in its checkpoint
    if kind in OPTIONS:
        before = torch.Generator().manual_seed(2).get_state()
    torch.set_rng_state(before)
    with loader(options, workers, feed) as resumed:
        resumed.load_state_dict(state)
        assert values(resumed) == epochs[1][COUNT:]
        assert torch.equal(torch.get_rng_state(), before), "the user's program drew for this epoch before it was stopped"
        assert values(resumed) == epochs[2]
    assert 0 < len(epochs[1][COUNT:]) < len(epochs[1])


PAIRS = [(0, 1), (1, 0), (0, 2), (1, 2), (2, 1)]
QUICK_PAIRS = [("shuffled by a generator", 0, 1), ("shuffled by torch's generator", 1, 0)]


@pytest.mark.parametrize(
    ("kind", "then", "now"),
    [
        pytest.param(kind, *pair, marks=() if (kind, *pair) in QUICK_PAIRS else pytest.mark.slow)
        for kind in sorted(QUICK)
        for pair in PAIRS
    ],
)
def test_any_number_of_workers_goes_on(kind, then, now):
    options = {**OPTIONS, **GLOBAL}[kind]
    state = begun_in_second_epoch(loader(options, WORKERS[then]))
    torch.manual_seed(1)
    with loader(options, WORKERS[then] if then == 2 else None) as whole:
        expected = [values(whole) for _ in range(2)][1][COUNT:]
    with loader(options, WORKERS[now]) as resumed:
        resumed.load_state_dict(state)
        assert values(resumed) == expected


@pytest.mark.parametrize("workers", WORKERS, ids=["in process", "workers", "persistent workers"])
@pytest.mark.parametrize("kind", ["shuffled by a generator", pytest.param("an order for each epoch", marks=pytest.mark.slow)])
def test_epoch_after_an_ended_one(kind, workers):
    torch.manual_seed(1)
    with loader(OPTIONS[kind], workers if workers is PERSISTENT else IN_PROCESS) as whole:
        list(whole)
        state = saved(whole.state_dict())
        expected = [values(whole) for _ in range(2)]
    assert state["ended"]
    with loader(OPTIONS[kind], workers) as resumed:
        resumed.load_state_dict(state)
        assert [values(resumed) for _ in range(2)] == expected


@pytest.mark.parametrize("kind", [*OPTIONS, *GLOBAL])
def test_no_sample_of_batches_that_were_had_is_loaded(kind):
    options = {**OPTIONS, **GLOBAL}[kind]
    with loader(options) as first:
        iterator = iter(first)
        for _ in range(COUNT):
            next(iterator)
        state = first.state_dict()
        list(iterator)
        rest = first.dataset.asked
    with loader(options) as resumed:
        resumed.load_state_dict(state)
        list(resumed)
        assert resumed.dataset.asked == rest[-len(resumed.dataset.asked) :]
        assert len(resumed.dataset.asked) < len(rest)


@pytest.mark.parametrize("count", [0, 1, 6, 7])
@pytest.mark.parametrize("kind", [list, tuple])
def test_list_goes_on_with_the_next_batch(kind, count):
    def made():
        return StreamedLoader(kind(torch.full((2,), index) for index in range(7)), [noisy], device="cpu", seed=7)

    expected = [values(whole := made()), values(whole)]
    resumed = made()
    resumed.load_state_dict(stopped_at(count, made()))
    assert [values(resumed), values(resumed)] == [expected[0][count:], expected[1]]


def test_resumed_epoch_can_be_stopped_again():
    options = OPTIONS["shuffled by a generator"]
    once, twice = loader(options), loader(options)
    once.load_state_dict(stopped_at(2, loader(options)))
    state = stopped_at(2, once)
    assert state["batch"] == 4
    twice.load_state_dict(state)
    assert values(twice) == values(loader(options))[4:]


@pytest.mark.parametrize("workers", WORKERS, ids=["in process", "workers", "persistent workers"])
def test_state_is_loaded_in_the_process_that_made_it(workers):
    options, others = OPTIONS["shuffled by a generator"], workers if workers is PERSISTENT else IN_PROCESS
    with loader(options, others) as whole:
        expected = [values(whole) for _ in range(3)]
    with loader(options, workers) as made:
        list(made)
        made.load_state_dict(begun_in_second_epoch(loader(options, others)))
        assert [values(made), values(made)] == [expected[1][COUNT:], expected[2]]


def test_running_workers_are_left_the_sampler_they_have():
    with loader(OPTIONS["shuffled by a generator"], WORKERS[2]) as made:
        list(made)
        list(made)
        assert made.loader._iterator._index_sampler is made.loader.batch_sampler


def test_wrapped_loader_is_restored_at_end():
    made = loader(OPTIONS["shuffled by a generator"])
    before = dict(vars(made.loader))
    made.load_state_dict(begun_in_second_epoch(loader(OPTIONS["shuffled by a generator"])))
    list(made)
    assert vars(made.loader) == before
    assert sorted(torch.cat(list(made.loader)).tolist()) == list(range(SAMPLES))


@pytest.mark.parametrize("feed", ["plain", "ring"])
def test_workers_that_persist_end_with_the_loader(feed):
    others = set(active_children())
    made = loader(OPTIONS["shuffled by a generator"], WORKERS[2], feed)
    list(made)
    workers = set(active_children()) - others
    assert len(workers) == 1
    gc.disable()
    try:
        del made
        until(lambda: not any(worker.is_alive() for worker in workers))
    finally:
        gc.enable()


def test_seeds_of_workers_are_not_those_of_an_earlier_epoch():
    def seeds(state=None):
        with StreamedLoader(DataLoader(Seeds(), generator=generator(), num_workers=1), device="cpu", seed=7) as made:
            if state is not None:
                made.load_state_dict(state)
            return {seed for batch in made for seed in batch.tolist()}, made.state_dict()

    first, _ = seeds()
    state = stopped_at(1, StreamedLoader(DataLoader(Seeds(), generator=generator(), num_workers=1), device="cpu", seed=7))
    again = seeds(state)[0]
    assert again == seeds(state)[0]
    assert not first & again


class Seeds(Loaded):
    def __getitem__(self, index):
        return torch.tensor(torch.initial_seed())


def test_set_epoch_of_another_epoch_begins_that():
    options = OPTIONS["one of two ranks"]
    whole, resumed = loader(options), loader(options)
    resumed.load_state_dict(begun_in_second_epoch(loader(options)))
    for made in (whole, resumed):
        made.set_epoch(4)
    assert values(resumed) == values(whole)
    assert resumed.state_dict()["epoch"] == 4


def test_set_epoch_of_the_epoch_that_was_stopped_goes_on():
    options = OPTIONS["one of two ranks"]
    stopped, whole, resumed = loader(options), loader(options), loader(options)
    for made in (stopped, whole):
        made.set_epoch(4)
    resumed.load_state_dict(stopped_at(2, stopped))
    resumed.set_epoch(4)
    assert values(resumed) == values(whole)[2:]


class Impulsive(Epochs):
    """Draws from a generator that nobody knows of."""

    order = generator()

    def __iter__(self):
        return iter(torch.randperm(SAMPLES, generator=self.order).tolist())


@pytest.mark.parametrize("workers", [IN_PROCESS, {"num_workers": 1}], ids=["in process", "a worker"])
def test_another_order_is_refused(workers):
    def made():
        return loader(lambda: {"batch_size": 7, "sampler": Impulsive()}, workers)

    others = set(active_children())
    state = stopped_at(1, made())
    with made() as resumed:
        resumed.load_state_dict(state)
        with pytest.raises(GpuAugError, match="because the sampler returns other batches than"):
            list(resumed)
        until(lambda: set(active_children()) <= others)
        resumed.load_state_dict(state, strict=False)
        assert len(list(resumed)) == 1


def test_inspection_leaves_the_place_to_go_on_at():
    resumed = loader(OPTIONS["shuffled by a generator"])
    resumed.load_state_dict(stopped_at(COUNT, loader(OPTIONS["shuffled by a generator"])))
    with restored_at_end(resumed):
        next(iter(resumed))
    assert values(resumed) == values(loader(OPTIONS["shuffled by a generator"]))[COUNT:]


def test_error_of_a_sampler_is_raised_at_its_batch():
    class Failing(Epochs):
        def __iter__(self):
            raise ZeroDivisionError("no order")
            yield

    with pytest.raises(ZeroDivisionError, match="no order") as raised:
        list(loader(lambda: {"batch_size": 2, "sampler": Failing()}))
    assert raised.value.__notes__ == ["gpuaug: raised by the wrapped loader, at batch 0 of epoch 0."]


def test_state_is_small():
    for options in (OPTIONS["in order"], OPTIONS["shuffled by a generator"]):
        state = stopped_at(2, loader(options))
        assert sum(each.nbytes for each in state["source"]["generators"].values()) <= 6000
        assert len(repr(state)) < 2000


NEW_PROCESS = """
import torch
from support.loader.resumed_loaders import GLOBAL, WORKERS, loader, values
with loader(GLOBAL["shuffled by torch's generator"], WORKERS[1]) as resumed:
    resumed.load_state_dict(torch.load("state.pt", weights_only=True))
    print(values(resumed))
"""


def test_new_process_goes_on(tmp_path, monkeypatch):
    options = GLOBAL["shuffled by torch's generator"]
    torch.save(begun_in_second_epoch(loader(options)), tmp_path / "state.pt")
    torch.manual_seed(1)
    whole = loader(options)
    expected = [values(whole) for _ in range(2)][1][COUNT:]
    monkeypatch.chdir(tmp_path)
    done = processes.run_script(NEW_PROCESS)
    assert done.stdout == f"{expected}\n", done.stderr
