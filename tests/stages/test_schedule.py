"""``until`` and ``schedule``: an epoch has the batches of a loader with the stage of this epoch, bit for bit."""

from functools import partial

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from matplotlib.text import Text
from protocol.scenarios import Source, install
from support.comparison.values import assert_values
from support.files import nvjpeg_double
from support.files.encoded import encoded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import v2

import gpuaug
from gpuaug import DecodeStage, FeatureStage, StreamedLoader, TransformStage
from gpuaug.core import batch as batches
from gpuaug.stages.base import HeldBytes

EPOCHS, CHANGE, BATCHES = 3, 1, 3
IMAGES = torch.randint(0, 256, (3 * BATCHES - 1, 3, 20, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
FILES = [(encoded(40 + number, 30, seed=number), number) for number in range(3 * BATCHES - 1)]


def noise(images):
    return images.float() + torch.rand(images.shape)


def strong(size=16, **options):
    return gpuaug.fuse(
        [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)], **options
    )


def weak(size=12, **options):
    return gpuaug.fuse(v2.RandomCrop(size), **options)


def encoder(width):
    torch.manual_seed(width)
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.Dropout(), nn.Flatten()).requires_grad_(False)


def cached():
    return FeatureStage(encoder(2), cache=gpuaug.FeatureCache("unused"))


def decoded(*stages):
    """Return stages of which only the last one changes, and the decoding depends on it."""
    return [(DecodeStage(), stage) for stage in stages]


STAGES = {
    "fused": lambda: [(strong(),), (weak(),)],
    "a function": lambda: [(strong(),), (noise,)],
    "named": lambda: [(TransformStage(strong(), name="one"), noise), (TransformStage(weak(), name="one"), noise)],
    "other members": lambda: [
        (TransformStage(strong(), on=0, into=2),),
        (TransformStage(lambda images, labels: (images.float(), labels + torch.rand(labels.shape)), on=(0, 1)),),
    ],
    "encoders": lambda: [
        (lambda images: images / 255, FeatureStage(encoder(2))),
        (lambda images: images / 255, FeatureStage(encoder(3))),
    ],
    "windows of files": lambda: decoded(strong(ragged=True), gpuaug.fuse(v2.Resize((12, 12)), ragged=True)),
    "decoders": lambda: [(DecodeStage(), strong(ragged=True)), (DecodeStage(channels=1), strong(ragged=True))],
}
"""For each kind of stages that change: the stages before ``CHANGE``, and the stages from then on."""


def loader(stages, *, workers=0, depth=2, rank=0):
    has_files = getattr(stages[0], "kind", None) == "decode"
    source = DataLoader(
        FILES if has_files else TensorDataset(IMAGES, torch.arange(len(IMAGES))),
        3,
        shuffle=True,
        generator=torch.Generator().manual_seed(5),
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=gpuaug.collate_encoded if has_files else None,
    )
    return StreamedLoader(source, stages, device="cpu", seed=3, depth=depth, rank=rank)


def epochs_of(streamed, count=EPOCHS):
    with streamed:
        return [list(streamed) for _ in range(count)]


def changing(kind):
    """Return the stages of a loader, as schedules."""
    first, then = STAGES[kind]()
    return [gpuaug.until(CHANGE, one, other) for one, other in zip(first, then, strict=True)]


def assert_equal(got, wanted):
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        for tensor, expected in zip(batches.tensors(one), batches.tensors(other), strict=True):
            assert_values(tensor, expected)


RUNS = [(0, 0, 0), (2, 2, 0), (2, 0, 0)]
"""Numbers of workers, depths and ranks."""


@pytest.mark.parametrize(
    ("kind", "workers", "depth", "rank"),
    [*((kind, 0, 2, 1) for kind in STAGES), *(("fused", *run) for run in RUNS), ("windows of files", *RUNS[1])],
)
def test_an_epoch_equals_one_of_the_stage_alone(kind, workers, depth, rank):
    got = epochs_of(loader(changing(kind), workers=workers, depth=depth, rank=rank))
    first, then = (epochs_of(loader(stages, workers=workers, rank=rank)) for stages in STAGES[kind]())
    for batches_of_epoch, wanted in zip(got, first[:CHANGE] + then[CHANGE:], strict=True):
        assert_equal(batches_of_epoch, wanted)


