"""Other users of the machine can neither read nor write the slots of the ring."""

import contextlib
import glob
import json
import multiprocessing
import os
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from gpuaug import StreamedLoader
from gpuaug.feed.ring_memory import Memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memfds")

NOBODY = 65534
SECRET = b"pixels of a private photograph"


def reachable(process, fd):
    """Where this process can open what may be a file's shared memory, and whether that holds the secret, or can be written."""
    found = []
    files = filter(os.path.isfile, (*glob.glob("/dev/shm/*"), *glob.glob("/tmp/gpuaug*")))
    for path in (f"/proc/{process}/fd/{fd}", f"/proc/{process}/mem", *files):
        for flags, verb in ((os.O_RDONLY, "reads"), (os.O_RDWR, "writes")):
            try:
                file = os.open(path, flags)
            except OSError:
                continue
            with os.fdopen(file, "rb") as opened:
                if path.startswith("/proc") or SECRET in opened.read(1 << 20):
                    found.append(f"{verb} {path}")
    return found


def as_nobody(call, *args):
    """What ``call`` returns in a process of another user."""
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writable, json.dumps(call(*args)).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return json.loads(told)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root may become another user")
def test_another_user_cannot_open_the_memory():
    memory = Memory(1 << 16)
    memory.bytes[: len(SECRET)] = torch.frombuffer(bytearray(SECRET), dtype=torch.uint8)
    assert reachable(os.getpid(), memory.fd) != [], "its own user can"
    assert as_nobody(reachable, os.getpid(), memory.fd) == []
    assert os.fstat(memory.fd).st_mode & 0o077 == 0, "even where a process of theirs gets to see the descriptor's path"


def memfd_modes():
    """Mode of every memfd of this process and of its workers."""
    modes = []
    for pid in (os.getpid(), *(worker.pid for worker in multiprocessing.active_children())):
        folder = f"/proc/{pid}/fd"
        for fd in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed in the meantime
                if os.readlink(f"{folder}/{fd}").startswith("/memfd:"):
                    modes.append(os.stat(f"{folder}/{fd}").st_mode & 0o777)
    return modes


@pytest.mark.parametrize("context", ["fork", "forkserver"])
@pytest.mark.parametrize("feed", ["ring", "plain"])
def test_only_the_same_user_can_open_any_memfd(feed, context):
    data = DataLoader(torch.rand(8, 2000), 2, num_workers=1, multiprocessing_context=context)
    with StreamedLoader(data, feed=feed, device="cpu") as loader:
        batches = iter(loader)
        first = next(batches)
        modes = memfd_modes()
        assert len(first) == 2
        list(batches)
    assert set(modes) == {0o600}
