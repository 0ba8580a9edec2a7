"""How many cases the tests in ``fuzz/`` try, which errors hostile data may raise, and what time and memory it may take."""

import functools
import resource
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings, target
from hypothesis.errors import UnsatisfiedAssumption

import gpuaug
from gpuaug.benchkit import results

NIGHT = 20
"""Times as many cases, drawn anew in each run, with ``--hypothesis-profile=night``."""


@dataclass
class Measurement:
    """Cases of a test in this process, and what they took."""

    cases: int = 0
    """Number of cases that passed."""
    failed: int = 0
    """Number of cases that failed, also while Hypothesis makes a failing case smaller."""
    cpu_s: float = 0.0
    most_cpu_s: float = 0.0
    most_grown_bytes: int = 0


MEASURED = {}
"""Name of each test → its measurement."""


def cases(count):
    """Try ``count`` cases, the same in every run, and measure each.

    By night, cases are drawn anew, Hypothesis looks for cases that take more time and memory, and keeps the most extreme ones
    in ``.hypothesis``: the next run begins with this corpus.
    """
    night = settings.default is settings.get_profile("night")

    def decorate(test):
        test.hypothesis.inner_test = _measured(test.hypothesis.inner_test, night)
        return settings(
            max_examples=count * (NIGHT if night else 1),
            derandomize=not night,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        )(test)

    return decorate


def _measured(test, night):
    @functools.wraps(test)
    def run(*arguments, **options):
        measured = MEASURED.setdefault(f"{test.__module__.rpartition('.')[2]}: {test.__name__}", Measurement())
        before, start = _reset_peak(), time.process_time()
        try:
            result = test(*arguments, **options)
        except UnsatisfiedAssumption:
            raise
        except Exception:
            measured.failed += 1
            raise
        measured.cases += 1
        seconds, grown = time.process_time() - start, max(_peak_bytes() - before, 0)
        measured.cpu_s += seconds
        measured.most_cpu_s = max(measured.most_cpu_s, seconds)
        measured.most_grown_bytes = max(measured.most_grown_bytes, grown)
        if night:
            target(seconds, label="CPU seconds")
            target(grown, label="bytes")
        return result

    return run


def added(before):
    """The result of all runs: the measurements of this process, added to those of an earlier result, or to none."""
    rows = {row["name"]: row for row in (before or {"rows": []})["rows"]}
    for name, measured in MEASURED.items():
        row = rows.get(name, {})
        rows[name] = {
            "name": name,
            "cases": row.get("cases", 0) + measured.cases,
            "failed": row.get("failed", 0) + measured.failed,
            "took_s": row.get("took_s", 0.0) + measured.cpu_s,
            "most_s": max(row.get("most_s", 0.0), measured.most_cpu_s),
            "most_bytes": max(row.get("most_bytes", 0), measured.most_grown_bytes),
        }
    earlier = (before or {"settings": {"runs": 0, "cpu_s": 0.0}})["settings"]
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = earlier["cpu_s"] + sum(each.ru_utime + each.ru_stime for each in usage)
    totals = {**earlier, "runs": earlier["runs"] + 1, "cpu_s": cpu_s}
    return results.result("fuzz", rows=[*rows.values()], settings=totals, device=torch.device("cpu"))


MOST_CPU_S, MOST_BYTES, MOST_BYTES_PER_PIXEL = 20, 2**29, 32
"""What a file may take: seconds of all threads, and memory beside its pixels and for each of them."""


def _peak_bytes():
    """The process's peak memory since its last reset; 0 where the kernel does not say."""
    try:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0
    return 1024 * int(line.split()[1])


def _reset_peak():
    """Reset the process's peak memory, and return what it holds: the peak from now on."""
    if _peak_bytes():
        Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


@contextmanager
def bounded(record, pixels=0):
    """Fail beyond the time or memory that files of ``pixels`` may take. ``record`` is called with both: seconds and bytes."""
    before, start = _reset_peak(), time.process_time()
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
