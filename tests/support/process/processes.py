"""Scripts run in a process of their own, and checks for processes that have a worker killed."""

import functools
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from support.process import leftovers
from support.process.waiting import WAIT_S, until
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

TESTS = Path(__file__).parents[2]


def run_script(script, timeout_s=240):
    """Run ``script`` in its own process, which has imported torch, Kornia and gpuaug. A hang is a failure.

    The process ends as that of a script does. Variables that torch reads when it is imported have the values of the first call.
    """
    if sys.platform != "linux":
        return run_interpreter(script, timeout_s)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {"script": script, "out": str(out), "err": str(err), "environment": variables(), "folder": os.getcwd()}
        server = _script_server()
        server.stdin.write(json.dumps(request).encode() + b"\n")
        process = int(server.stdout.readline())
        ended, _, _ = select.select([server.stdout], [], [], timeout_s)
        if not ended:
            os.kill(process, signal.SIGKILL)
        code = int(server.stdout.readline())
        done = subprocess.CompletedProcess([script], code, out.read_text(), err.read_text())
    if not ended:
        raise subprocess.TimeoutExpired(done.args, timeout_s, done.stdout, done.stderr)
    return done


@functools.cache
def _script_server():
    """The process that forks. It ends when its standard input is closed, at the latest at the end of this process."""
    command = [sys.executable, "-m", "support.process.script_server"]
    environment = {**variables(), "PYTHONHASHSEED": "1"}  # so that strings have other hashes than here
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # set by the import of gpuaug in this process
    server = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=TESTS, env=environment)
    leftovers.SHARED.add(server.pid)
    return server


FORK_SERVER = """
import os
import socket
from multiprocessing import forkserver

listener = socket.socket(socket.AF_UNIX)
listener.bind({address!r})
listener.listen()
if server := os.fork():
    os.write(1, str(server).encode())
    os._exit(0)  # so that the next script can run
forkserver.main(listener.fileno(), os.open({alive!r}, os.O_RDONLY), [])
"""


def share_fork_server():
    """Have workers of the start method forkserver forked from a script's process, which has imported torch and gpuaug.

    Otherwise the server would be a new interpreter, which imports them for several seconds.
    """
    server = forkserver._forkserver
    folder = tempfile.TemporaryDirectory()

    def ensure_running():
        with server._lock:
            resource_tracker.ensure_running()
            if server._forkserver_address is None:
                address, alive = str(Path(folder.name, "socket")), str(Path(folder.name, "alive"))
                os.mkfifo(alive)
                server._forkserver_alive_fd = os.open(alive, os.O_RDWR)  # the server ends when this process closes it
                done = run_script(FORK_SERVER.format(address=address, alive=alive))
                assert done.returncode == 0, done.stderr
                leftovers.SHARED.add(int(done.stdout))
                server._forkserver_address = address

    server.ensure_running = ensure_running


def run_interpreter(script, timeout_s=240):
    """Run ``script`` in a new interpreter, which has imported nothing. A hang is a failure."""
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=variables(), capture_output=True, text=True, timeout=timeout_s)


def variables():
    """Variables of a process that can import ``gpuaug`` and ``support``."""
    paths = str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


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
