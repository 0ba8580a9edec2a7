"""Processes that end: a worker that is killed, and one's own although nothing was closed."""

import os
from ast import literal_eval

import pytest
from support.process import processes

# What a finaliser raises nobody else hears of.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")

SUBPROCESS = """
import atexit, builtins, gc, multiprocessing, os, signal, sys
import torch
from support.process.processes import assert_no_workers_or_feeds, read_until_worker_dies
from torch.utils.data import DataLoader, Dataset
from gpuaug import StreamedLoader

gc.collect(); gc.freeze()  # what forked processes need not copy

class Numbers(Dataset):
    def __init__(self, killed=None):
        self.killed = killed

    def __len__(self):
        return 80

    def __getitem__(self, index):
        if index == self.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((50,), index)

def held():
    links = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            pass
    with open("/proc/self/maps") as maps:
        return [name for name in [*links, *maps] if "gpuaug-ring" in name]

def each(cases):
    "Go on in a process of its own for each case; the first one ends when all have, and says how."
    started = {}
    for name, case in cases.items():
        pid = os.fork()
        if pid == 0:
            return case
        started[name] = pid
    print({name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in started.items()})
    sys.exit()
"""


KILLED = """
OPTIONS = each({"one epoch": {}, "persistent": {"persistent_workers": True}})
loader = StreamedLoader(DataLoader(Numbers(41), batch_size=2, num_workers=2, **OPTIONS), device="cpu", feed="ring")
read_until_worker_dies(loader, lambda batch: batch[:, 0].tolist(), most=20)
assert held()
loader.loader.dataset.killed = None
if not OPTIONS:
    again = [batch[:, 0].tolist() for batch in loader]
    assert again == [[2 * index, 2 * index + 1] for index in range(40)], again
    assert loader.stats().slot_batches > 0
loader.close()
del loader
gc.collect()
assert_no_workers_or_feeds()
assert not held(), held()
"""


def run(script):
    """What a process of its own says of its cases, and what it prints; a hang is a failure."""
    done = processes.run_script(script)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    *printed, statuses = done.stdout.splitlines()
    return literal_eval(statuses), printed


def test_killed_worker_raises_and_leaks_nothing():
    # In processes of their own: DataLoader's handler raises wherever the main thread is when the signal arrives.
    statuses, _ = run(SUBPROCESS + KILLED)
    assert statuses == {"one epoch": 0, "persistent": 0}


EXITS = """
def in_the_middle():
    global batches
    batches = iter(loader)
    for _ in range(9):
        next(batches)

def in_the_middle_and_freed_last():
    in_the_middle()
    builtins.batches = batches  # Python clears the names of other modules before these

def at_the_end():
    list(loader)

def by_an_error():
    for index, _ in enumerate(loader):
        if index == 9:
            raise SystemExit(3)

leave, persistent = each({
    "in the middle": (in_the_middle, False),
    "in the middle, persistent": (in_the_middle, True),
    "in the middle, freed last": (in_the_middle_and_freed_last, False),
    "at the end, persistent": (at_the_end, True),
    "by an error": (by_an_error, False),
})
workers = dict(batch_size=2, num_workers=2, persistent_workers=persistent)
loader = StreamedLoader(DataLoader(Numbers(), **workers), device="cpu", feed="ring")
def told():
    pids = [str(child.pid) for child in multiprocessing.active_children()]
    os.write(1, " ".join(pids + ["\\n"]).encode())  # in one piece: several processes end at once


atexit.register(told)
leave()
"""


def test_process_exits_with_loader_open():
    statuses, printed = run(SUBPROCESS + EXITS)
    assert {name: status for name, status in statuses.items() if status} == {"by an error": 3}
    workers = " ".join(printed).split()
    assert len(workers) == 8, "two each where the iterator was open or the workers persist"
    assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}")], "workers that outlive their process"


THREADS = """
import threading, weakref
loader = StreamedLoader(DataLoader(Numbers(), batch_size=2, num_workers=1), device="cpu", feed="ring")
batches = iter(loader)
next(batches)
names = lambda: [thread.name for thread in threading.enumerate() if thread.name.startswith("gpuaug")]
print(names())
weakref.finalize(loader, lambda: print(names()))  # the newest finaliser, which Python runs first
"""


def test_no_thread_receives_batches_while_python_lists_the_finalisers():
    # A thread creates and removes finalisers. If it did so meanwhile, Python would raise an error and run none of them.
    done = processes.run_script(SUBPROCESS + THREADS)
    assert (done.stdout, done.stderr) == ("['gpuaug-feed']\n[]\n", "")
