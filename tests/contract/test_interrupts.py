"""Ctrl-C wherever it can be heard within gpuaug: nothing is left behind, and the loader works again, in every thread."""

import gc
import itertools
import multiprocessing
import random
import sys
from contextlib import suppress

import numpy as np
import pytest
import torch
from contract.sources import Numbers, noise, streamed, values
from support.feed.ring_cleanup import grown, taken
from support.files.encoded import encoded
from support.gpu.host_graphs import install, on_lanes
from support.process.interrupts import Interrupt
from support.process.waiting import returned, until
from torch import nn
from torch.utils.data import DataLoader

from gpuaug import DecodeStage, FeatureStage, TransformStage, collate_encoded
from gpuaug.core import batch as batches


def noisy(x):
    return x + torch.rand(x.shape) + random.random() + np.random.randn()


def generators():
    return torch.get_rng_state().tolist(), random.getstate(), [str(value) for value in np.random.get_state()]


def of_list():
    return streamed([torch.zeros(4)] * 2, noise, FeatureStage(nn.Identity()), seed=0)


class Encoder(nn.Module):
    def encode(self, values):
        return {"noise": torch.rand(2), "values": (values * 2, [values])}


def of_encoders():
    """Structured results of two encoders beside one another, from graphs of two shapes."""
    data = [(torch.full((2 + number % 2,), float(number)), torch.zeros(4)) for number in range(5)]
    stages = [
        FeatureStage(Encoder().encode, on={0: "values"}, into=0, name="one"),
        FeatureStage(Encoder().encode, on={1: "values"}, into=1, output="noise", name="other"),
    ]
    flat = TransformStage(lambda batch: torch.cat(list(batches.tensors(batch))), on=None)
    return on_lanes(data, *stages, flat, depth=1, seed=0)


def of_images():
    data = [collate_encoded([(encoded(16, 8, seed=number), number)]) for number in range(2)]
    return streamed(data, DecodeStage(), TransformStage(lambda members: noisy(members[1]), on=None), seed=0)


def of_numbers(feed, **options):
    # Seeds of workers are drawn from a generator of its own: the user's is then left as it was.
    wrapped = DataLoader(Numbers(4), batch_size=2, generator=torch.Generator(), **options)
    return lambda: streamed(wrapped, noisy, seed=0, feed=feed)


PERSISTENT = {"num_workers": 1, "persistent_workers": True}
LOADERS = {
    "list": (of_list, 61),
    "encoders": (of_encoders, 613),
    "images": (of_images, 263),
    "thread": (of_numbers("plain"), 149),
    "staged": (of_numbers("ring"), 13),
    "workers": (of_numbers("plain", num_workers=1), 101),
    "workers with ring": (of_numbers("ring", num_workers=1), 839),
    "persistent workers with ring": (of_numbers("ring", **PERSISTENT), 839),
}
CASES = [
    pytest.param(make, step, id=name, marks=pytest.mark.slow if name in ("staged", "workers") else ())
    for name, (make, step) in LOADERS.items()
]
EVERYWHERE = (pytest.mark.slow, pytest.mark.timeout(1800))  # a minute each on a quiet machine
CASES += [pytest.param(make, 1, id=f"{name}, everywhere", marks=EVERYWHERE) for name, (make, _) in LOADERS.items()]


@pytest.fixture
def without_garbage_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(("make", "step"), CASES)
@pytest.mark.usefixtures("without_garbage_collector")
def test_ctrl_c_leaves_nothing_and_the_loader_works_again(make, step, monkeypatch):
    def read():
        loader.set_epoch(0)
        with loader:
            return values(loader)

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # one that is heard by a finaliser goes no further
    install(monkeypatch)
    loader = make()
    want, before, found = read(), taken(), generators()
    for at in itertools.count(1, step):
        arrived = []
        loader.set_epoch(0)
        try:
            with Interrupt(at) as interrupt, loader:
                arrived.extend(batch.tolist() for batch in loader)
            assert arrived == want
        except KeyboardInterrupt:
            assert arrived == want[: len(arrived)]
        if interrupt.place is None:
            break
        assert generators() == found, interrupt.place
        assert interrupt.error() is None, interrupt.place  # its frames hold the batch
        assert returned(read) == [want], interrupt.place
        if interrupt.place in ("private_memfd", "Memory.__init__", "_close_in"):
            before = taken()  # a descriptor is lost that has no name yet, or whose finaliser heard it
        until(lambda before=before: not grown(before))
    assert at > step


@pytest.mark.parametrize("file", ["rng", "generators"])
@pytest.mark.usefixtures("without_garbage_collector")
def test_ctrl_c_while_generators_are_seeded_or_restored_leaves_them_and_is_freed_at_once(file):
    loader = of_list()
    want, found = values(loader), generators()
    for at in itertools.count(1):
        loader.set_epoch(0)
        with suppress(KeyboardInterrupt), Interrupt(at, within=f"core/{file}.py") as interrupt:
            assert values(loader) == want
        if interrupt.place is None:
            break
        assert generators() == found, interrupt.place
        assert interrupt.error() is None, interrupt.place
    assert at > 20


def test_a_loop_begins_anew_after_ctrl_c_in_the_end_of_persistent_workers():
    loader = LOADERS["persistent workers with ring"][0]()
    want = values(loader)
    for at in itertools.count(1):
        with suppress(KeyboardInterrupt), Interrupt(at, within="feed/wrapped_loader.py") as interrupt:
            loader.close()
        if interrupt.place is None:
            break
        loader.set_epoch(0)
        assert values(loader) == want, interrupt.place
    assert at > 5
    until(lambda: not multiprocessing.active_children())


def test_gradients_are_computed_after_an_interrupt_in_a_block_without():
    def interrupted(images):
        torch.set_grad_enabled(False)  # as torch.no_grad() whose __exit__ is not called
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(streamed([torch.zeros(4)], interrupted))
    assert torch.is_grad_enabled()
