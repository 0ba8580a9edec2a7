"""A test that leaves something running, or that hangs, fails alone."""

import re
import sys

import pytest
from support.process.leftovers import status
from support.process.processes import run_script
from support.process.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")

RUN = """
import sys, pytest
sys.exit(pytest.main(["-rA", "-p", "conftest", "-p", "no:cacheprovider", "-c", "{folder}/pytest.ini", "{folder}", *{options}]))
"""

SHORT_TIMES = """
import conftest
from support.process import leftovers

conftest.REPEAT_S, conftest.EXIT_S, leftovers.SETTLE_S = 0.5, {exit_s}, 0.1
"""

MODULE = """
import multiprocessing, os, pathlib, signal, subprocess, threading, time
import pytest
from gpuaug import StreamedLoader
from torch.utils.data import DataLoader

DIR = pathlib.Path(__file__).parent
LEAKED = []

def write(*pids):
    with open(DIR / "pids", "a") as file:
        print(*pids, file=file, flush=True)

def worker(target, *arguments):
    LEAKED.append(multiprocessing.get_context("fork").Process(target=target, args=arguments, daemon=True))
    LEAKED[-1].start()
    return LEAKED[-1]

def thread(target):
    LEAKED.append(threading.Thread(target=target, name="gpuaug-feed", daemon=True))
    LEAKED[-1].start()

def stop_with_child(connection):
    if child := os.fork():
        connection.send((os.getpid(), child))
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)

def test_leak_of_stopped_worker_and_its_child():
    ours, theirs = multiprocessing.Pipe()
    worker(stop_with_child, theirs)
    write(*ours.recv())

def test_leak_of_child_whose_parent_has_ended():
    write(int(subprocess.check_output(["sh", "-c", "sleep 1000 >&- & echo $!"])))

def test_leak_of_thread_that_waits_for_worker():
    process = worker(time.sleep, 1000)
    write(process.pid)
    thread(process.join)

def test_leak_of_thread_for_ever():
    thread(threading.Event().wait)

def test_leak_of_iterator_with_stopped_worker():
    LEAKED.append(iter(DataLoader(range(9), num_workers=1)))
    (process,) = LEAKED[-1]._workers
    write(process.pid)
    os.kill(process.pid, signal.SIGSTOP)

def test_failure_with_open_iterator():
    leftovers.SETTLE_S = 30.0  # its worker ends
    batches = iter(StreamedLoader(DataLoader(range(9), num_workers=1), device="cpu"))
    next(batches)
    assert not batches

class Finalised:
    def __del__(self):
        threading.Event().wait()

@pytest.fixture
def never_ends():
    yield
    threading.Event().wait()

@pytest.mark.timeout(0.5)
def test_hang():
    threading.Event().wait()

@pytest.mark.timeout(0.5)
def test_hang_in_two_finalisers():
    Finalised()
    Finalised()

@pytest.mark.timeout(0.5)
def test_failure_then_hang_in_fixture(never_ends):
    raise ZeroDivisionError

def test_nothing_is_left():
    assert not multiprocessing.active_children()
    assert [each.exitcode for each in LEAKED if hasattr(each, "exitcode")] == [-signal.SIGKILL] * 2
    assert [each.is_alive() for each in LEAKED if isinstance(each, threading.Thread)] == [False, True]
    assert [batch.item() for batch in DataLoader(range(3), num_workers=1)] == [0, 1, 2]
"""

OUTCOMES = {
    *(f"ERROR {name}" for name in re.findall(r"def (test_leak\w+)", MODULE)),
    *(f"PASSED {name}" for name in re.findall(r"def (test_leak\w+)", MODULE)),
    *("FAILED test_failure_with_open_iterator", "FAILED test_hang", "FAILED test_hang_in_two_finalisers"),
    *("FAILED test_failure_then_hang_in_fixture", "ERROR test_failure_then_hang_in_fixture", "PASSED test_nothing_is_left"),
}


@pytest.fixture
def run(tmp_path):
    """Run a module of tests with the hooks and fixtures of all tests, and return (outcomes, output)."""

    def run(module, *options, exit_s=60):
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n  multigpu\n")
        (tmp_path / "test_it.py").write_text(SHORT_TIMES.format(exit_s=exit_s) + module)
        done = run_script(RUN.format(folder=tmp_path, options=options))
        text = done.stdout + done.stderr
        return {" ".join(found) for found in re.findall(r"^(PASSED|FAILED|ERROR) .*::(\w+)", text, re.MULTILINE)}, text

    return run


def test_leaks_and_hangs_fail_their_tests_alone(run, tmp_path):
    outcomes, text = run(MODULE)
    assert outcomes == OUTCOMES, text
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 5
    until(lambda: all(status(pid)[1] == "Z" for pid in pids))
    assert all(f"process {pid} (" in text for pid in pids)
    assert len(re.findall("^E .*these have not: .*thread gpuaug-feed$", text, re.MULTILINE)) == 2
    assert "The test exceeded its timeout. A finaliser, or other code, kept the error." in text


HANG_THAT_HEARS_NO_SIGNAL = """
import signal, threading
import pytest

@pytest.mark.timeout(0.5)
def test_hang():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    threading.Event().wait()

def test_other():
    pass
"""


@pytest.mark.slow
def test_process_that_hears_no_signal_ends_and_another_runs_the_other_tests(run):
    outcomes, text = run(HANG_THAT_HEARS_NO_SIGNAL, "-n", "1", exit_s=1)
    assert outcomes == {"FAILED test_hang", "PASSED test_other"}, text
    assert "in test_hang" in text[text.index("Timeout (") :], "the stacks of its threads"
