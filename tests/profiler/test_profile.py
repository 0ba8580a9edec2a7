"""``gpuaug.profile`` on a CPU: it finds what was planted, and says clearly what it cannot profile."""

import sys
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from support.profiler_sources import SHORT, Numbers, again, nothing, sleeping
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import gpuaug
from gpuaug import FeatureStage, StreamedLoader, TransformStage
from gpuaug.benchkit import results
from gpuaug.profiler import profile
from gpuaug.profiler.recorder import THREAD


def streamed(source, *stages, **options):
    return StreamedLoader(source, stages, device="cpu", **options)


def between_its_bounds(report):
    return 0.95 * report.bound_ms <= report.streamed.median <= 1.05 * report.full_ms


@pytest.fixture
def recorded(monkeypatch):
    """What the last report's times of the training thread come from, of which its timeline shows a part."""
    found, by_part = [], profile._by_part

    def kept(spans):
        found[:] = spans
        return by_part(spans)

    monkeypatch.setattr(profile, "_by_part", kept)
    return found


PLANTED = {
    "the loader": (24, 10, 10, "Bounded by the loader: {who} "),
    "a stage": (10, 20, 10, "Bounded by the training thread, most of all by transform 'planted' ("),
    "the step": (10, 10, 20, "Bounded by the training thread, most of all by the training step ("),
}

LENGTHS = (1, 3, 9, 9, 9, 9)
"""How many times as long each try sleeps: a busy machine wakes a sleep as much too late however long it is."""


@pytest.mark.parametrize(
    ("longest", "workers"), [("the loader", 0), ("a stage", 0), ("the step", 0), ("the loader", 2), ("the step", 2)]
)
def test_what_was_planted_is_found(longest, workers, recorded):
    *planted_ms, said = PLANTED[longest]
    said = said.format(who="2 workers give" if workers else "it gives, without workers,")
    asleep, lengths = {}, iter(LENGTHS)

    def measure():
        longer = next(lengths)
        load_ms, stage_ms, step_ms = (longer * ms for ms in planted_ms)
        asleep.update({"load": load_ms, "stage/planted": stage_ms, "step": step_ms})
        # Workers sleep side by side.
        source = DataLoader(Numbers(batch_ms=load_ms * max(workers, 1)), batch_size=2, num_workers=workers)
        loader = streamed(source, TransformStage(sleeping(stage_ms), name="planted"))
        return gpuaug.profile(loader, sleeping(step_ms), **SHORT)

    def holds(report):
        found = all(0.95 * ms <= report.part(name).wall.median <= 1.5 * ms for name, ms in asleep.items())
        # A thread that was held up finds batches that are ready, and waits for none.
        waited = longest != "the loader" or " ms a batch for the loader\n" in str(report)
        return between_its_bounds(report) and found and waited and report.verdict[0].startswith(said)

    report = again(measure, holds, len(LENGTHS))
    assert [part.name for part in report.parts] == ["load", "copy", "stage/planted", "step"]
    assert report.part("copy").wall.median < 5
    assert report.cached.median >= 0.95 * asleep["step"]
    assert report.in_line.median >= 0.95 * (asleep["stage/planted"] + asleep["step"])
    assert (report.copy_ms, report.device_ms, report.pageable_bytes, report.link_gb_per_s) == (0, 0, 0, None)
    assert report.thread_ms["step"] >= 0.95 * asleep["step"]
    assert report.thread_ms["stage/planted"] >= 0.95 * asleep["stage/planted"]
    assert report.settings == {
        "device": "CPU",
        "depth": "in line",
        "feed": "plain (the device is cpu)",
        "workers": workers,
        "batches": 8,
        "rounds": 1,
    }
    shown_are_ten_batches(report, recorded)


def shown_are_ten_batches(report, recorded):
    """The timeline has ten batches, numbered through, and of each all that was done. Times by part are those of one batch."""
    lanes = report.timeline.lanes()
    assert list(lanes) == ["loader", "thread"]
    batches = sorted({span.batch for span in report.timeline.spans})
    assert batches == list(range(batches[0], batches[0] + 10))
    for lane, name in (("loader", "pull"), *(("thread", part.name) for part in report.parts[1:])):
        assert [span.batch for span in lanes[lane] if span.name == name] == batches, name
    for part in report.parts[1:]:
        of = [span.end_ms - span.start_ms for span in recorded if (span.lane, span.name) == (THREAD, part.name)]
        assert 0.999 * min(of) <= report.thread_ms[part.name] <= 1.001 * max(of)
    steps = [span for span in lanes["thread"] if span.name == "step"]
    assert all(before.end_ms <= after.start_ms for before, after in pairwise(steps))


