"""What this process holds: memory of the host, shared and reserved on a GPU, threads and file descriptors."""

import os
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
"""What is read, and its unit."""


def held(device: torch.device) -> dict[str, int]:
    """Each of ``UNITS`` now; reserved GPU memory only for a GPU.

    Resident are all pages that are mapped (RSS); private those that nobody else has (USS), which would be free if the process
    ended; shared its share of anonymous files that others have too, such as a ring's. ``/dev/shm`` is that of all processes.
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
