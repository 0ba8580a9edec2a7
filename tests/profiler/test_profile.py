"""``gpuaug.profile`` on a CPU: the sources, stages and steps that it takes, and the report that it prints."""

import threading
from collections import UserDict
from contextlib import closing, nullcontext
from dataclasses import dataclass

import pytest
import torch
from protocol.scenarios import install
from support import internals
from support.process.waiting import until
from support.profiler.profiler_sources import SHORT, HostBatches, Labelled, Numbers, nothing
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import gpuaug
from bench.harness.result_check import check_result
from gpuaug import FeatureStage, StreamedLoader, TransformStage
from gpuaug.benchkit import results
from gpuaug.core import devices
from gpuaug.feed.ring import unsupported_reason
from gpuaug.profiler import profile
from gpuaug.profiler.report import PLAIN_BESIDE_ITERATOR


def streamed(source, *stages, **options):
    return StreamedLoader(source, stages, device="cpu", **options)


def labelled(*stages):
    return streamed(DataLoader(Labelled(), batch_size=4), *stages)


SOURCES = {
    "a list": lambda: [(torch.ones(2, 3), torch.arange(2))] * 20,
    "a loader": lambda: DataLoader(Numbers(), batch_size=2, shuffle=True),
    "workers that persist": lambda: DataLoader(Numbers(), batch_size=2, num_workers=1, persistent_workers=True),
    "a loader with a state": lambda: StatefulDataLoader(Numbers(), batch_size=2),
    "a loader with a state and workers": lambda: StatefulDataLoader(Numbers(), batch_size=2, num_workers=1),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source_in_real_time(kind):
    with streamed(SOURCES[kind](), lambda x: x + 1) as loader:
        report = gpuaug.profile(loader, nothing, **SHORT)
    assert [part.name for part in report.parts] == ["load", "copy", "stage/transform", "step"]
    assert report.batch_bytes == 2 * 3 * 4 + 2 * 8
    assert len(report.verdict) >= 1
    check_result(results.result("profile", rows=report.rows(), settings=report.settings, device=torch.device("cpu")))


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


def test_kornia_and_fused_stages_have_their_kind():
    from kornia import augmentation as K

    pipeline = K.AugmentationSequential(K.RandomHorizontalFlip(), K.Normalize(0.5, 0.5))
    stages = [TransformStage(pipeline, name="eager"), TransformStage(gpuaug.fuse(pipeline), name="fused")]
    report = gpuaug.profile(streamed([torch.rand(2, 3, 8, 8)] * 10, *stages), nothing, **SHORT)
    assert (report.part("stage/eager").kind, report.part("stage/fused").kind) == ("kornia", "fused")


def test_part_runs_names_the_transform_of_an_unnamed_stage():
    def blur(images):
        return images

    def named(images):
        return images

    stages = [TransformStage(stage, on="images") for stage in (blur, torch.nn.Identity(), lambda images: images)]
    loader = labelled(*stages, TransformStage(named, on="images", name="named"))
    report = gpuaug.profile(loader, lambda batch: None, **SHORT)
    assert [part.runs for part in report.parts[2:-1]] == ["blur", "Identity", "", ""]


def test_a_stage_may_exchange_members_of_its_batch():
    def renamed(batch):
        batch["target"] = batch.pop("label")
        return batch

    report = gpuaug.profile(labelled(TransformStage(renamed, on=None)), lambda batch: batch["target"].sum(), **SHORT)
    assert [part.name for part in report.parts] == ["load", "copy", "stage/transform", "step"]


def test_stage_and_step_may_write_in_place():
    largest = {"stage": 0.0, "step": 0.0}

    def doubled(images):
        largest["stage"] = max(largest["stage"], images.max().item())
        return images.mul_(2)

    def step(batch):
        largest["step"] = max(largest["step"], batch["images"].max().item())
        batch["images"].mul_(2)

    gpuaug.profile(labelled(TransformStage(doubled, on="images")), step, **SHORT)
    assert largest["stage"] <= 63
    assert largest["step"] <= 126


class Movable(UserDict):
    """A mapping that moves itself, as transformers' are."""

    def to(self, device):
        return Movable({key: value.to(device) for key, value in self.data.items()})


def test_bytes_of_batches_that_move_themselves_are_counted():
    loader = StreamedLoader([Movable(ids=torch.zeros(8, 512, dtype=torch.long)) for _ in range(30)], device="cpu")
    report = gpuaug.profile(loader, lambda batch: batch["ids"].sum(), **SHORT)
    assert report.batch_bytes == 8 * 512 * 8


@pytest.mark.skipif(unsupported_reason() != "", reason="the ring needs Linux")
def test_feed_setting_is_the_feed_that_was_measured():
    loader = StreamedLoader(DataLoader(Numbers(), 2, num_workers=1), device="cpu", feed="ring")
    with loader:
        assert gpuaug.profile(loader, nothing, **SHORT).settings["feed"] == "ring"
        iterator = iter(loader)
        next(iterator)
        assert gpuaug.profile(loader, nothing, **SHORT).settings["feed"] == PLAIN_BESIDE_ITERATOR


def test_batches_and_rounds_set_the_number_of_steps():
    steps = []
    gpuaug.profile(streamed([torch.ones(1)] * 7), steps.append, batches=8, rounds=1, show=False)
    fewest = len(steps)
    gpuaug.profile(streamed([torch.ones(1)] * 7), steps.append, batches=12, rounds=1, show=False)
    assert len(steps) - fewest == fewest + 3 * 4, "in the streamed, the in-line and the cached window"
    fewest = len(steps)
    report = gpuaug.profile(streamed([torch.ones(1)] * 7), steps.append, batches=8, rounds=3, show=False)
    assert report.settings["rounds"] == 3
    assert report.streamed.low <= report.streamed.median <= report.streamed.high


@pytest.mark.parametrize(("processes", "all_of_them"), [(1, False), (2, True)])
def test_ranks_make_the_same_number_of_steps(monkeypatch, processes, all_of_them):
    steps = []
    monkeypatch.setattr(profile, "count_ranks", lambda: processes)
    monkeypatch.setattr(profile, "WINDOW_S", 0.0)
    loader = StreamedLoader(DataLoader(Numbers(), 2), device="cpu")
    gpuaug.profile(loader, lambda batch: steps.append(1), batches=100, rounds=1, show=False)
    assert (len(steps) >= 3 * 100) == all_of_them


@pytest.mark.parametrize("ahead", [2, 0])
@pytest.mark.parametrize("context", [nullcontext, gpuaug.step_first])
def test_window_is_timed_by_events_of_the_stream_that_trains(monkeypatch, ahead, context):
    cuda = install(monkeypatch, keeps_up=True)
    waits = []
    monkeypatch.setattr(profile, "synchronize", lambda device: waits.append(len(steps)))
    steps = []

    def step(batch):
        steps.append(batch)
        cuda.now_ms += 7  # on the device, whatever the host's clock says

    measurements = profile._Profile(StreamedLoader(HostBatches(cuda, 90), device="cuda", feed="plain"), step, 20, 1)
    with closing(measurements._batches), context():
        assert measurements._time_streamed() == pytest.approx(7)
    assert waits == [len(steps)], "once, when the window is over"
    assert not cuda.history.violations, cuda.history.report()


# The printed report


def test_nothing_is_printed_unless_shown(capfd):
    gpuaug.profile(streamed([torch.ones(1)] * 9), nothing, batches=8, rounds=1, show=False)
    assert capfd.readouterr() == ("", "")


def test_the_verdict_begins_with_why_fused_pipelines_run_in_plain_torch(monkeypatch):
    monkeypatch.setitem(devices.TRITON_FAILURES, torch.device("cpu"), "gpuaug.fuse runs in plain torch …")
    report = gpuaug.profile(streamed([torch.ones(1)] * 9), nothing, batches=8, rounds=1, show=False)
    assert report.plain_torch == report.verdict[0] == "gpuaug.fuse runs in plain torch …"


def test_show_prints_the_report_once(capsys):
    report = gpuaug.profile(streamed([torch.ones(1)] * 9), nothing, batches=8, rounds=1)
    assert capsys.readouterr().out == f"{report}\n"


# Refusals and errors


def failure(kind, loader, step=nothing, **settings):
    with pytest.raises(kind) as caught:
        gpuaug.profile(loader, step, **{**SHORT, **settings})
    return caught.value


@pytest.mark.parametrize("source", [[], DataLoader([], batch_size=2)], ids=["list", "loader"])
def test_loader_without_batches_is_refused(source):
    assert "loader must have batches to be profiled, got no batch" in str(failure(gpuaug.ArgumentError, streamed(source)))


class Once:
    """An iterable with one shared iterator: each loop over it continues where the previous loop stopped."""

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


def test_failed_profile_ends_its_iterator_though_its_error_is_kept():
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError) as kept:
        gpuaug.profile(streamed(DataLoader(Labelled(), batch_size=4)), lambda batch: 1 / 0, **SHORT)
    until(lambda: set(threading.enumerate()) <= before)
    assert kept.value.__traceback__ is not None, "whose frames hold all that the profile had"
