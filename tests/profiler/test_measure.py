"""Figures that are read from a trace, and the time that one stage or step takes alone."""

import threading
import time
from collections import UserDict
from contextlib import closing
from types import MappingProxyType

import pytest
import torch
from protocol.scenarios import install, script_arrivals
from support.files import nvjpeg_double
from support.files.encoded import encoded
from support.profiler import virtual_clock
from support.profiler.profiler_sources import HostBatches, nothing
from support.video import nvdec_double
from support.video.videos import video

from gpuaug import DecodeStage, StreamedLoader, collate_encoded, read_clip
from gpuaug.core.streams import Lanes
from gpuaug.decode.decoders import cpu
from gpuaug.loader.inspection import Inspection
from gpuaug.profiler import isolated, measure
from gpuaug.profiler.measure import (
    DeviceWork,
    Spread,
    can_trace,
    figure_text,
    link_gb_per_s,
    read_trace,
    time_alone,
    trace_device_work,
    waits_at,
)
from gpuaug.profiler.steady_state import EndlessBatches, RepeatedBatch

CPU = torch.device("cpu")


def event(category, start_us, took_us, name="name"):
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": took_us}


def test_read_trace_counts_overlapping_kernels_once():
    events = [
        event("kernel", 4000, 1000),  # by itself, and earlier in the trace than it ran
        event("kernel", 1000, 1000),
        event("kernel", 1500, 1000),  # half of it beside the one before
        event("kernel", 1600, 100),  # within both
        event("kernel", 2500, 500),  # right after
    ]
    assert read_trace(events, 1) == DeviceWork(3.0, 0)


def test_read_trace_counts_copies_and_fills_but_no_waits():
    events = [event("gpu_memcpy", 0, 1000), event("gpu_memset", 5000, 500)]
    others = [event("cuda_runtime", 9000, 700, "cudaStreamSynchronize"), event("gpu_user_annotation", 0, 9000)]
    assert read_trace(events + others, 1) == DeviceWork(1.5, 0)


def test_read_trace_counts_launches():
    names = ["cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch"]
    others = ["cudaStreamSynchronize", "cudaEventRecord", "cudaStreamWaitEvent", "cudaStreamIsCapturing", "cudaMalloc"]
    events = [event("cuda_runtime", 0, 5, name) for name in names + others] + [event("cuda_driver", 0, 5, "cuLaunchKernel")]
    assert read_trace(events, 1) == DeviceWork(0.0, 6)
    assert read_trace([event("cpu_op", 0, 5, "aten::LaunchAsync")], 1).launches == 0


def test_read_trace_divides_by_calls():
    events = [event("kernel", 1000 * call, 600) for call in range(3)]
    events += [event("cuda_runtime", 1000 * call, 5, "cudaLaunchKernel") for call in range(3) for _ in range(7)]
    assert read_trace(events, 3) == DeviceWork(pytest.approx(0.6), 7)


def test_read_trace_without_work():
    metadata = {"ph": "M", "name": "process_name", "args": {"name": "python"}}
    assert read_trace([metadata], 3) == DeviceWork(0.0, 0)


def test_alone_times_every_call(monkeypatch):
    clock, calls = virtual_clock.install(monkeypatch), []

    def work():
        calls.append(clock.sleep(0.01 if len(calls) < 4 else 0.02))

    wall, host = time_alone(work, CPU, 5)
    assert len(calls) == 5
    assert wall == host, "on a CPU it is all the training thread's"
    assert (wall.low, wall.median, wall.high) == (pytest.approx(10), pytest.approx(10), pytest.approx(20))


def test_alone_on_a_device_times_the_wait_once_for_all_calls(monkeypatch):
    clock, calls, waits = virtual_clock.install(monkeypatch), [], []

    def synchronize(device):
        waits.append(len(calls))
        clock.sleep(0.03)

    monkeypatch.setattr(measure, "synchronize", synchronize)
    wall, host = time_alone(lambda: calls.append(clock.sleep(0.002)), torch.device("cuda", 0), 5)
    assert host == Spread(*[pytest.approx(2)] * 3), "queueing, on a device that is idle"
    assert wall == Spread(*[pytest.approx(2 + 30 / 5)] * 3)
    assert waits == [0, 1, 2, 3, 4, 5, 10, 10, 15, 15, 20]


def test_spread_has_median_low_and_high():
    assert Spread.of([3.0, 1.0, 7.0]) == Spread(3.0, 1.0, 7.0)
    assert str(Spread(3.14159, 1.0, 7123.4)) == "3.14 (1-7,123)"
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.01234, "0.0123"), (12.34, "12.3"), (999.4, "999"), (1234.5, "1,234"), (1e6, "1,000,000")]
)
def test_figure_has_three_digits_and_no_exponent(value, text):
    assert figure_text(value) == text


def test_device_probes_on_a_cpu_give_none():
    def never():
        raise AssertionError

    assert trace_device_work(never, CPU) is None
    assert waits_at(never, CPU) is None
    assert link_gb_per_s(Lanes(CPU)) is None


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 10, 11, 12, 13, 40])
def test_pull_after_an_end_that_was_read_ahead_does_not_block(monkeypatch, count):
    cuda = install(monkeypatch, keeps_up=True)
    passes, pulled = EndlessBatches(Inspection(StreamedLoader(HostBatches(cuda, count), device="cuda", feed="plain"))), []
    with closing(passes):
        for taken in range(1, 16):
            passes.next(2)
            thread = threading.Thread(target=lambda: pulled.append(passes.pull()), daemon=True)
            thread.start()
            thread.join(60)
            assert len(pulled) == taken, "it waits for what never comes"


