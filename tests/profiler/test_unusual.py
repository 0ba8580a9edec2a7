"""What users' loaders, stages and steps do, and a profile has to bear."""

import threading
import time
from collections import UserDict

import pytest
import torch
from protocol.scenarios import install
from support.profiler_sources import SHORT, Numbers, nothing
from support.waiting import until
from torch.utils.data import DataLoader, Dataset

import gpuaug
from gpuaug import StreamedLoader, TransformStage
from gpuaug.feed.ring import why_not_here
from gpuaug.profiler import isolated, profile
from gpuaug.profiler.measure import can_look
from gpuaug.profiler.repeated_batch import RepeatedBatch
from gpuaug.profiler.report import ANOTHER_ITERATOR
from gpuaug.profiler.steady_state import EndlessBatches


class Labelled(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"images": torch.full((4,), float(index)), "label": torch.tensor(index % 10)}


def labelled(*stages):
    return StreamedLoader(DataLoader(Labelled(), batch_size=4), stages, device="cpu")


class Movable(UserDict):
    """A mapping that moves itself, as transformers' are."""

    def to(self, device):
        return Movable({key: value.to(device) for key, value in self.data.items()})


class Generated:
    """A source that is pulled by a thread and can be read again."""

    def __init__(self, cuda, count):
        self.cuda, self.count = cuda, count

    def __iter__(self):
        for _ in range(self.count):
            yield self.cuda.host_batch()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 10, 11, 12, 13, 40])
def test_an_end_that_was_read_ahead_does_not_keep_a_pull_waiting(monkeypatch, count):
    cuda = install(monkeypatch, keeps_up=True)
    passes, pulled = EndlessBatches(StreamedLoader(Generated(cuda, count), device="cuda", feed="plain")), []
    with passes:
        for taken in range(1, 16):
            passes.next(2)
            thread = threading.Thread(target=lambda: pulled.append(passes.pull()), daemon=True)
            thread.start()
            thread.join(10)
            assert len(pulled) == taken, "it waits for what never comes"


def test_a_step_may_take_labels_out_of_its_batch():
    report = gpuaug.profile(labelled(), lambda batch: batch.pop("label") + batch["images"].sum(), **SHORT)
    assert report.part("step").wall.median > 0


def test_a_stage_may_exchange_members_of_its_batch():
    def renamed(batch):
        batch["target"] = batch.pop("label")
        return batch

    report = gpuaug.profile(labelled(TransformStage(renamed, on=None)), lambda batch: batch["target"].sum(), **SHORT)
    assert [part.name for part in report.parts] == ["load", "copy", "stage/transform", "step"]


def test_what_is_written_in_place_does_not_add_up():
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


def test_again_makes_containers_anew_and_tensors_where_they_are_written_to():
    first, held = torch.arange(3.0), UserDict(a=1)
    again = RepeatedBatch({"x": [first, first], "held": held, "movable": Movable(y=first)})
    one, two, three = again(), again(), again()
    assert one["x"][0] is one["x"][1], "one tensor in two places stays one"
    assert one["x"][0] is not first, "the first is a copy, to see whether it is written to"
    assert two["x"][0] is three["x"][0] is first
    assert two is not three
    assert two["x"] is not three["x"]
    two["movable"].pop("y")
    assert "y" in three["movable"]
    written = RepeatedBatch([first])
    for _ in range(3):
        (tensor,) = written()
        assert tensor.tolist() == [0, 1, 2]
        tensor.add_(1)
    with torch.inference_mode():
        assert RepeatedBatch(torch.ones(2))().tolist() == RepeatedBatch([torch.ones(2)])()[0].tolist() == [1, 1]


def test_bytes_of_batches_that_move_themselves_are_counted():
    loader = StreamedLoader([Movable(ids=torch.zeros(8, 512, dtype=torch.long)) for _ in range(30)], device="cpu")
    report = gpuaug.profile(loader, lambda batch: batch["ids"].sum(), **SHORT)
    assert report.batch_bytes == 8 * 512 * 8


@pytest.mark.skipif(why_not_here() is not None, reason="the ring is for Linux")
def test_the_feed_that_is_named_is_the_one_that_was_measured():
    loader = StreamedLoader(DataLoader(Numbers(), 2, num_workers=1), device="cpu", feed="ring")
    with loader:
        assert gpuaug.profile(loader, nothing, **SHORT).settings["feed"] == "ring"
        iterator = iter(loader)
        next(iterator)
        assert gpuaug.profile(loader, nothing, **SHORT).settings["feed"] == ANOTHER_ITERATOR


