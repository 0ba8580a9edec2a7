"""Cores and memory that this process may use: of the machine, within the limits of its container."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
"""Mount point of the control groups: of version 2, or one folder per controller of version 1."""


def allowed_cores() -> int:
    """Number of cores that this process may use: its affinity, and the CPU quota of its container, rounded down, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups("cpu"):
        quota, period = _quota(folder)
        if quota > 0 and period > 0:
            cores = min(cores, quota // period)
    return max(cores, 1)


def allowed_memory_bytes() -> int:
    """Bytes of memory that this process may use: the memory of the machine, or the limit of its container if that is less."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in _cgroups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number(folder / name)
            most = min(most, limit) if limit > 0 else most  # without a limit, version 1 has a number of nearly 63 bits
    return most


def memory_share_bytes() -> int:
    """Bytes of memory that this process may use if the processes that torchrun has started here share the memory evenly."""
    return allowed_memory_bytes() // local_ranks()


def local_ranks() -> int:
    """Number of processes that torchrun has started on this machine, at least 1."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(count), 1) if count.isdecimal() else 1


def _cgroups(controller: str) -> Iterator[Path]:
    """Folders of the control groups of this process that have limits of a controller: its own and all above it."""
    lines = (line.split(":", 2) for line in _text(Path("/proc/self/cgroup")).splitlines())
    for _, controllers, path in (parts for parts in lines if len(parts) == 3):
        names = controllers.split(",")
        if controllers and controller not in names:
            continue
        root = CGROUP_ROOT if not controllers else CGROUP_ROOT / controller
        # In a container the path may be that of the host, which is not mounted; the root is the container's own group then.
        own = root / path.lstrip("/")
        yield from (own, *own.parents)[: len(own.relative_to(root).parts) + 1]


def _quota(folder: Path) -> tuple[int, int]:
    """(quota, period) in microseconds; 0 or less for none."""
    with suppress(ValueError):
        quota, period = map(int, _text(folder / "cpu.max").split())
        return quota, period
    return _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")


def _number(path: Path) -> int:
    """The number in a file; 0 if there is none."""
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else 0


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii")
    return ""
