"""Ways to leave a loop, and what the process then still holds: rings, shared memory, files, threads, processes."""

import multiprocessing
import os
import threading
from contextlib import suppress

import pytest

from gpuaug import IteratorEndedError


def failure(loader):
    """What arrived, and of the error that came then all but the lines of its traceback."""
    arrived = []
    try:
        arrived.extend(loader)
    except Exception as error:
        lines = str(error).splitlines()
        caught = type(error), lines[:1], lines[-1:], error.__notes__, error.__cause__
    else:
        caught = None
    return arrived, caught


def leave_by_break(loader):
    for index, _ in enumerate(loader):
        if index == 8:
            break


def leave_by_error(loader):
    with suppress(LookupError):
        for index, _ in enumerate(loader):
            if index == 8:
                raise LookupError


def leave_by_del(loader):
    batches = iter(loader)
    for _ in range(9):
        next(batches)
    del batches


def leave_by_close(loader):
    batches = iter(loader)
    for _ in range(9):
        next(batches)
    loader.close()
    with pytest.raises(IteratorEndedError):
        next(batches)


def leave_unread(loader):
    next(iter(loader))


def files():
    """What the open descriptors of this process stand for, each by its path under /proc and by name."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own is gone by now
            found[f"/proc/self/fd/{entry}"] = os.readlink(f"/proc/self/fd/{entry}")
    return found


def mappings():
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return maps.read().splitlines()


def rings_here():
    """What of rings this process has open or mapped."""
    return sum("gpuaug-ring" in name for name in [*files().values(), *mappings()])


def ring_bytes():
    """What the largest ring of this process takes, in memory."""
    found = 0
    for path, name in files().items():
        if "gpuaug-ring" in name:
            with suppress(OSError):
                found = max(found, os.stat(path).st_blocks * 512)
    return found


def taken():
    """How much this process has of whatever an epoch takes."""
    ends = [line.split()[0].split("-") for line in mappings() if line.split()[1].endswith("s")]
    return {
        "files": len(files()),
        "rings": rings_here(),
        "shared memory": sum(int(end, 16) - int(start, 16) for start, end in ends),
        "threads": threading.active_count(),
        "processes": len(multiprocessing.active_children()),
    }


def grown(before):
    """Of what this process has taken more than it had then."""
    now = taken()
    return [name for name in now if now[name] > before[name]]