@pytest.mark.parametrize(("processes", "all_of_them"), [(1, False), (2, True)])
def test_processes_that_train_together_make_as_many_steps(monkeypatch, processes, all_of_them):
    steps = []
    monkeypatch.setattr(profile, "ranks", lambda: processes)
    monkeypatch.setattr(profile, "WINDOW_S", 0.0)
    loader = StreamedLoader(DataLoader(Numbers(), 2), device="cpu")
    gpuaug.profile(loader, lambda batch: steps.append(1), batches=100, rounds=1, show=False)
    assert (len(steps) >= 3 * 100) == all_of_them


def test_where_no_profiler_can_look_the_time_from_one_to_the_next_stands_in(monkeypatch):
    assert not can_look(torch.device("cpu"))
    monkeypatch.setattr(isolated, "waits_at", lambda work, device: None)
    wall = type("Wall", (), {"median": 7.0})()
    monkeypatch.setattr(isolated, "alone", lambda work, device, repeats: (wall, "host"))
    on_gpu = isolated._part("step", nothing, torch.device("cuda", 0), False)
    assert (on_gpu.host, on_gpu.device_ms, on_gpu.launches) == ("host", 7.0, None)
    in_line = isolated._part("step", nothing, torch.device("mps"), False)
    assert (in_line.host, in_line.device_ms) == (wall, None), "one queue, on which all is done in turn"


def test_a_stage_without_a_name_of_its_own_is_known_by_what_it_runs():
    def blur(images):
        return images

    def named(images):
        return images

    stages = [TransformStage(stage, on="images") for stage in (blur, torch.nn.Identity(), lambda images: images)]
    loader = labelled(*stages, TransformStage(named, on="images", name="named"))
    report = gpuaug.profile(loader, lambda batch: None, **SHORT)
    assert [part.runs for part in report.parts[2:-1]] == ["blur", "Identity", "", ""]


def test_an_error_of_the_step_says_how_the_step_is_called():
    with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
        gpuaug.profile(labelled(), lambda images, labels: None, **SHORT)
    assert caught.value.__notes__ == [
        "gpuaug: raised by the step, which is called with one batch as the loader yields it. "
        "One of two arguments is lambda batch: step(*batch)."
    ]


def test_what_begins_epochs_is_told_apart_from_what_loads():
    slow_start = DataLoader(Numbers(6), 2, num_workers=1, worker_init_fn=sleeping_start)
    report = gpuaug.profile(StreamedLoader(slow_start, device="cpu"), nothing, **SHORT)
    assert report.epoch_ms > 30, "half a second for three batches, in a window of eight"
    assert report.load_ms < 30
    assert report.verdict[0].startswith("Bounded by the beginning of epochs, which takes ")
    long = gpuaug.profile(StreamedLoader(DataLoader(Numbers(), 2), device="cpu"), nothing, **SHORT)
    assert long.epoch_ms == 0


def sleeping_start(worker):
    time.sleep(0.3)


@pytest.mark.parametrize("ahead", [2, 0])
def test_a_window_is_timed_on_the_stream_that_trains_and_waits_for_nothing(monkeypatch, ahead):
    cuda = install(monkeypatch, keeps_up=True)
    waits = []
    monkeypatch.setattr(profile, "synchronize", lambda device: waits.append(len(steps)))
    steps = []

    def step(batch):
        steps.append(batch)
        cuda.now_ms += 7  # as the device does it, whatever the host's clock says

    measurements = profile._Profile(StreamedLoader(Generated(cuda, 90), device="cuda", feed="plain"), step, 20, 1)
    with measurements._passes:
        assert measurements._loop(ahead) == pytest.approx(7)
    assert waits == [len(steps)], "once, when the window is over"
    assert not cuda.history.violations, cuda.history.report()


def test_a_profile_that_fails_lets_go_of_its_pass_though_its_error_is_kept():
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError) as kept:
        gpuaug.profile(labelled(), lambda batch: 1 / 0, **SHORT)
    until(lambda: set(threading.enumerate()) <= before)
    assert kept.value.__traceback__ is not None, "whose frames hold all that the profile had"


def test_epochs_that_began_before_a_window_are_not_counted_in_it():
    measurements = profile._Profile(StreamedLoader([torch.ones(1)] * 90, device="cpu"), nothing, 8, 1)
    measurements._passes.starting_s = 5.0
    with measurements._passes:
        measurements._loop(2)
    assert measurements._starting_ms == [0.0]
