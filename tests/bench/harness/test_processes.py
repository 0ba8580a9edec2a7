"""Time and cores of processes."""

import itertools
import multiprocessing
import os
import subprocess
import sys
import time

import pytest

from bench.harness import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

BUSY = "import time\nwhile time.process_time() < 60: pass"
BELOW_ANOTHER = (
    f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {BUSY!r}]); sys.stdin.read(); child.kill()"
)


@pytest.mark.parametrize("code", [BUSY, BELOW_ANOTHER], ids=["below", "below another"])
def test_time_of_processes_below_counts(code):
    before, own_before = processes.cpu_seconds(), time.process_time()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        # More than starting two interpreters takes.
        while processes.cpu_seconds() - before < 0.3 + time.process_time() - own_before:
            time.sleep(0.02)
        child.stdin.close()
        if code is BUSY:
            child.kill()
            child.wait()
            cpu_s = processes.cpu_seconds() - before
            assert cpu_s >= 0.25 + time.process_time() - own_before, "of one that has ended, too"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_processes_that_start_meanwhile_have_so_many_cores():
    before = os.sched_getaffinity(0)
    with processes.on_cores(1):
        output = subprocess.check_output([sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"])
    assert int(output) == 1
    assert os.sched_getaffinity(0) == before


def used(monkeypatch, seconds):
    """Have ``settle`` find that so much CPU time is used in each of its looks; its clock moves by what it sleeps."""
    clock = iter(range(1000))
    looks = itertools.chain([0.0], seconds)
    total = 0.0

    def cpu_seconds():
        nonlocal total
        total += next(looks)
        return total

    monkeypatch.setattr(processes, "active_children", lambda: ["a worker"])
    monkeypatch.setattr(processes, "cpu_seconds", cpu_seconds)
    monkeypatch.setattr(processes.time, "sleep", lambda _: None)
    monkeypatch.setattr(processes.time, "monotonic", lambda: next(clock) * processes._POLL_S)


def test_settle_waits_until_little_is_used(monkeypatch):
    left = []
    used(monkeypatch, (left.append(seconds) or seconds for seconds in (1.4, 0.1, 0.051, 0.049, 1.0)))
    assert processes.settle()
    assert left == [1.4, 0.1, 0.051, 0.049]


def test_settle_gives_up_at_its_limit(monkeypatch):
    used(monkeypatch, (0.1 for _ in range(1000)))
    assert not processes.settle(limit_s=2.0)


def test_settle_waits_for_no_worker_that_is_idle():
    worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600.0,), daemon=True)
    worker.start()
    try:
        assert processes.settle(limit_s=60.0)
        assert worker.is_alive()
    finally:
        worker.kill()
        worker.join()
