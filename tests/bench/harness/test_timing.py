"""The time of a call on a GPU that is pretended."""

import pytest
import torch

from bench.harness import timing


class PretendGpu:
    """A clock in ms, the end of the work queued so far, and what ``gpu_ms`` uses of ``torch.cuda``."""

    def __init__(self, monkeypatch):
        self.now = self.busy_until = 0.0
        for name, fake in {"synchronize": self.synchronize, "_sleep": self.sleep, "Event": lambda **_: Event(self)}.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def synchronize(self):
        self.now = max(self.now, self.busy_until)

    def sleep(self, cycles):
        self.launch(0.0, cycles / 2e6)

    def launch(self, host_ms, gpu_ms):
        self.now += host_ms
        self.busy_until = max(self.busy_until, self.now) + gpu_ms


class Event:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.at = max(self.gpu.now, self.gpu.busy_until)

    def query(self):
        return self.gpu.now >= self.at

    def elapsed_time(self, other):
        return other.at - self.at


def test_the_gpus_time_leaves_out_the_hosts(monkeypatch):
    gpu = PretendGpu(monkeypatch)

    def slow_host():
        gpu.launch(5.0, 0.1)

    assert timing.gpu_ms(slow_host, launches=2, host_ms=5.0) == pytest.approx(0.1)
    # Said to take less than it does: the sleep is over too soon, and that must not be taken for the GPU's time.
    assert timing.gpu_ms(slow_host, launches=2, host_ms=1.5) == pytest.approx(0.1)


def test_a_call_that_waits_for_the_gpu_has_no_time_of_its_own(monkeypatch):
    gpu = PretendGpu(monkeypatch)

    def waits():
        gpu.launch(0.1, 0.1)
        gpu.synchronize()

    assert timing.gpu_ms(waits, launches=100, host_ms=0.2) is None


def test_a_call_that_can_be_queued_only_once_is_timed_alone(monkeypatch):
    gpu = PretendGpu(monkeypatch)
    held = []

    def needs_memory():
        if held and gpu.now < held[-1]:
            gpu.synchronize()
        gpu.launch(0.1, 0.2)
        held.append(gpu.busy_until)

    assert timing.gpu_ms(needs_memory, launches=3, host_ms=0.1) == pytest.approx(0.2)
