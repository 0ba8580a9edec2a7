"""Cores and memory that a process may use, by affinity and control groups of both versions."""

import os
from pathlib import Path

import pytest
from support.files.encoded import encoded
from torch.utils.data import DataLoader

from gpuaug import ArgumentError, DecodeStage, StreamedLoader, collate_encoded
from gpuaug.core import machine
from gpuaug.decode import stage

MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
GIB = 2**30


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Write control groups: lines of /proc/self/cgroup, and files below the mount point."""

    def write(lines, files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        proc, read = "\n".join(lines) + "\n", machine._text
        monkeypatch.setattr(machine, "CGROUP_ROOT", tmp_path)
        monkeypatch.setattr(machine, "_text", lambda path: proc if path == Path("/proc/self/cgroup") else read(path))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)

    return write


CORES = {
    "no groups": ([], {}, 64),
    "container, version 2": (["0::/"], {"cpu.max": "400000 100000"}, 4),
    "no quota": (["0::/"], {"cpu.max": "max 100000"}, 64),
    "more than the affinity": (["0::/"], {"cpu.max": "9000000 100000"}, 64),
    "half a core": (["0::/"], {"cpu.max": "50000 100000"}, 1),
    "rounded down": (["0::/"], {"cpu.max": "390000 100000"}, 3),
    "another period": (["0::/"], {"cpu.max": "20000 10000"}, 2),
    "group of its own": (["0::/user/job"], {"user/job/cpu.max": "300000 100000", "cpu.max": "max 100000"}, 3),
    "limit of a group above": (["0::/user/job"], {"user/job/cpu.max": "max 100000", "user/cpu.max": "200000 100000"}, 2),
    "least of all": (["0::/a/b"], {"a/cpu.max": "200000 100000", "a/b/cpu.max": "600000 100000"}, 2),
    "path of the host": (["0::/docker/1234"], {"cpu.max": "500000 100000"}, 5),
    "version 1": (
        ["4:cpu,cpuacct:/docker/1", "2:memory:/"],
        {"cpu/docker/1/cpu.cfs_quota_us": "800000", "cpu/docker/1/cpu.cfs_period_us": "100000"},
        8,
    ),
    "version 1, path of the host": (
        ["4:cpuacct,cpu:/docker/1"],
        {"cpu/cpu.cfs_quota_us": "700000", "cpu/cpu.cfs_period_us": "100000"},
        7,
    ),
    "version 1, no quota": (["4:cpu:/"], {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
    "both versions": (["1:cpu:/", "0::/"], {"cpu/cpu.cfs_quota_us": "600000", "cpu/cpu.cfs_period_us": "100000"}, 6),
    "damaged": (["0::/"], {"cpu.max": "many"}, 64),
}


@pytest.mark.parametrize(("lines", "files", "cores"), CORES.values(), ids=CORES)
def test_cores_are_those_of_the_quota(groups, lines, files, cores):
    groups(lines, files)
    assert machine.allowed_cores() == cores


BYTES = {
    "no groups": ([], {}, MEMORY),
    "version 2": (["0::/"], {"memory.max": str(GIB)}, GIB),
    "no limit": (["0::/"], {"memory.max": "max"}, MEMORY),
    "more than the machine's": (["0::/"], {"memory.max": str(2 * MEMORY)}, MEMORY),
    "limit of a group above": (["0::/a/b"], {"a/memory.max": str(2 * GIB), "a/b/memory.max": "max"}, 2 * GIB),
    "version 1": (["3:memory:/job"], {"memory/job/memory.limit_in_bytes": str(GIB)}, GIB),
    "version 1, no limit": (["3:memory:/"], {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, MEMORY),
}


@pytest.mark.parametrize(("lines", "files", "most"), BYTES.values(), ids=BYTES)
def test_memory_is_that_of_the_limit(groups, lines, files, most):
    groups(lines, files)
    assert machine.allowed_memory_bytes() == most


@pytest.mark.parametrize(("ranks", "threads", "wanted"), [("", None, 7), ("4", None, 2), ("100", None, 1), ("4", 5, 5)])
def test_decoding_has_the_cores_of_one_rank(monkeypatch, groups, ranks, threads, wanted):
    groups(["0::/"], {"cpu.max": "800000 100000"})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    started, pools = [], stage.Pools
    monkeypatch.setattr(stage, "Pools", lambda count: started.append(count) or pools(count))
    (images,) = StreamedLoader([collate_encoded([encoded()])], [DecodeStage(threads=threads)], device="cpu")
    assert len(images) == 1
    assert started == [wanted]


@pytest.fixture(params=[("", 1), ("1", 1), ("4", 4), ("0", 1), ("several", 1)], ids=str)
def most_bytes(request, monkeypatch, groups):
    """The memory of one rank in a container of 1 GiB, for several numbers of ranks."""
    groups(["0::/job"], {"job/memory.max": str(GIB)})
    text, ranks = request.param
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    return GIB // ranks


def test_slots_have_an_eighth_of_the_memory_of_one_rank(most_bytes):
    with StreamedLoader(DataLoader(range(4)), device="cpu", feed="ring") as loader:
        assert repr(loader).endswith(f"feed=staged (no slots yet, at most {most_bytes / 8e6:.1f} MB))")


def test_feed_bytes_must_be_within_the_memory_of_one_rank(most_bytes):
    assert "at most" in repr(StreamedLoader(DataLoader(range(4)), device="cpu", feed="ring", feed_bytes=most_bytes))
    with pytest.raises(ArgumentError) as caught:
        StreamedLoader([], device="cpu", feed_bytes=most_bytes + 1)
    assert str(caught.value) == (
        f"feed_bytes must be {most_bytes} or less, got {most_bytes + 1}. Leave it out for an eighth of the memory that this "
        f"process may use, which is {most_bytes / 1e6:.1f} MB."
    )
