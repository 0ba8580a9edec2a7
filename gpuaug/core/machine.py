"""Number of cores and bytes of memory that this process may use, within the limits of its container."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
"""Mount point of the control groups: of version 2, or one folder per controller of version 1."""


def allowed_cores() -> int:
    """Number of cores that this process may use, at least 1: its affinity, limited by the container's quota, rounded down."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups("cpu"):
        quota, period = _quota(folder)
        if quota > 0 and period > 0:
            cores = min(cores, quota // period)
    return max(cores, 1)


def allowed_memory_bytes() -> int:
    """Bytes of memory that this process may use: the machine's memory, or the container's limit if that is smaller."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in _cgroups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number(folder / name)
            most = min(most, limit) if limit > 0 else most  # version 1 writes nearly 2**63 for "no limit"
    return most


def memory_share_bytes() -> int:
    """Bytes of memory per process if the processes that torchrun started on this machine share the memory evenly."""
    return allowed_memory_bytes() // local_ranks()


def local_ranks() -> int:
    """Number of processes that torchrun has started on this machine, at least 1."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(count), 1) if count.isdecimal() else 1


def _cgroups(controller: str) -> Iterator[Path]:
    """Folders with limits of a controller: that of the control group of this process, and of all groups above it."""
    lines = (line.split(":", 2) for line in _text(Path("/proc/self/cgroup")).splitlines())
    for _, controllers, path in (parts for parts in lines if len(parts) == 3):
        names = controllers.split(",")
        if controllers and controller not in names:
            continue
        root = CGROUP_ROOT if not controllers else CGROUP_ROOT / controller
        # In a container the path may be a path of the host, which is not mounted; then the root is the container's group.
        folder = root / path.lstrip("/")
        yield from (folder, *folder.parents)[: len(folder.relative_to(root).parts) + 1]


def _quota(folder: Path) -> tuple[int, int]:
    """(quota, period) of CPU time in microseconds; 0 or less: no limit."""
    with suppress(ValueError):
        quota, period = map(int, _text(folder / "cpu.max").split())
        return quota, period
    return _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")


def _number(path: Path) -> int:
    """Number in a file; 0 if the file is missing or holds no number."""
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else 0


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii")
    return ""
