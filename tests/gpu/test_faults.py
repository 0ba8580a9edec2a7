"""Faults on a card: what ran out of memory is tried again, and interrupts, forks and other streams and devices do no harm."""

import gc
import itertools
import signal
import sys
import time
import warnings
from contextlib import nullcontext, suppress

import pytest
import torch
from support.comparison.values import assert_values
from support.gpu.cuda_encoders import conv_encoder, host_batches
from support.gpu.cuda_loops import CYCLES, augment
from support.process.interrupts import Interrupt
from support.process.processes import run_in_fork
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from gpuaug import FeatureStage, IteratorEndedError, StreamedLoader, TransformStage

pytestmark = pytest.mark.gpu

BATCHES = 6

EVERYWHERE = [pytest.mark.slow, pytest.mark.timeout(7200)]

PLACES = 20
"""Number of interrupted loops, of which each captures anew. A loop takes a second if eight processes share the card."""


class OutOfMemory:
    """Runs out of memory at one call, after it has allocated what it can."""

    def __init__(self, at=None):
        self._at, self._calls = at, itertools.count()

    def __call__(self, images):
        held = images.repeat(64, 1, 1, 1)
        if next(self._calls) == self._at:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return images + held[: len(images)] * 0


class Encoder(nn.Module):
    """Exact, so that eager and captured batches are the same."""

    def __init__(self, at=None):
        super().__init__()
        self.out_of_memory = OutOfMemory(at)

    def forward(self, images):
        return self.out_of_memory(images) * 2