@pytest.mark.parametrize("loaders_own", [0, 2, 5])
def test_batches_are_launched_as_far_ahead_as_each_call_says(monkeypatch, loaders_own):
    cuda = install(monkeypatch, keeps_up=True)
    script_arrivals(monkeypatch, [True])
    loader = StreamedLoader(HostBatches(cuda, 6), device="cuda", feed="plain", depth=loaders_own)
    passes, ready = EndlessBatches(Inspection(loader)), []
    with closing(passes):
        for depth in (0, 0, 2, 2, 0, 0, 2, 0):  # the seventh batch is the first of an epoch
            passes.next(depth)
            assert loader.stats().depth == depth
            ready.append(loader.stats().ready)
    assert ready == [0, 0, 2, 2, 1, 0, 2, 1]


def test_part_falls_back_to_wall_time_where_no_profiler_can_look(monkeypatch):
    assert not can_trace(torch.device("cpu"))
    monkeypatch.setattr(isolated, "waits_at", lambda work, device: None)
    wall = type("Wall", (), {"median": 7.0})()
    monkeypatch.setattr(isolated, "time_alone", lambda work, device, repeats: (wall, "host"))
    on_gpu = isolated._part("step", nothing, device=torch.device("cuda", 0), tracing=False)
    assert (on_gpu.host, on_gpu.device_ms, on_gpu.launches) == ("host", 7.0, None)
    in_line = isolated._part("step", nothing, device=torch.device("mps"), tracing=False)
    assert (in_line.host, in_line.device_ms) == (wall, None), "one queue, on which all is done in turn"


def test_decoding_is_a_part_that_is_not_the_training_threads():
    batch, given = collate_encoded([(encoded(), 0), (encoded(40, 24), 1)]), []
    loader = StreamedLoader([batch], [DecodeStage(), lambda images: given.append(images) or images.data.float()], device="cpu")
    decode, copy, transform, step = isolated.measure_parts(Inspection(loader), batch, lambda: None)
    assert [part.name for part in (decode, copy, transform, step)] == ["stage/decode", "copy", "stage/transform", "step"]
    assert (decode.kind, decode.host, decode.device_ms) == ("cpu decoder", None, None)
    assert all(len(images) == 2 for images in given)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gpuaug-decode")]


def test_decoding_of_clips_is_a_part(monkeypatch):
    batch = collate_encoded([(read_clip(video(), 4), 0)])
    for kind in ("clip decoder", "video engines"):
        decode, *_ = isolated.measure_parts(
            Inspection(StreamedLoader([batch], [DecodeStage()], device="cpu")), batch, lambda: None
        )
        assert decode.kind == kind
        nvdec_double.use(monkeypatch)


@pytest.mark.parametrize(
    ("slow", "kind"),
    [("engines", "engines"), ("hybrid", "beside engines"), ("cpu", "beside engines"), ("cpu alone", "cpu decoder")],
)
def test_the_decoder_that_batches_wait_for_is_found(monkeypatch, slow, kind):
    def slowed(function, name):
        return lambda *arguments: time.sleep(0.06 if name in slow else 0.0) or function(*arguments)

    decode = nvjpeg_double.BatchDecoder.decode
    monkeypatch.setattr(nvjpeg_double.BatchDecoder, "decode", slowed(decode, "engines"))
    monkeypatch.setattr(nvjpeg_double.PhasedDecoder, "host_phase", slowed(nvjpeg_double.PhasedDecoder.host_phase, "hybrid"))
    monkeypatch.setattr(cpu, "decode", slowed(cpu.decode, "cpu"))
    monkeypatch.setattr(isolated, "REPEATS", 3)
    nvjpeg_double.use(monkeypatch)
    batch = collate_encoded([(encoded(), 0), (encoded(progressive=True), 1), (encoded(8, 8, "PNG"), 2)])
    stage = DecodeStage(backend="cpu" if slow == "cpu alone" else "auto")
    decoding, *_ = isolated.measure_parts(Inspection(StreamedLoader([batch], [stage], device="cpu")), batch, lambda: None)
    assert decoding.kind == kind


def test_containers_are_new_and_tensors_are_copied_where_they_are_written_to():
    first, held = torch.arange(3.0), UserDict(a=1)
    again = RepeatedBatch({"x": [first, first], "held": held, "movable": UserDict(y=first)})
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


def test_a_repeated_batch_copies_neither_keys_nor_attributes_of_containers():
    class Locked(dict):
        """Mapping with an attribute that cannot be copied."""

    key = object()
    batch = Locked({key: [torch.ones(2)], "text": MappingProxyType({"caption": "a cat"})})
    batch.lock = threading.Lock()
    again = RepeatedBatch(batch)
    first, second = again(), again()
    assert first.lock is second.lock is batch.lock
    assert first.keys() == batch.keys()
    assert first[key] is not second[key]
    assert first["text"] == batch["text"]
