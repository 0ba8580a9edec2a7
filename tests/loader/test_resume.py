"""A plain ``DataLoader``, or a list, goes on after the batches that were had, and loads none of them."""

import gc
from multiprocessing import active_children

import pytest
import torch
from support.loader.checkpoints import stopped_at
from support.loader.resumed_loaders import (
    COUNT,
    GLOBAL,
    OPTIONS,
    SAMPLES,
    WORKERS,
    Epochs,
    Loaded,
    begun_in_second_epoch,
    generator,
    loader,
    values,
)
from support.process import processes
from support.process.waiting import until
from torch.utils.data import DataLoader

from gpuaug import StreamedLoader
from gpuaug.loader.inspection import restored_at_end

IN_PROCESS, TWO_WORKERS, PERSISTENT = WORKERS


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