def retried(feed, depth, where=None, at=None):
    images = torch.randint(0, 256, (4 * BATCHES, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    source = StatefulDataLoader(TensorDataset(images), 4, num_workers=1)
    stages = [
        TransformStage(augment),
        TransformStage(OutOfMemory(at if where == "transform" else None)),
        FeatureStage(Encoder(at if where == "encoder" else None), capture="never"),
    ]
    return StreamedLoader(source, stages, device="cuda", seed=3, depth=depth, feed=feed)


@pytest.mark.parametrize("where", ["transform", "encoder"])
@pytest.mark.parametrize(("feed", "depth", "at"), [("plain", 0, 0), ("ring", 2, 3), ("auto", 2, 5)])
def test_batch_that_ran_out_of_memory_is_tried_again(where, feed, depth, at):
    with retried(feed, depth) as whole:
        everything = [images.clone() for (images,) in whole]
    with retried(feed, depth, where, at) as loader:
        arrived = []
        with pytest.raises(torch.OutOfMemoryError) as caught:
            arrived.extend(images.clone() for (images,) in loader)
        name = {"transform": "transform_2", "encoder": "feature"}[where]
        way_out = "Lower depth, or batch_size of the DataLoader." if depth else "Lower batch_size of the DataLoader."
        assert caught.value.__notes__ == [
            f"gpuaug: raised in stage {name!r}, at batch {at} of epoch 0.",
            f"gpuaug: up to {depth + 2} batches are on cuda:0 at once (depth={depth}). {way_out}",
        ]
        assert len(arrived) == at
        del caught
        loader.load_state_dict(loader.state_dict())
        arrived.extend(images.clone() for (images,) in loader)
    assert len(arrived) == BATCHES
    for one, two in zip(arrived, everything, strict=True):
        assert_values(one, two)


def test_copy_that_ran_out_of_memory_names_depth_and_batch_size():
    batches = [torch.zeros(4).pin_memory(), torch.zeros(1).pin_memory().expand(1 << 45)]
    arrived = iter(StreamedLoader(batches, device="cuda"))
    next(arrived)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        next(arrived)
    assert caught.value.__notes__ == [
        "gpuaug: raised in its copy, at batch 1 of epoch 0.",
        "gpuaug: up to 4 batches are on cuda:0 at once (depth=2). Lower depth, or batch_size of the DataLoader.",
    ]


def test_memory_of_a_batch_that_ran_out_of_it_is_freed_with_the_error():
    batches = host_batches()
    loader = StreamedLoader(batches, [OutOfMemory(), FeatureStage(conv_encoder())])
    list(loader)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        loader.stages = [OutOfMemory(4), *loader.stages[1:]]
        with suppress(torch.OutOfMemoryError):
            for _ in loader:
                pass
        del _
        loader.close()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before
    finally:
        gc.enable()


class Dropout(nn.Module):
    """Draws from the device's generator, so a graph that draws from another state gives other features."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, images):
        return nn.functional.dropout(self.encoder(images), 0.5, training=True)


class Interrupted:
    """Interrupts loops over loaders that capture anew, and checks after each that nothing is left of it."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # one that is heard by a finaliser goes no further
        self.batches, self.encoder = host_batches(count=4), Dropout(conv_encoder())
        self.want = [features.clone() for features in self.loader()]
        self.states = self.of_process()

    def loader(self):
        return StreamedLoader(self.batches, [augment, FeatureStage(self.encoder)], seed=1)

    @staticmethod
    def of_process():
        return {
            "stream": torch.cuda.current_stream(),
            "is capturing": torch.cuda.is_current_stream_capturing(),
            "device generator": torch.cuda.get_rng_state().tolist(),
            "host generator": torch.get_rng_state().tolist(),
            "sync debug mode": torch.cuda.get_sync_debug_mode(),
            "garbage collection": gc.isenabled(),
            "gradients": torch.is_grad_enabled(),
            "dispatch mode": _get_current_dispatch_mode(),
            "warnings": [id(warnings.filters), warnings.showwarning],
        }

    def loop(self, interrupt):
        loader = self.loader()
        with suppress(KeyboardInterrupt), interrupt:
            for features in loader:
                features.sum()
        place = getattr(interrupt, "place", None)
        assert self.of_process() == self.states, place
        loader.set_epoch(0)
        for a, b in zip(loader, self.want, strict=True):
            torch.testing.assert_close(a, b, msg=place)
        return place


@pytest.mark.parametrize("most", [PLACES, pytest.param(None, marks=EVERYWHERE)], ids=["some", "everywhere"])
def test_ctrl_c_anywhere_leaves_streams_generators_and_captures_in_order(monkeypatch, most):
    interrupted = Interrupted(monkeypatch)
    whole = Interrupt(0)
    interrupted.loop(whole)
    ats = range(1, whole.count + 1)
    raised = [interrupted.loop(Interrupt(at)) for at in ats[:: -(-len(ats) // most) if most else 1]]
    # A loop has no fixed number of places: a wait may look at its event more than once.
    assert sum(place is not None for place in raised) > len(raised) // 2


class Alarm:
    """Raises ``KeyboardInterrupt`` after some seconds, wherever the process is: in torch too."""

    def __init__(self, seconds):
        self._seconds = seconds

    def __enter__(self):
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *exc):
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.parametrize("count", [PLACES, pytest.param(4000, marks=EVERYWHERE)])
def test_interrupt_at_any_time_leaves_the_same_in_order(monkeypatch, count):
    interrupted = Interrupted(monkeypatch)
    timeout = signal.setitimer(signal.ITIMER_REAL, 0)  # of the test
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        start = time.perf_counter()
        interrupted.loop(nullcontext())
        most = time.perf_counter() - start  # of two epochs, so some interrupts come too late
        for index in range(1, count):
            interrupted.loop(Alarm(most * index / count))
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timeout)


def read_later(batch):
    """The sum of a batch, read on the current stream long after it was handed over."""
    torch.cuda._sleep(CYCLES)
    return batch.double().sum()


@pytest.mark.multigpu
def test_consumer_that_changes_its_device_at_every_batch():
    batches, encoder = host_batches(count=12), conv_encoder()
    stages = [augment, FeatureStage(encoder)]
    want = [features.double().sum().item() for features in StreamedLoader(batches, stages, device="cuda:0", depth=0, seed=1)]
    loader = iter(StreamedLoader(batches, stages, device="cuda:0", depth=2, seed=1))
    other, totals = torch.cuda.Stream("cuda:1"), []
    for index in range(len(batches)):
        with torch.cuda.device(index % 2):
            if index % 4 == 3:
                torch.cuda.set_stream(other)
            batch = next(loader)
            assert batch.device == torch.device("cuda", 0)
            assert torch.cuda.current_device() == index % 2
            assert torch.cuda.current_stream(1) == (other if index % 4 == 3 else torch.cuda.default_stream(1))
            torch.cuda.set_stream(torch.cuda.default_stream(1))
            with torch.cuda.device(0):
                totals.append(read_later(batch))
            del batch
    assert next(loader, None) is None
    torch.testing.assert_close([total.item() for total in totals], want)


@pytest.mark.parametrize("feed", ["plain", "ring"])
def test_iterator_is_an_error_in_a_child_that_was_forked_after_cuda_began(feed):
    images = torch.arange(24.0).view(12, 2)
    loader = StreamedLoader(DataLoader(TensorDataset(images), 2, num_workers=1), [lambda x: x * 2], feed=feed)
    batches = iter(loader)
    arrived = [next(batches)[0].cpu()]

    def child():
        with pytest.raises(IteratorEndedError, match="was forked from the one that began it"):
            next(batches)

    run_in_fork(child)
    arrived.extend(images.cpu() for (images,) in batches)
    assert_values(torch.cat(arrived), images * 2)
