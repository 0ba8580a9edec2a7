"""Scripts that need a process of their own, and what those share that have a worker killed."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path


def run(script, timeout_s=100):
    """Run ``script`` as a process that can import what tests can. A hang is a failure."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths.rstrip(os.pathsep)}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=timeout_s)


def read_until_a_worker_dies(loader, numbers, most):
    """Read batches that hold two numbers each, in order, of which at most ``most`` arrive before DataLoader's error does."""
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


def assert_nothing_runs():
    """No worker is left after a while, and no thread that pulls."""
    deadline = time.monotonic() + 20
    while multiprocessing.active_children():
        assert time.monotonic() < deadline, multiprocessing.active_children()
        time.sleep(0.01)
    assert not [thread for thread in threading.enumerate() if thread.name == "gpuaug-feed"]
