"""How many cases the tests in ``fuzz/`` try, which errors hostile data may raise, and what time and memory it may take."""

import time
from contextlib import contextmanager
from pathlib import Path

from hypothesis import HealthCheck, settings

import gpuaug

NIGHT = 20
"""Times as many cases, drawn anew in each run, with ``--hypothesis-profile=night``."""


def cases(count):
    """Try ``count`` cases, the same in every run."""
    night = settings.default is settings.get_profile("night")
    return settings(
        max_examples=count * (NIGHT if night else 1),
        derandomize=not night,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


MOST_CPU_S, MOST_BYTES, MOST_BYTES_PER_PIXEL = 20, 2**29, 32
"""What a file may take: seconds of all threads, and memory beside its pixels and for each of them."""


def _peak_bytes():
    """The process's peak memory since its last reset; 0 where the kernel does not say."""
    try:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0
    return 1024 * int(line.split()[1])


@contextmanager
def bounded(record, pixels=0):
    """Fail beyond the time or memory that files of ``pixels`` may take. ``record`` is called with both: seconds and bytes."""
    if _peak_bytes():
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start = _peak_bytes(), time.process_time()
    yield
    seconds, grown = time.process_time() - start, _peak_bytes() - before
    record(seconds, grown)
    assert seconds < MOST_CPU_S
    assert grown < MOST_BYTES + MOST_BYTES_PER_PIXEL * pixels


def outcome(call, *arguments, **options):
    """What a call returns; or its error, if that is gpuaug's own, or another's with a note of gpuaug that says where."""
    try:
        return call(*arguments, **options)
    except gpuaug.GpuAugError as error:
        return error
    except Exception as error:
        if not any(note.startswith("gpuaug: raised by ") for note in getattr(error, "__notes__", ())):
            raise
        return error
