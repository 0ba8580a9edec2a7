"""Processes: allowed cores, CPU time, waiting until they are idle, and resources of this process."""

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import active_children
from pathlib import Path

import torch

UNITS = {
    "resident memory": "bytes",
    "private memory": "bytes",
    "shared memory": "bytes",
    "/dev/shm": "bytes",
    "reserved GPU memory": "bytes",
    "threads": "",
    "descriptors": "",
}
"""Unit of each resource of ``resource_usage``."""

_POLL_S = 0.1  # ten ticks of the kernel


def cpu_seconds() -> float:
    """Return the CPU seconds, user and system, of this process and its descendants.

    A process that has ended is counted once its parent has waited for it.
    """
    times = os.times()
    total = time.process_time() + times.children_user + times.children_system  # finer than ticks of the kernel
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    children_by_parent = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # Fields after the name of the process, which may contain spaces and brackets.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        children_by_parent[int(fields[1])].append((int(stat.parent.name), sum(map(int, fields[11:15])) / ticks_per_s))
    return total + sum(seconds for _, seconds in _descendants(os.getpid(), children_by_parent))


def settle(limit_s: float = 5.0) -> bool:
    """Wait until this process and its workers use less than half a core. Returns ``False`` after ``limit_s``.

    After a loop has paused, its workers go on until their queues are full, and would take cores from the next loop. Without
    workers the function returns at once.
    """
    if not active_children():
        return True
    end = time.monotonic() + limit_s
    cpu_s = cpu_seconds()
    while time.monotonic() < end:
        time.sleep(_POLL_S)
        previous_cpu_s = cpu_s
        cpu_s = cpu_seconds()
        if cpu_s - previous_cpu_s < _POLL_S / 2:  # cpu_seconds() itself takes some CPU time
            return True
    return False


def _descendants(parent: int, children_by_parent: dict[int, list[tuple[int, float]]]) -> Iterator[tuple[int, float]]:
    for process, seconds in children_by_parent.get(parent, ()):
        yield process, seconds
        yield from _descendants(process, children_by_parent)


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Within the context, restrict this thread and processes that it starts to the first ``count`` of its allowed cores.

    Processes that are started in the context size their thread pools accordingly. Other running threads keep their cores.
    """
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def resource_usage(device: torch.device) -> dict[str, int]:
    """Return the current value of each resource in ``UNITS``; reserved GPU memory only for a GPU.

    Resident memory is RSS; private memory is USS, the pages that only this process maps; shared memory is the proportional
    share (PSS) of shared pages, such as the pages of a ring. ``/dev/shm`` is the memory that all processes use there.
    """
    pages = _memory_bytes()
    shm = os.statvfs("/dev/shm")
    usage = {
        "resident memory": pages["Rss"],
        "private memory": pages["Private_Clean"] + pages["Private_Dirty"],
        "shared memory": pages["Pss_Shmem"],
        "/dev/shm": (shm.f_blocks - shm.f_bfree) * shm.f_frsize,
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
    if device.type == "cuda":
        usage["reserved GPU memory"] = torch.cuda.memory_reserved(device)
    return usage


def _memory_bytes() -> dict[str, int]:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
