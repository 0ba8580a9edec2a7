"""Time and cores of processes."""

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