@pytest.mark.parametrize("count", [1, 3, 8, 11])
@pytest.mark.parametrize("kind", ["list", "loader"])
def test_epochs_that_are_shorter_than_a_window(kind, count, recorded):
    source = [torch.ones(2)] * count if kind == "list" else DataLoader(Numbers(2 * count), batch_size=2)
    loader = streamed(source, sleeping(2))
    report = gpuaug.profile(loader, sleeping(2), **SHORT)
    shown_are_ten_batches(report, recorded)
    assert loader.state_dict()["batch"] == 0 if hasattr(loader, "state_dict") else True


SOURCES = {
    "a list": lambda: [(torch.ones(2, 3), torch.arange(2))] * 20,
    "a loader": lambda: DataLoader(Numbers(), batch_size=2, shuffle=True),
    "workers that persist": lambda: DataLoader(Numbers(), batch_size=2, num_workers=1, persistent_workers=True),
    "a loader with a state": lambda: StatefulDataLoader(Numbers(), batch_size=2),
    "a loader with a state and workers": lambda: StatefulDataLoader(Numbers(), batch_size=2, num_workers=1),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source(kind):
    with streamed(SOURCES[kind](), lambda x: x + 1) as loader:
        report = gpuaug.profile(loader, nothing, **SHORT)
    assert [part.name for part in report.parts] == ["load", "copy", "stage/transform", "step"]
    assert report.batch_bytes == 2 * 3 * 4 + 2 * 8
    assert len(report.verdict) >= 1
    results.check(results.result("profile", rows=report.rows(), settings=report.settings, device=torch.device("cpu")))


def test_nested_batches_and_several_stages():
    @dataclass
    class Sample:
        image: torch.Tensor
        name: str

    batch = {"sample": Sample(torch.ones(4, 2), "a"), "pair": [torch.zeros(3), 7], "mask": torch.ones(4, dtype=torch.uint8)}
    encoder = torch.nn.Linear(4, 2).requires_grad_(False)
    stages = [
        TransformStage(lambda mask: mask + 1, on="mask"),
        FeatureStage(encoder, on="mask_as_float", into="encoded", name="encode"),
        FeatureStage(encoder, on="mask_as_float", into="again", name="again", capture="never"),
    ]
    stages.insert(1, TransformStage(lambda mask: mask.float(), on="mask", into="mask_as_float", name="as_float"))
    given = []
    report = gpuaug.profile(streamed([batch] * 10, *stages), given.append, **SHORT)
    assert [part.name for part in report.parts] == [
        "load", "copy", "stage/transform", "stage/as_float", "stage/encode", "stage/again", "step",
    ]  # fmt: skip
    assert report.batch_bytes == 8 * 4 + 3 * 4 + 4
    assert all(each["mask"].tolist() == [2] * 4 and each["again"].shape == (2,) for each in given)
    assert all(each["sample"].name == "a" and each["pair"][1] == 7 for each in given)
    assert [part.kind for part in report.parts[2:]] == ["", "", "captured", "eager encoder", ""]


def test_kornia_and_fused_pipelines_are_known_for_what_they_are():
    from kornia import augmentation as K

    pipeline = K.AugmentationSequential(K.RandomHorizontalFlip(), K.Normalize(0.5, 0.5))
    stages = [TransformStage(pipeline, name="eager"), TransformStage(gpuaug.fuse(pipeline), name="fused")]
    report = gpuaug.profile(streamed([torch.rand(2, 3, 8, 8)] * 10, *stages), nothing, **SHORT)
    assert (report.part("stage/eager").kind, report.part("stage/fused").kind) == ("kornia", "fused")


def test_a_window_counts_as_many_batches_as_it_was_told():
    steps = []
    gpuaug.profile(streamed([torch.ones(1)] * 7), steps.append, batches=8, rounds=1, show=False)
    fewest = len(steps)
    gpuaug.profile(streamed([torch.ones(1)] * 7), steps.append, batches=12, rounds=1, show=False)
    assert len(steps) - fewest == fewest + 3 * 4, "in the streamed, the in-line and the cached window"
    fewest = len(steps)
    report = gpuaug.profile(streamed([torch.ones(1)] * 7), steps.append, batches=8, rounds=3, show=False)
    assert report.settings["rounds"] == 3
    assert report.streamed.low <= report.streamed.median <= report.streamed.high


@pytest.mark.parametrize(("depth", "ahead", "said"), [("auto", 2, "2 (set: auto)"), (0, 2, "2 (set: 0)"), (1, 1, 1), (5, 5, 5)])
def test_the_depth_that_is_measured(depth, ahead, said, recorded):
    loader = streamed([torch.ones(1)] * 7, depth=depth)
    measurements = profile._Profile(loader, nothing, 8, 1)
    assert (measurements._ahead, measurements._said_depth) == (ahead, said)
    report = gpuaug.profile(loader, nothing, **SHORT)
    assert (report.settings["depth"], report.timeline.depth) == ("in line", 0), "on a CPU"
    assert loader.depth == depth
    shown_are_ten_batches(report, recorded)


# What is printed


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")


def words(text):
    return text.split()


def test_nothing_is_printed_unless_shown(capfd):
    gpuaug.profile(streamed([torch.ones(1)] * 9), nothing, batches=8, rounds=1, show=False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("wide")
def test_the_report_is_printed_once(capsys):
    report = gpuaug.profile(streamed([torch.ones(1)] * 9), nothing, batches=8, rounds=1)
    assert words(capsys.readouterr().out) == words(str(report))


def test_the_report_is_printed_without_rich_too(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "rich", None)
    report = gpuaug.profile(streamed([torch.ones(1)] * 9), nothing, batches=8, rounds=1)
    assert capsys.readouterr().out == f"{report}\n"


# Errors


def failure(kind, loader, step=nothing, **settings):
    with pytest.raises(kind) as caught:
        gpuaug.profile(loader, step, **{**SHORT, **settings})
    return caught.value


ONE = [torch.ones(1)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"loader": ONE}, "loader must be a StreamedLoader, got list. Wrap it: gpuaug.StreamedLoader(loader)."),
        ({"step": None}, "step must be callable, got NoneType. Pass a function of one batch."),
        ({"batches": 8.5}, "batches must be a whole number, got 8.5. Leave it out for the default."),
        ({"rounds": "3"}, "rounds must be a whole number, got '3'. Leave it out for the default."),
    ],
)
def test_arguments_of_the_wrong_type(arguments, text):
    error = failure(gpuaug.ArgumentTypeError, **{"loader": streamed(ONE), **arguments})
    assert str(error) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batches": 7}, "batches must be 8 or more, got 7. Fewer say nothing about a steady loop."),
        ({"rounds": 0}, "rounds must be 1 or more, got 0. Three show how much windows differ."),
    ],
)
def test_arguments_that_say_nothing(arguments, text):
    assert str(failure(gpuaug.ArgumentError, streamed(ONE), **arguments)) == text


