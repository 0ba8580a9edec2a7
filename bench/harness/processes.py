"""Processes: the cores that they may use, their CPU time, when they are idle, and the resources of this one."""

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
"""Unit of each resource that ``held`` reads."""

_QUIET_S = 0.1  # ten of the kernel's ticks


def cpu_seconds() -> float:
    """CPU seconds, user and system, of this process, its threads and all its descendants.

    A process that ended counts once its parent has waited for it.
    """
    times = os.times()
    total = time.process_time() + times.children_user + times.children_system  # finer than the kernel's ticks
    ticks = os.sysconf("SC_CLK_TCK")
    below = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # Fields after the name, which may contain spaces and brackets.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        below[int(fields[1])].append((int(stat.parent.name), sum(map(int, fields[11:15])) / ticks))
    return total + sum(seconds for _, seconds in _descendants(os.getpid(), below))


def settle(limit_s: float = 5.0) -> bool:
    """Wait until this process and its workers use less than half a core. Returns whether they do within ``limit_s``.

    Workers go on until their queues are full, after the loop that read them has paused, and take the cores from the next one.
    Returns at once where there are none.
    """
    if not active_children():
        return True
    end = time.monotonic() + limit_s
    used = cpu_seconds()
    while time.monotonic() < end:
        time.sleep(_QUIET_S)
        before = used
        used = cpu_seconds()
        if used - before < _QUIET_S / 2:  # to look at all processes takes some of it
            return True
    return False


def _descendants(parent: int, below: dict[int, list[tuple[int, float]]]) -> Iterator[tuple[int, float]]:
    for process, seconds in below.get(parent, ()):
        yield process, seconds
        yield from _descendants(process, below)


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Let this thread, and the processes that it starts meanwhile, use the first ``count`` of the cores it may use.

    A process that is started meanwhile sizes its thread pools by them. Threads that run already keep their cores.
    """
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def held(device: torch.device) -> dict[str, int]:
    """Each of ``UNITS`` now; reserved GPU memory only for a GPU.

    Resident memory is RSS; private memory USS, the pages that only this process maps; shared memory the proportional share
    (PSS) of shared pages such as a ring's. ``/dev/shm`` is the memory that all processes use there.
    """
    pages = _rollup()
    shm = os.statvfs("/dev/shm")
    found = {
        "resident memory": pages["Rss"],
        "private memory": pages["Private_Clean"] + pages["Private_Dirty"],
        "shared memory": pages["Pss_Shmem"],
        "/dev/shm": (shm.f_blocks - shm.f_bfree) * shm.f_frsize,
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
    if device.type == "cuda":
        found["reserved GPU memory"] = torch.cuda.memory_reserved(device)
    return found


def _rollup() -> dict[str, int]:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
