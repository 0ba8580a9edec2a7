"""Lanes and the limit on run-ahead, by themselves: devices without lanes, forked children, when the host is held back."""

import sys

import pytest
import torch
from protocol.scenarios import install
from support.process import processes

from gpuaug.core import streams
from gpuaug.core.streams import Lanes

FORK = """
import gc, os, sys
import torch
import gpuaug
from gpuaug.core import streams
from gpuaug.decode.clips import libav
from support.gpu.stream_double import FakeCuda

class Handle:
    def __init__(self):
        self.me = self
    def __del__(self):
        print(name, "freed by the", "child" if os.getpid() != parent else "parent", flush=True)

def make_lanes():
    streams.cuda, streams._switch_to = FakeCuda(), lambda stream: None
    streams.Lanes(torch.device("cuda", 0))

def read_loader():
    list(gpuaug.StreamedLoader([torch.zeros(1)], device="cpu"))

def open_videos():
    assert libav.required_module()

cases = {
    "neither": lambda: None,
    "spare_forked_children": streams.spare_forked_children,
    "lanes": make_lanes,
    "loader": read_loader,
    "videos": open_videos,
}
for name, prepare in cases.items():
    # Each case in a process of its own: children stay spared once they are.
    case = os.fork()
    if case:
        assert os.waitpid(case, 0)[1] == 0
        continue
    parent = os.getpid()
    gc.disable()
    prepare()
    Handle()
    child = os.fork()
    if not child:
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    gc.collect()
    os._exit(0)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_spare_forked_children_frees_no_garbage_of_the_parent_in_a_child():
    done = processes.run_script(FORK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "neither freed by the child",  # so the test would see it
        "neither freed by the parent",
        "spare_forked_children freed by the parent",
        "lanes freed by the parent",
        "loader freed by the parent",
        "videos freed by the parent",
    ]


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu"])
def test_lanes_of_devices_other_than_cuda_are_in_line(device):
    lanes = Lanes(torch.device(device))
    assert lanes.in_line
    assert lanes.copy.in_line
    assert lanes.lane("stage/transform").in_line
    assert lanes.consumer() is lanes.copy
    assert lanes.current_stream() == 0


def test_the_host_sleeps_in_a_wait_for_an_event(monkeypatch):
    cuda, made = install(monkeypatch), []
    monkeypatch.setattr(streams, "_CudaEvent", lambda **options: made.append(options) or cuda.Event(**options))
    lane = Lanes(torch.device("cuda", 0)).copy
    lane.record_event()
    lane.record_event(timed=True)
    assert [(each["blocking"], each["enable_timing"]) for each in made] == [(True, False), (True, True)]


@pytest.mark.parametrize("current", [0, 1])
def test_after_a_launch_the_stream_is_current_that_was_before_it(monkeypatch, current):
    cuda = install(monkeypatch)
    lanes = Lanes(torch.device("cuda", 0))
    consumer, elsewhere = lanes.lane("consumer"), cuda.Stream()
    monkeypatch.setattr(streams, "current_device", lambda: current)
    # On another device than the lanes' the loop's own stream is current besides.
    before = elsewhere if current else consumer.stream
    cuda.set_stream(before)
    with lanes.launching(consumer):
        lanes.copy.make_current()
        assert cuda.current_stream() is lanes.copy.stream
    assert cuda.current_stream() is before