@pytest.mark.parametrize("kind", STAGES)
def test_every_state_continues_with_the_stage_of_its_epoch(kind):
    whole = epochs_of(loader(changing(kind)))
    stopped, states = loader(changing(kind)), []
    for _ in range(CHANGE + 1):
        states.extend(stopped.state_dict() for _ in stopped)
        states.append(stopped.state_dict())  # after the end of the epoch
    for state in states[1 : BATCHES + 3]:
        resumed = loader(changing(kind))
        resumed.load_state_dict(state)
        begun = state["epoch"] + state["ended"]
        assert_equal(list(resumed), whole[begun][0 if state["ended"] else state["batch"] :])
        assert_equal(list(resumed), whole[begun + 1])


def test_the_epoch_is_that_of_set_epoch_in_each_iterator():
    stage = gpuaug.schedule(lambda value: lambda images: images + value, {0: 0, 3: 10, 7: 20})
    streamed = StreamedLoader([torch.zeros(1)] * 3, [stage], device="cpu")
    open_iterators = []
    for epoch, value in {7: 20, 2: 0, 3: 10, 6: 10, 0: 0, 1000: 20}.items():
        streamed.set_epoch(epoch)
        open_iterators.append((iter(streamed), value))
        assert next(open_iterators[-1][0]).item() == value
    assert all(next(iterator).item() == value for iterator, value in open_iterators)


