"""``skip``: an iterator without its first batches gives the rest as they would have been. And whose epoch draws are of."""

import pytest
import torch
from support.loader.checkpoints import SOURCES, Counter, Numbers, bits, same, stopped_at, streamed
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from gpuaug import ArgumentError, StreamedLoader


def by_global_generator(**options):
    return DataLoader(Numbers(), 2, shuffle=True, **options)


def by_generator(**options):
    return by_global_generator(generator=torch.Generator().manual_seed(5), **options)


KINDS = {
    "torch's generator": by_global_generator,
    "a generator": by_generator,
    "workers": lambda: by_generator(num_workers=2),
    "workers that persist": lambda: by_generator(num_workers=2, persistent_workers=True),
    "a list": lambda: [[torch.full((3,), float(n))] for n in range(8)],
    "a generator function": lambda: ([torch.full((3,), float(n))] for n in range(8)),
    "stateful": SOURCES["in this process"],
    "stateful workers": SOURCES["two workers"],
    "an iterable with a state": Counter,
}


@pytest.mark.parametrize(("kind", "batches"), [*((kind, 3) for kind in KINDS), ("a generator", 100), ("stateful", 100)])
def test_the_batches_after_those_that_are_skipped(kind, batches):
    options = {"kind": "stream"} if kind.endswith("state") else {}
    torch.manual_seed(1)
    is_next_compared = kind not in ("torch's generator", "stateful workers")
    with streamed(KINDS["a generator" if kind == "workers" else kind], **options) as whole:
        epochs = [[bits(batch) for batch in whole] for _ in range(2 if is_next_compared else 1)]
    torch.manual_seed(1)
    with streamed(KINDS[kind], **options) as skipping:
        skipping.skip(batches)
        assert same([bits(batch) for batch in skipping], epochs[0][batches:])
        if is_next_compared:
            assert same([bits(batch) for batch in skipping], epochs[1])


def test_skipping_after_a_state_was_loaded():
    with streamed(by_generator) as whole:
        expected = [bits(batch) for batch in whole]
    state = stopped_at(2, streamed(by_generator))
    with streamed(by_generator) as resumed:
        resumed.load_state_dict(state)
        resumed.skip(3)
        assert same([bits(batch) for batch in resumed], expected[5:])
        assert resumed.state_dict()["batch"] == len(expected)


def test_skip_is_kept_by_set_epoch():
    with streamed(by_generator) as loader:
        loader.skip(6)
        loader.set_epoch(4)
        list(loader)
        assert loader.state_dict()["epoch"] == 4
        assert loader.stats().batches == 2


def test_draws_are_of_the_epoch_that_the_sampler_was_told():
    sampler = DistributedSampler(Numbers(), num_replicas=2, rank=0)
    loader = streamed(lambda: DataLoader(Numbers(), 2, sampler=sampler), rank=0)
    list(loader)
    assert loader.state_dict()["epoch"] == 0
    for epoch in (1, 5):
        sampler.set_epoch(epoch)
        list(loader)
        assert loader.state_dict()["epoch"] == epoch
    list(loader)
    assert loader.state_dict()["epoch"] == 6


def test_a_loader_that_is_made_again_without_its_stages_is_an_error():
    loader = StreamedLoader([torch.ones(2)], device="cpu")
    with pytest.raises(ArgumentError, match="has no multiprocessing_context, because a framework"):
        getattr(loader, "multiprocessing_context", None)
