"""Peak memory and processor time of a call, in this process."""

import time
from contextlib import contextmanager
from types import SimpleNamespace

MEBIBYTE = 2**20


def _status_mb(field):
    with open("/proc/self/status") as file:
        return next((int(line.split()[1]) * 1024 / MEBIBYTE for line in file if line.startswith(field)), 0)


@contextmanager
def measured():
    """Measure the calls in the context: yields an object whose ``peak_mb`` and ``cpu_s`` are set at its end.

    ``peak_mb``: resident memory in MiB, at its peak, in addition to what was resident before. 0 where it cannot be measured.
    """
    cost = SimpleNamespace(peak_mb=0.0, cpu_s=0.0)
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak is the current size from here on
        before = _status_mb("VmRSS")
    except OSError:
        before = None
    start = time.process_time()
    try:
        yield cost
    finally:
        cost.cpu_s = time.process_time() - start
        if before is not None:
            cost.peak_mb = max(_status_mb("VmHWM") - before, 0)
