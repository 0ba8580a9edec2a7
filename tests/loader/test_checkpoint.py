"""A run that is taken up from a checkpoint goes on as if it had never stopped."""

import gc
import threading
from multiprocessing import active_children

import pytest
import torch
import torch.distributed.checkpoint.stateful
from support.loader.checkpoints import (
    BATCHES,
    SOURCES,
    Counter,
    Prepared,
    bits,
    noisy,
    same,
    saved,
    shuffled,
    stopped_at,
    streamed,
)
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
from support.process.waiting import WAIT_S, until
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from gpuaug import IteratorEndedError, StreamedLoader
from gpuaug.loader.inspection import restored_at_end


@pytest.mark.parametrize("kind", ["in this process", pytest.param("two workers", marks=pytest.mark.slow)])
def test_state_dict_follows_the_iterator_read_last(kind):
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


def test_seed_of_state_is_adopted_where_none_was_given():
    make = SOURCES["in this process"]
    expected = [bits(batch) for batch in streamed(make)]
    resumed = streamed(make, seed=None)
    for count in (2, 3):
        resumed.load_state_dict(stopped_at(count, streamed(make)))
        assert resumed.seed == 7
        assert same([bits(batch) for batch in resumed], expected[count:])
    other = stopped_at(2, streamed(make, seed=9))
    resumed.load_state_dict(other)
    assert resumed.seed == 9, "it adopts each state's"


def test_epochs_after_the_last_that_can_be_set():
    whole, resumed = (StreamedLoader([torch.zeros(2)], [noisy], device="cpu", seed=7) for _ in range(2))
    whole.set_epoch(2**63 - 1)
    last, after = list(whole), list(whole)
    assert not torch.equal(*last, *after)
    state = saved(whole.state_dict())
    assert state["epoch"] == 2**63
    resumed.load_state_dict(state)
    assert torch.equal(*resumed, *whole)


def test_chosen_flag_belongs_to_each_iterator():
    loader = streamed(shuffled)
    loader.set_epoch(3)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer)
    assert (loader.state_dict()["epoch"], loader.state_dict()["chosen"]) == (4, False)
    next(older)
    assert (loader.state_dict()["epoch"], loader.state_dict()["chosen"]) == (3, True)


def test_seed_may_be_assigned_between_epochs():
    loader = StreamedLoader(Counter(), [lambda images: torch.rand(3)], device="cpu", seed=7)
    other = StreamedLoader(Counter(), [lambda images: torch.rand(3)], device="cpu", seed=8)
    list(loader), list(other)
    loader.seed = 8
    assert same([bits(batch) for batch in loader], [bits(batch) for batch in other])


def test_state_dict_is_a_copy():
    loader = streamed(shuffled)
    next(iter(loader))
    loader.state_dict()["source"].clear()
    state = loader.state_dict()
    assert state["source"]
    loader.load_state_dict(state)
    state["source"].clear()
    assert len(list(loader)) == BATCHES - 1


def test_resume_from_finished_iterator_starts_next_epoch():
    loader = streamed(lambda: Prepared(shuffled()))
    state = stopped_at(BATCHES, streamed(lambda: Prepared(shuffled())))
    state["source"]["_iterator_finished"] = True  # as under Accelerate, which reads one batch ahead of those it gives
    loader.load_state_dict(state)
    next(iter(loader))
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (1, 1)


def test_close_from_another_thread_does_not_end_the_epoch():
    asked = threading.Event()

    class Slow(Counter):
        def __iter__(self):
            for batch in super().__iter__():
                if batch.item() == 3:
                    asked.set()
                    until(lambda: not any(feed.end_message is None for feed in list(loader._feed_iterators)))
                yield batch

    def close():
        assert asked.wait(WAIT_S)
        until(lambda: loader.state_dict()["batch"] == 2)  # the loop has the batches before the one it now waits for
        loader.close()

    loader = StreamedLoader(Slow(), device="cpu", depth=0)
    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(IteratorEndedError):
        list(loader)
    closing.join()
    assert (loader.state_dict()["batch"], loader.state_dict()["ended"]) == (2, False)


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


@pytest.mark.parametrize("kind", GLOBAL)
@pytest.mark.parametrize("workers", WORKERS)
def test_epochs_after_the_saved_one_advance_torch_generator(workers, kind):
    """If the program restores torch's generator, the epochs after the saved one have the order that they would have had."""
    with loader(GLOBAL[kind], workers) as whole:
        list(whole)
        state, generator_state = whole.state_dict(), torch.get_rng_state()
        expected = [values(whole) for _ in range(3)]
    with loader(GLOBAL[kind], workers) as resumed:
        resumed.load_state_dict(state)
        torch.set_rng_state(generator_state)
        assert [values(resumed) for _ in range(3)] == expected


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


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_seeds_of_persistent_workers_differ_by_the_epoch_at_whose_end_a_run_goes_on(kind):
    def made():
        wrapped = kind(Seeds(), generator=generator(), num_workers=1, persistent_workers=True)
        return StreamedLoader(wrapped, device="cpu", feed="plain", seed=7)

    def seeds(state):
        with made() as resumed:
            resumed.load_state_dict(state)
            return tuple(torch.cat(list(resumed)).tolist())

    states = []
    with made() as loader:
        for _ in range(3):
            list(loader)
            states.append(loader.state_dict())
    assert seeds(states[0]) == seeds(states[0])
    assert len(set(map(seeds, states))) == len(states)


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
