"""Memory of every origin is ordered: what lay on the device before, weights, what moves itself, and what is left behind."""

import gc
from collections import UserDict
from contextlib import nullcontext, suppress

import pytest
import torch
from protocol.scenarios import Source, kernel, name_lanes, script_arrivals
from support.stream_double import OVERWRITTEN, REUSED, UNREADY, FakeStream
from torch import nn

from gpuaug import FeatureStage, SelectionError, StreamedLoader, TransformStage
from gpuaug.core import batch
from gpuaug.core.streams import Lane, Lanes


class Resident(torch.Tensor):
    """A tensor that was on the device before the loader saw it."""

    device = torch.device("cuda", 0)

    @classmethod
    def holding(cls, buffer):
        tensor = torch.empty(0).as_subclass(cls)
        tensor.buffer = buffer
        return tensor

    def record_stream(self, stream):
        self.buffer.record_stream(stream)


def feed_resident(cuda, stages):
    """Train on batches that the loader makes on the device, on a stream of its own."""
    stream = FakeStream(cuda, "source")

    def source():
        for number in range(12):
            with cuda.stream(stream):
                yield Resident.holding(cuda.new("resident", number))

    streamed = StreamedLoader(source(), stages, device="cuda")
    name_lanes(cuda, streamed)
    for received in streamed:
        cuda.read(getattr(received, "buffer", received))


def augment_resident(cuda):
    return TransformStage(lambda tensor: kernel(cuda, tensor.buffer))


@pytest.mark.parametrize("augmented", [False, True])
def test_memory_that_was_on_the_device_before_is_ordered(cuda, augmented):
    feed_resident(cuda, [augment_resident(cuda)] if augmented else [])
    assert not cuda.history.violations, cuda.history.report()


@pytest.mark.parametrize(
    ("method", "augmented", "rule", "words"),
    [
        ((Lanes, "follow"), False, UNREADY, "default reads resident"),
        ((Lanes, "follow"), True, UNREADY, "stage/transform lane reads resident"),
        ((Lane, "reads"), False, REUSED, "last use: default reads"),
        ((Lane, "reads"), True, REUSED, "last use: stage/transform lane reads"),
    ],
)
def test_memory_that_was_on_the_device_before_needs_both_orders(cuda, monkeypatch, method, augmented, rule, words):
    monkeypatch.setattr(*method, lambda *_: None)
    script_arrivals(monkeypatch, [True])
    feed_resident(cuda, [augment_resident(cuda)] if augmented else [])
    assert any(violation.rule == rule and words in violation.text for violation in cuda.history.violations)


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("announced", [True, False])
def test_weights_change_in_order_within_update_and_only_there(cuda, monkeypatch, announced, branches):
    script_arrivals(monkeypatch, [True])
    weight = cuda.new("weight", batch=-1)

    class Weighted(nn.Module):
        def forward(self, *values):
            cuda.read(weight)
            return kernel(cuda, *values)

    stage = FeatureStage({"a": Weighted(), "b": Weighted()} if branches else Weighted(), capture="never")
    streamed = StreamedLoader(Source(cuda, 12), [stage], device="cuda")
    for received in streamed:
        cuda.read(*batch.leaves(received))
        with stage.update() if announced else nullcontext():
            cuda.write(weight)
    rules = {violation.rule for violation in cuda.history.violations}
    assert rules == (set() if announced else {OVERWRITTEN}), cuda.history.report()


@pytest.mark.parametrize("form", ["mapping", "list"])
def test_a_transform_may_change_its_container_in_place(cuda, monkeypatch, form):
    def augment(members):
        members[0] = kernel(cuda, members[0])
        return members

    script_arrivals(monkeypatch, [True])
    source = Source(cuda, 8, {"mapping": lambda leaves: dict(enumerate(leaves)), "list": list}[form])
    streamed = StreamedLoader(source, [TransformStage(augment, on=None)], device="cuda")
    for received in streamed:
        cuda.read(*batch.leaves(received))
    assert not cuda.history.violations, cuda.history.report()


def test_an_interrupt_within_a_stage_leaves_its_reads_ordered(cuda, monkeypatch):
    script_arrivals(monkeypatch, [True])

    def interrupted(images):
        kernel(cuda, images)
        raise KeyboardInterrupt

    streamed = StreamedLoader(Source(cuda, 3), [interrupted], device="cuda")
    for _ in range(4):
        with suppress(KeyboardInterrupt):
            next(iter(streamed))
        gc.collect()
    assert not cuda.history.violations, cuda.history.report()


class Encoding(UserDict):
    """A mapping that is moved by its own ``to``, in place."""

    def to(self, device, non_blocking=False):
        self.data = {key: value.to(device) for key, value in self.items()}
        return self


def test_a_mapping_that_moves_itself_may_be_changed_in_place(cuda, monkeypatch):
    def augment(members):
        members["images"] = kernel(cuda, members["images"])
        return members

    script_arrivals(monkeypatch, [True])
    source = Source(cuda, 8, lambda leaves: Encoding(zip(("images", "labels"), leaves, strict=True)))
    for received in StreamedLoader(source, [TransformStage(augment, on=None)], device="cuda"):
        cuda.read(*received.values())
    assert not cuda.history.violations, cuda.history.report()


class Holder:
    """An object that is on the device already, so its ``to`` has nothing to do."""

    def __init__(self, held):
        self.held = held

    def to(self, device):
        return self


@pytest.mark.parametrize("ending", ["left early", "a stage fails"])
def test_objects_on_the_device_are_read_before_their_memory_is_used_again(cuda, monkeypatch, ending):
    def made():
        for number in range(6):
            yield Holder(cuda.new("resident", number))

    class Objects:
        def __iter__(self):
            return made()

    def augment(holder):
        result = kernel(cuda, holder.held)
        if ending == "a stage fails":
            raise ValueError("planted")
        return result

    script_arrivals(monkeypatch, [True])
    streamed = StreamedLoader(Objects(), [augment], device="cuda")
    for _ in range(4):
        iterator = iter(streamed)
        with suppress(ValueError):
            cuda.read(next(iterator))
        iterator.close()
        gc.collect()
    assert not cuda.history.violations, cuda.history.report()


def test_an_error_before_a_stage_has_begun_leaves_earlier_stages_ordered(cuda, monkeypatch):
    script_arrivals(monkeypatch, [True])
    stages = [lambda images: kernel(cuda, images), TransformStage(lambda labels: labels, on=5)]
    streamed = StreamedLoader(Source(cuda, 3), stages, device="cuda")
    for _ in range(3):
        with suppress(SelectionError):
            next(iter(streamed))
        gc.collect()  # the error holds the batch
    assert not cuda.history.violations, cuda.history.report()


def test_an_iterator_may_be_collected_while_a_stage_runs(cuda, monkeypatch):
    script_arrivals(monkeypatch, [True])
    garbage = []

    def augment(images):
        garbage.clear()
        return kernel(cuda, images)

    streamed = StreamedLoader(Source(cuda, 8), [augment, lambda images: kernel(cuda, images)], device="cuda")
    iterator = iter(streamed)
    cuda.read(*next(iterator))
    abandoned = iter(streamed)
    cuda.read(*next(abandoned))
    garbage.append(abandoned)
    del abandoned
    for received in iterator:
        cuda.read(*received)
    assert not cuda.history.violations, cuda.history.report()