@pytest.mark.parametrize("source", [[], DataLoader([], batch_size=2)], ids=["list", "loader"])
def test_a_loader_without_batches(source):
    assert str(failure(gpuaug.ArgumentError, streamed(source))) == (
        "loader must have batches to be profiled, got one without any. See whether its dataset is empty."
    )


class Once:
    """Gives what is left of the same batches to whoever iterates."""

    def __init__(self, count):
        self.left = iter([torch.ones(1)] * count)

    def __iter__(self):
        return self.left


def read_once(kind):
    return (
        f"loader must wrap what can be iterated again and again, got {kind}, which can be read once. "
        "Wrap a list, a DataLoader, or an object whose __iter__ begins anew."
    )


def test_a_generator_is_refused_before_it_is_read():
    taken = []
    source = (taken.append(number) or torch.ones(1) for number in range(100))
    loader = streamed(source)
    assert str(failure(gpuaug.ArgumentError, loader)) == read_once("generator")
    assert taken == []
    assert len(list(loader)) == 100


@pytest.mark.parametrize("count", [5, 13, 40])
def test_what_can_be_read_once_is_said_to_be_so(count):
    assert str(failure(gpuaug.ArgumentError, streamed(Once(count)))) == read_once("Once")


@pytest.mark.parametrize(
    ("sample", "note"),
    [
        (6, "gpuaug: raised by the wrapped loader, at batch 3 of epoch 0."),
        (26, "gpuaug: raised by the wrapped loader, while it was measured by itself."),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_arrives_with_its_note(sample, note, workers):
    loader = streamed(DataLoader(Numbers(fails_at=sample), batch_size=2, num_workers=workers))
    error = failure(ZeroDivisionError, loader)
    assert f"sample {sample}" in str(error)
    assert error.__notes__ == [note]


def test_an_error_of_a_stage_arrives_with_its_note():
    def fails(batch):
        calls.append(1)
        if len(calls) == 5:
            raise KeyError("planted")
        return batch

    calls = []
    error = failure(KeyError, streamed(ONE * 20, TransformStage(fails, name="crop")))
    assert error.__notes__ == ["gpuaug: raised in stage 'crop', at batch 4 of epoch 0."]


@pytest.mark.parametrize("call", [1, 30, 65, 75])
def test_an_error_of_the_step_arrives_as_it_is_and_the_loader_goes_on(call):
    def step(batch):
        calls.append(torch.rand(()))
        if len(calls) == call:
            raise planted

    calls, planted = [], KeyError("planted")
    with streamed(DataLoader(Numbers(40), batch_size=2)) as loader:
        hooks, stats, state = loader._shared.hooks, loader.stats(), torch.get_rng_state()
        assert failure(KeyError, loader, step) is planted
        assert loader._shared.hooks is hooks
        assert loader.stats() is stats
        assert torch.equal(torch.get_rng_state(), state)
        assert len(list(loader)) == 20