def test_equal_values_share_a_stage_that_is_made_once():
    made = []

    def make(value):
        made.append(value)
        return gpuaug.fuse(v2.RandomResizedCrop(value))

    stage = gpuaug.schedule(make, {epoch: 8 + epoch // 10 % 2 for epoch in reversed(range(40))})
    assert made == [8, 9]
    assert [*stage.by_epoch] == [0, 10, 20, 30]
    assert stage.by_epoch[20] is stage.by_epoch[0]
    assert repr(stage) == "schedule({0: 8, 10: 9, 20: 8, 30: 9})"
    streamed = loader([stage])
    streamed.set_epoch(10)
    assert [images.shape[-1] for images, _ in streamed] == [9] * BATCHES
    assert made == [8, 9]


@pytest.mark.parametrize(
    ("build", "wanted"),
    [
        (lambda a, b, c: gpuaug.until(5, gpuaug.until(2, a, b), c), "aabbbc"),
        (lambda a, b, c: gpuaug.until(2, a, gpuaug.until(5, b, c)), "aabbbc"),
        (lambda a, b, c: gpuaug.until(2, a, gpuaug.until(1, b, c)), "aacccc"),
        (lambda a, b, c: gpuaug.until(3, gpuaug.until(4, a, b), c), "aaaccc"),
        (lambda a, b, c: gpuaug.until(0, a, b), "bbbbbb"),
        (lambda a, b, c: gpuaug.schedule({"a": a, "b": gpuaug.until(3, b, c)}.get, {0: "a", 1: "b", 4: "a"}), "abbcaa"),
    ],
)
def test_schedules_may_be_nested(build, wanted):
    stage = build(*(TransformStage(lambda images, letter=letter: (images, letter)) for letter in "abc"))
    streamed = StreamedLoader([torch.zeros(1)], [stage], device="cpu")
    assert "".join(letter for _ in wanted for _, letter in streamed) == wanted


def test_a_member_that_another_stage_of_the_epoch_reads_as_images_is_no_target():
    def flip(member):
        return TransformStage(gpuaug.fuse(v2.RandomHorizontalFlip()), on=member)

    pair = {"left": torch.rand(2, 3, 8, 8), "right": torch.rand(2, 3, 8, 8)}
    streamed = StreamedLoader([pair], [gpuaug.until(1, flip("left"), flip("right")), flip("right")], device="cpu")
    list(streamed)
    with pytest.warns(gpuaug.GpuAugWarning, match="no longer match the images"):
        list(streamed)


def test_decoders_of_all_epochs_are_part_of_the_state(monkeypatch):
    def made(later):
        return loader([gpuaug.until(2, DecodeStage(backend="cpu"), DecodeStage(backend=later))])

    nvjpeg_double.use(monkeypatch)
    stopped = made("auto")
    list(stopped)
    states = [stopped.state_dict()]
    list(stopped)
    next(iter(stopped))
    states.append(stopped.state_dict())
    for state in states:
        made("auto").load_state_dict(state)
        assert set(state["decoders"]) == {"decode"}
        state["stages"] = made("cpu").state_dict()["stages"]
        with pytest.raises(gpuaug.ArgumentError, match="The decoder of stage 'decode' must be"):
            made("cpu").load_state_dict(state)


class Holding(gpuaug.Stage):
    """Stage that holds memory of a graph."""

    kind = "holding"

    def __init__(self, num_bytes):
        super().__init__(on=..., into=..., name=None)
        self.num_bytes = num_bytes

    def bind(self, name, lanes):
        bound = TransformStage(torch.negative).bind(name, lanes)
        bound.held_bytes = lambda: HeldBytes(graph=self.num_bytes)
        return bound


def test_memory_of_all_epochs_is_counted_once_per_stage():
    one, other = Holding(3), Holding(40)
    streamed = StreamedLoader([torch.zeros(1)], [gpuaug.until(2, gpuaug.until(1, one, other), one)], device="cpu")
    list(streamed)
    assert streamed.stats().graph_bytes == 43


def test_an_encoder_of_a_later_epoch_is_checked_at_once(monkeypatch):
    double = install(monkeypatch)
    stage = gpuaug.until(5, torch.negative, FeatureStage(encoder(3)))
    with pytest.raises(gpuaug.DeviceError, match="on the loader's device"):
        StreamedLoader(Source(double, 3), [stage], device="cuda")


def test_a_profile_runs_the_stage_of_the_next_epoch_in_all_its_epochs():
    runs = {"first": 0, "then": 0}

    def counted(name):
        def run(images):
            runs[name] += 1
            return images

        return run

    streamed = StreamedLoader([torch.ones(4)] * 5, [gpuaug.until(CHANGE, counted("first"), counted("then"))], device="cpu")
    gpuaug.profile(streamed, lambda batch: batch.sum(), batches=8, rounds=1, show=False)
    assert runs["first"] > 20
    assert not runs["then"]
    streamed.set_epoch(CHANGE)
    before = runs["first"]
    gpuaug.profile(streamed, lambda batch: batch.sum(), batches=8, rounds=1, show=False)
    assert (runs["first"], runs["then"] > 20) == (before, True)


@pytest.mark.parametrize(("epoch", "title"), [(0, "HorizontalFlip"), (CHANGE, "VerticalFlip")])
def test_show_draws_the_stage_of_the_next_epoch(epoch, title):
    flips = (gpuaug.fuse(K.RandomHorizontalFlip(p=1.0)), gpuaug.fuse(K.RandomVerticalFlip(p=1.0)))
    streamed = StreamedLoader([IMAGES[:2]], [gpuaug.until(CHANGE, *flips)], device="cpu")
    streamed.set_epoch(epoch)
    figure = gpuaug.show(streamed, 1)
    texts = [text.get_text() for text in figure.findobj(Text)]
    assert any(title in text for text in texts), texts


UNHASHABLE = ([128, 128], (128, [0.1, 1.0]), {"size": 128}, np.ones(2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gpuaug.until(-1, noise, noise), "epoch must be 0 or more"),
        (lambda: gpuaug.until(1.5, noise, noise), "epoch must be a whole number"),
        (lambda: gpuaug.until(True, noise, noise), "epoch must be a whole number"),
        (lambda: gpuaug.schedule(lambda _: noise, {0: 1, -3: 2}), "An epoch in values must be 0 or more"),
        (lambda: gpuaug.schedule(lambda _: noise, {"0": 1}), "An epoch in values must be a whole number"),
        (lambda: gpuaug.schedule(lambda _: noise, {}), "values must have a value for epoch 0"),
        (lambda: gpuaug.schedule(lambda _: noise, {1: 2}), "values must have a value for epoch 0"),
        (lambda: gpuaug.schedule(lambda _: noise, [(0, 1)]), "values must map epochs to values"),
        *((partial(gpuaug.schedule, lambda _: noise, {0: value}), "values must hold hashable values") for value in UNHASHABLE),
        (lambda: gpuaug.schedule(noise(torch.ones(1)), {0: 1}), "make must be a function that returns a stage"),
        (lambda: gpuaug.schedule(lambda value: value, {0: 1}), "transform must be a callable"),
        (lambda: gpuaug.schedule(lambda _: [noise, noise], {0: 1}), "pass several stages one by one"),
        (lambda: gpuaug.until(1, [noise, noise], noise), "pass several stages one by one"),
        (lambda: gpuaug.until(1, noise, TransformStage(noise, name="noise")), "must have one name, got None and 'noise'"),
        (lambda: gpuaug.until(1, cached(), FeatureStage(encoder(2))), "must have no feature cache"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises((gpuaug.ArgumentError, gpuaug.ArgumentTypeError), match=message):
        call()
