"""A part of the work by itself, where no profiler sees the device."""

import threading
import time

import pytest
import torch
from support.files import nvjpeg_double
from support.files.encoded import encoded
from support.profiler.profiler_sources import nothing

from gpuaug import DecodeStage, StreamedLoader, collate_encoded
from gpuaug.decode.decoders import cpu
from gpuaug.profiler import isolated
from gpuaug.profiler.measure import can_look


def test_part_falls_back_to_wall_time_where_no_profiler_can_look(monkeypatch):
    assert not can_look(torch.device("cpu"))
    monkeypatch.setattr(isolated, "waits_at", lambda work, device: None)
    wall = type("Wall", (), {"median": 7.0})()
    monkeypatch.setattr(isolated, "alone", lambda work, device, repeats: (wall, "host"))
    on_gpu = isolated._part("step", nothing, torch.device("cuda", 0), False)
    assert (on_gpu.host, on_gpu.device_ms, on_gpu.launches) == ("host", 7.0, None)
    in_line = isolated._part("step", nothing, torch.device("mps"), False)
    assert (in_line.host, in_line.device_ms) == (wall, None), "one queue, on which all is done in turn"


def test_decoding_is_a_part_that_is_not_the_training_threads():
    batch, given = collate_encoded([(encoded(), 0), (encoded(40, 24), 1)]), []
    loader = StreamedLoader([batch], [DecodeStage(), lambda images: given.append(images) or images.data.float()], device="cpu")
    decode, copy, transform, step = isolated.measured(loader, batch, lambda: None)
    assert [part.name for part in (decode, copy, transform, step)] == ["stage/decode", "copy", "stage/transform", "step"]
    assert (decode.kind, decode.host, decode.device_ms) == ("cpu decoder", None, None)
    assert all(len(images) == 2 for images in given)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gpuaug-decode")]


@pytest.mark.parametrize(
    ("slow", "kind"),
    [("engines", "engines"), ("hybrid", "beside engines"), ("cpu", "beside engines"), ("cpu alone", "cpu decoder")],
)
def test_the_decoder_that_batches_wait_for_is_found(monkeypatch, slow, kind):
    def slowed(function, name):
        return lambda *arguments: time.sleep(0.02 if name in slow else 0.0) or function(*arguments)

    decode = nvjpeg_double.BatchDecoder.decode
    monkeypatch.setattr(nvjpeg_double.BatchDecoder, "decode", slowed(decode, "engines"))
    monkeypatch.setattr(nvjpeg_double.PhasedDecoder, "host_phase", slowed(nvjpeg_double.PhasedDecoder.host_phase, "hybrid"))
    monkeypatch.setattr(cpu, "decode", slowed(cpu.decode, "cpu"))
    nvjpeg_double.use(monkeypatch)
    batch = collate_encoded([(encoded(), 0), (encoded(progressive=True), 1), (encoded(8, 8, "PNG"), 2)])
    stage = DecodeStage(backend="cpu" if slow == "cpu alone" else "auto")
    decoding, *_ = isolated.measured(StreamedLoader([batch], [stage], device="cpu"), batch, lambda: None)
    assert decoding.kind == kind
