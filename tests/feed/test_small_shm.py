"""Workers where ``/dev/shm`` has 4 MB, as a container has 64 MB: batches that torch cannot send arrive."""

import shutil
import subprocess
import threading
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from support.process import processes
from torch.utils.data import DataLoader, Dataset

from gpuaug import StreamedLoader
from gpuaug.core import batch as batches
from gpuaug.feed import shared_storage

MOUNT = "mount -t tmpfs -o size=4m tmpfs /dev/shm"
IN_NAMESPACE = """
import ctypes
import os
import subprocess
import warnings

CLONE_NEWNS, CLONE_NEWUSER, MS_REC, MS_PRIVATE = 0x20000, 0x10000000, 0x4000, 0x40000
libc = ctypes.CDLL(None, use_errno=True)
user, group = os.getuid(), os.getgid()
assert libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {{user}} 1"), ("gid_map", f"0 {{group}} 1")):
    with open(f"/proc/self/{{name}}", "w") as file:
        file.write(text)
assert libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0, os.strerror(ctypes.get_errno())
subprocess.run({mount!r}.split(), check=True)
warnings.simplefilter("ignore")
from support.feed import small_shm
small_shm.{case}()
"""
"""What ``unshare -rm`` does, in a process that has imported torch."""


def run(case):
    """Lines that a program prints in a mount namespace of its own, with 4 MB of ``/dev/shm``."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    mounts = subprocess.run(["unshare", "-rm", *MOUNT.split()], capture_output=True)
    if mounts.returncode:
        pytest.skip(f"no mount namespace may be made: {mounts.stderr.decode().strip()}")
    done = processes.run_script(IN_NAMESPACE.format(mount=MOUNT, case=case))
    return done.stdout.splitlines() or pytest.fail(done.stderr)


def test_batches_arrive_where_those_of_the_plain_loader_do_not():
    plain, *lines = run("forked")
    assert "fails" in plain
    assert len(lines) == 10
    assert [line for line in lines if not line.endswith("right")] == []


@pytest.mark.slow
def test_batches_of_workers_that_are_not_forked_arrive():
    lines = run("started")
    assert len(lines) == 3
    assert [line for line in lines if not line.endswith("right")] == []


def test_sending_is_as_it_was_after_workers_have_started():
    reducers = ForkingPickler._extra_reducers
    before = dict(reducers)
    with shared_storage.sending_memfd():
        assert reducers != before
    assert reducers == before


def test_tensors_that_share_a_storage_are_sent_as_such():
    values = torch.arange(6)
    with shared_storage.sending_memfd():
        sent = ForkingPickler.dumps([values, values[2:4]])
        whole, part = ForkingPickler.loads(sent)
    assert whole.tolist() == list(range(6))
    whole[2] = 7
    assert part.tolist() == [7, 3]
    assert values.tolist() == list(range(6))


class Rows(Dataset):
    """Rows of one tensor, which a worker sends one by one."""

    def __init__(self, count, columns):
        self.data = torch.arange(count).repeat_interleave(columns).view(count, columns)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


@pytest.mark.parametrize("columns", [3, 300_000], ids=["small", "large"])
@pytest.mark.parametrize("form", ["row", "list"])
def test_batches_do_not_share_memory_with_batches_that_are_sent_later(form, columns):
    collate = {"row": lambda rows: rows[0], "list": list}[form]
    loader = DataLoader(Rows(6, columns), batch_size=1, collate_fn=collate, num_workers=1)
    kept = [batches.map_leaves(lambda row: row.add_(100), batch) for batch in StreamedLoader(loader, device="cpu")]
    rows = [row for batch in kept for row in batches.leaves(batch)]
    assert [row[-1].item() for row in rows] == [100 + index for index in range(6)]
    if columns > 3:
        assert all(row.untyped_storage().nbytes() == row.nbytes for row in rows), (
            "a row is sent without the rest of its dataset"
        )


def test_reducers_are_restored_although_two_threads_start_workers():
    before = ForkingPickler._extra_reducers[torch.UntypedStorage]
    entered, left = threading.Event(), threading.Event()

    def start_workers():
        with shared_storage.sending_memfd():
            entered.set()
            left.wait()

    thread = threading.Thread(target=start_workers)
    with shared_storage.sending_memfd():
        thread.start()
        entered.wait(0.1)  # in vain
    left.set()
    thread.join()
    assert ForkingPickler._extra_reducers[torch.UntypedStorage] is before
