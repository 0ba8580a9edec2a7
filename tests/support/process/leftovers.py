"""Processes and threads that outlive their test, and their end by force, so that the next test starts clean."""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

SETTLE_S = 30.0
"""Seconds that a process or thread may take to end after its test: many, because the machine may be busy."""

SHARED = set()
"""Numbers of processes that serve all tests of this process."""

SHARED_COMMANDS = {"torch_shm_manag"}
"""Programs that torch starts once per process, by the first 15 characters of their names."""

SUBREAPER = 36
"""``PR_SET_CHILD_SUBREAPER``."""


def adopt_orphans():
    """Make this process the parent of each process below it whose parent ends: otherwise nothing would lead to it."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


class Leftovers:
    """Processes below this process, and threads of gpuaug, that have started since the object was created."""

    def __init__(self):
        self._pids, self._threads = pids(), set(threading.enumerate())

    def names(self):
        """Return the names of processes and threads that have not ended."""
        return [f"process {pid} ({name})" for pid, name in self._processes().items()] + [
            f"thread {thread.name}"
            for thread in threading.enumerate()
            if thread.name.startswith("gpuaug-") and thread not in self._threads
        ]

    def end(self):
        """Wait, kill processes that have not ended, and return the names of those and of threads that have not ended.

        A thread cannot be killed. It ends if it waited for one of the processes; otherwise it belongs to no later test.
        """
        if not self.names():
            return []
        gc.collect()
        names = self._wait()
        # Otherwise torch's handler would raise its error about a killed worker here.
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            for pid in self._processes() if names else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if names:
                self._wait()
        finally:
            signal.signal(signal.SIGCHLD, handler)
        return names

    def _wait(self):
        """Return the names of what has not ended after ``SETTLE_S``."""
        deadline = time.monotonic() + SETTLE_S
        while (names := self.names()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return names

    def _processes(self):
        """Return number → name. Processes that have ended are reaped."""
        workers = {child.pid for child in multiprocessing.active_children()}  # reaps some, and notes their exit codes
        found = {}
        for pid in pids() - self._pids - SHARED - {resource_tracker._resource_tracker._pid}:
            name, state, parent = status(pid)
            if name not in SHARED_COMMANDS and is_below(parent) and (pid in workers or not is_reaped(pid, state)):
                found[pid] = name
        return found


def is_reaped(pid, state):
    """Reap a process that has ended, with all its threads. Return false for another one."""
    try:
        return state == "Z" and os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True  # another process, or another thread, reaps it


def is_below(pid):
    """Whether a process is this process or below it."""
    while pid not in (0, os.getpid()):
        _, _, pid = status(pid)
    return pid != 0


def pids():
    """Return the numbers of all processes; none on a system without ``/proc``."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} if sys.platform == "linux" else set()


def status(pid):
    """Return the name, the state and the parent of a process; no name, ``Z`` and 0 if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "", "Z", 0
    name, _, fields = text.partition("(")[2].rpartition(") ")
    state, parent, *_ = fields.split()
    return name, state, int(parent)
