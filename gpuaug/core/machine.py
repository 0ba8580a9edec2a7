"""Number of cores and bytes of memory that this process may use, within the limits of its container."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
"""Mount point of the control groups: of version 2, or one folder per controller of version 1."""


def allowed_cores() -> int:
    """Return the number of cores that this process may use, at least 1.

    The smaller of the number of cores in the process's affinity and the CPU quota of its container, rounded down.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups("cpu"):
        quota, period = _quota(folder)
        if quota > 0 and period > 0:
            cores = min(cores, quota // period)
    return max(cores, 1)


def memory_bytes() -> int:
    """Return the bytes of memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def allowed_memory_bytes() -> int:
    """Return the bytes of memory that this process may use: the machine's memory, or the container's limit if it is smaller."""
    allowed_bytes = memory_bytes()
    for folder in _cgroups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number(folder / name)
            # Without a limit, version 1 has a number near 2**63, and version 2 has text, which is read as 0.
            allowed_bytes = min(allowed_bytes, limit) if limit > 0 else allowed_bytes
    return allowed_bytes


def memory_share_bytes() -> int:
    """Return the bytes of memory per process, if all processes that torchrun started on this machine share it evenly."""
    return allowed_memory_bytes() // local_ranks()


def local_ranks() -> int:
    """Return the number of processes that torchrun has started on this machine, at least 1."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(count), 1) if count.isdecimal() else 1


def _cgroups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all groups above it, which hold the limits of ``controller``."""
    lines = (line.split(":", 2) for line in _text(Path("/proc/self/cgroup")).splitlines())
    for _, controllers, path in (parts for parts in lines if len(parts) == 3):
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUP_ROOT / controller if controllers else CGROUP_ROOT  # a line of version 2 lists no controllers
        # In a container, ``path`` may exist on the host only. Then the root folder has the limits of the container.
        folder = root / path.lstrip("/")
        yield from (group for group in (folder, *folder.parents) if group.is_relative_to(root))


def _quota(folder: Path) -> tuple[int, int]:
    """Return (quota, period) of CPU time in microseconds. A quota of 0 or less means no limit."""
    with suppress(ValueError):
        quota, period = map(int, _text(folder / "cpu.max").split())
        return quota, period
    return _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")


def _number(path: Path) -> int:
    """Return the number in a file; 0 if the file is missing or has no number."""
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else 0


def _text(path: Path) -> str:
    """Return the content of a file; an empty string if it cannot be read."""
    with suppress(OSError):
        return path.read_text(encoding="ascii")
    return ""
