"""Scripts run in a process of their own, and checks for processes that have a worker killed."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

from support.process.waiting import WAIT_S, until
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


def run_script(script, timeout_s=240):
    """Run ``script`` as a process that can import ``gpuaug`` and ``support``. A hang is a failure."""
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths.rstrip(os.pathsep)}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=timeout_s)


def run_in_fork(work):
    """Run ``work`` in a child that is forked here and now; fail if it fails or does not return."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(WAIT_S)
    if child.is_alive():
        child.kill()
        child.join()
        raise AssertionError("it hangs")
    assert child.exitcode == 0


def read_until_worker_dies(loader, numbers, most):
    """Read batches that hold two numbers each, in order, of which at most ``most`` arrive before DataLoader's error does."""
    _MultiProcessingDataLoaderIter._try_get_data.__defaults__ = (0.1,)  # it looks whether workers live every five seconds
    arrived, caught = [], None
    try:
        try:
            arrived.extend(numbers(batch) for batch in loader)
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the handler may raise here once more, for the same death
    except Exception as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        traceback.clear_frames(error.__traceback__)
        caught = type(error), str(error)
    assert arrived == [[2 * index, 2 * index + 1] for index in range(len(arrived))], arrived
    assert len(arrived) <= most, arrived
    assert caught[0] is RuntimeError, caught
    assert "DataLoader worker" in caught[1], caught


def assert_no_workers_or_feeds():
    """Wait for all workers to end, and assert that no thread of a feed is left."""
    until(lambda: not multiprocessing.active_children())
    assert not [thread for thread in threading.enumerate() if thread.name == "gpuaug-feed"]
