"""A part of the work by itself, where no profiler sees the device."""

import torch
from support.profiler_sources import nothing

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
