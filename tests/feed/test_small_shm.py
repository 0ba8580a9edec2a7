"""Workers where ``/dev/shm`` has 16 MB, as a container has 64 MB: batches that torch cannot send arrive."""

import os
import shutil
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch

from gpuaug.feed import shared_storage

TESTS = Path(__file__).parents[1]
SCRIPT = "mount -t tmpfs -o size=16m tmpfs /dev/shm && exec {python} -W ignore -m support.feed.small_shm {case}"


def run(case):
    """Lines that a program prints in a mount namespace of its own, with 16 MB of ``/dev/shm``."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    paths = (str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", ""))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    mounts = subprocess.run(["unshare", "-rm", "sh", "-c", SCRIPT.format(python="true", case="")], capture_output=True)
    if mounts.returncode:
        pytest.skip(f"no mount namespace may be made: {mounts.stderr.decode().strip()}")
    command = ["unshare", "-rm", "sh", "-c", SCRIPT.format(python=sys.executable, case=case)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280)
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
