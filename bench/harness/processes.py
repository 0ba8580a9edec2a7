"""Processes: the cores that they may use, and the time that they spend on them."""

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cpu_seconds() -> float:
    """Seconds on a core of this process, all its threads and all processes below it, in programs and in the kernel.

    A process that ended counts once its parent has waited for it.
    """
    times = os.times()
    total = time.process_time() + times.children_user + times.children_system  # of its own in less than the kernel's ticks
    ticks, below = os.sysconf("SC_CLK_TCK"), defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which may hold spaces and brackets.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        below[int(fields[1])].append((int(stat.parent.name), sum(map(int, fields[11:15])) / ticks))
    return total + sum(seconds for _, seconds in _descendants(os.getpid(), below))


def _descendants(parent: int, below: dict[int, list[tuple[int, float]]]) -> Iterator[tuple[int, float]]:
    for process, seconds in below.get(parent, ()):
        yield process, seconds
        yield from _descendants(process, below)


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Let this thread, and the processes that it starts meanwhile, use the first ``count`` of the cores it may use.

    A process that starts so sizes its thread pools by them. Of one that runs already, threads stay where they are.
    """
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
