"""What ``gpuaug.profile`` refuses, and how errors of the loader, a stage or the step come out of it."""

import threading

import pytest
import torch
from support import internals
from support.process.waiting import until
from support.profiler.profiler_sources import SHORT, Labelled, Numbers, nothing
from torch.utils.data import DataLoader

import gpuaug
from gpuaug import StreamedLoader, TransformStage


def streamed(source, *stages, **options):
    return StreamedLoader(source, stages, device="cpu", **options)


def failure(kind, loader, step=nothing, **settings):
    with pytest.raises(kind) as caught:
        gpuaug.profile(loader, step, **{**SHORT, **settings})
    return caught.value


ONE = [torch.ones(1)]


@pytest.mark.parametrize("source", [[], DataLoader([], batch_size=2)], ids=["list", "loader"])
def test_loader_without_batches_is_refused(source):
    assert "loader must have batches to be profiled, got no batch" in str(failure(gpuaug.ArgumentError, streamed(source)))


class Once:
    """Gives what is left of the same batches to whoever iterates."""

    def __init__(self, count):
        self.left = iter([torch.ones(1)] * count)

    def __iter__(self):
        return self.left


def read_once(kind):
    return f"loader must wrap an iterable that can be iterated repeatedly, got {kind}, which can be read once"


def test_a_generator_is_refused_before_it_is_read():
    taken = []
    source = (taken.append(number) or torch.ones(1) for number in range(100))
    loader = streamed(source)
    assert str(failure(gpuaug.ArgumentError, loader)).startswith(read_once("generator"))
    assert taken == []
    assert len(list(loader)) == 100


@pytest.mark.parametrize("count", [5, 13, 40])
def test_source_that_can_be_read_once_is_refused(count):
    assert str(failure(gpuaug.ArgumentError, streamed(Once(count)))).startswith(read_once("Once"))


@pytest.mark.parametrize(
    ("sample", "note"),
    [
        (6, "gpuaug: raised by the wrapped loader, at batch 3 of epoch 0."),
        (26, "gpuaug: raised by the wrapped loader, while it was measured alone."),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_dataset_error_has_its_note(sample, note, workers):
    loader = streamed(DataLoader(Numbers(fails_at=sample), batch_size=2, num_workers=workers))
    error = failure(ZeroDivisionError, loader)
    assert f"sample {sample}" in str(error)
    assert error.__notes__ == [note]


def test_stage_error_has_its_note():
    def fails(batch):
        calls.append(1)
        if len(calls) == 5:
            raise KeyError("planted")
        return batch

    calls = []
    error = failure(KeyError, streamed(ONE * 20, TransformStage(fails, name="crop")))
    assert error.__notes__ == ["gpuaug: raised in stage 'crop', at batch 4 of epoch 0."]


@pytest.mark.parametrize("call", [1, 30, 65, 75])
def test_step_error_is_raised_as_it_is_and_the_loader_goes_on(call):
    def step(batch):
        calls.append(torch.rand(()))
        if len(calls) == call:
            raise planted

    calls, planted = [], KeyError("planted")
    with streamed(DataLoader(Numbers(40), batch_size=2)) as loader:
        hooks, stats, state = internals.shared(loader).hooks, loader.stats(), torch.get_rng_state()
        assert failure(KeyError, loader, step) is planted
        assert internals.shared(loader).hooks is hooks
        assert loader.stats() is stats
        assert torch.equal(torch.get_rng_state(), state)
        assert len(list(loader)) == 20


def test_step_with_two_arguments_has_a_note():
    with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
        gpuaug.profile(streamed(DataLoader(Labelled(), batch_size=4)), lambda images, labels: None, **SHORT)
    assert caught.value.__notes__ == [
        "gpuaug: raised by the step, which is called with one argument: a batch as the loader yields it. "
        "For a step of two arguments, pass lambda batch: step(*batch)."
    ]


def test_failed_profile_ends_its_iterator_though_its_error_is_kept():
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError) as kept:
        gpuaug.profile(streamed(DataLoader(Labelled(), batch_size=4)), lambda batch: 1 / 0, **SHORT)
    until(lambda: set(threading.enumerate()) <= before)
    assert kept.value.__traceback__ is not None, "whose frames hold all that the profile had"
