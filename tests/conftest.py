"""What holds for every test: which cards it needs, and what it must leave as it was."""

import ctypes
import faulthandler
import gc
import logging
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from _pytest.doctest import DoctestModule
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings
from hypothesis.internal.conjecture import junkdrawer, providers
from support.process import leftovers
from support.process.processes import share_fork_server

from gpuaug.feed import prefetch

CARDS = {"gpu": 1, "multigpu": 2}
"""How many CUDA devices a test with each marker needs."""

REPEAT_S, EXIT_S = 60.0, 300.0
"""Seconds from a test's timeout to the next error that is raised in it, and to the end of a process that no error reaches."""

TIMER, TIMED_OUT = pytest.StashKey(), pytest.StashKey()
"""Settings of a test's timer, and whether its timeout is over and no part of the test has failed since."""

forks = []
"""An entry for each fork of this process since its memory was last in huge pages."""

GPU_TESTS = Path(__file__).parent / "gpu"
"""Folder in which every module is marked ``gpu``."""

HUGE, COLLAPSE = 2**21, 25
"""Bytes of a huge page, and ``MADV_COLLAPSE``, since Linux 6.1."""
MANY_FORKS = 8
"""Number of forks after which a file's end restores huge pages: a process that writes to one after a fork splits it."""

RARELY = 100_000, 20, 100
"""Thresholds of the garbage collector: it takes 5 % less of a test's time, and ``_freeze`` collects after each file."""

# torch.compile would start a pool of processes, which outlives the test that compiles first.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
HAS_CARD = torch.cuda.device_count() > 0
"""Whether the machine has a GPU. The number of devices is known without CUDA, which a process that forks must not use."""
if not HAS_CARD:
    # Each process that decodes compiles the loops of Numba, which takes half the time without optimizations.
    os.environ["NUMBA_OPT"] = "0"

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell starts processes in the background with Ctrl-C ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes of pytest-xdist share the cores, and so do the interpreters that they start.
THREADS = max(torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), 1)
torch.set_num_threads(THREADS)
os.environ["OMP_NUM_THREADS"] = str(THREADS)

if sys.platform == "linux":
    share_fork_server()
    leftovers.adopt_orphans()

if os.environ.get("TORCH_CUDA_SANITIZER"):
    # PyTorch's sanitizer asks for the current stream at every operation, which a forked worker cannot reach.
    os.register_at_fork(after_in_child=lambda: torch.cuda._sanitizer.cuda_sanitizer.disable())

# No test asserts a speed: a busy machine is no failure.
settings.register_profile("gpuaug", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("night", deadline=None, print_blob=True)  # see support/public/fuzzing.py
settings.load_profile("gpuaug")
# Hypothesis also tries constants of the modules that a process happens to have imported: other cases in every run.
providers.is_local_module_file = lambda path: False
# Hypothesis would time garbage collections in a callback. An error that torch's handler for dead workers raises in the callback
# does not reach the test.
junkdrawer._gc_initialized = True


def pytest_configure(config):
    """Have pytest-xdist's processes run the tests of a file in one process: each has fixtures, imports and loops of its own."""
    if config.getoption("dist", "no") == "load" and not HAS_CARD:
        config.option.dist = "worksteal"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    needed = max((cards for marker, cards in CARDS.items() if item.get_closest_marker(marker)), default=0)
    have = torch.cuda.device_count() if needed and torch.cuda.is_available() else 0
    if have >= needed:
        return
    text = f"needs {needed} CUDA device{'s' if needed > 1 else ''}, got {have}"
    if os.environ.get("GPUAUG_REQUIRE_GPU") == "1":
        pytest.fail(f"{text}, and GPUAUG_REQUIRE_GPU=1 says that there must be", pytrace=False)
    pytest.skip(text)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item, settings):
    """Repeat the error of a timeout, of which a finaliser or another thread may hear, and end the process that hears none.

    pytest-xdist reports the test that has ended its process, and runs the others in a new process.
    """
    result = yield
    item.stash[TIMER] = settings
    if settings.method == "signal":
        fail = signal.getsignal(signal.SIGALRM)

        def note_and_fail(number, frame):
            item.stash[TIMED_OUT] = True
            fail(number, frame)

        signal.signal(signal.SIGALRM, note_and_fail)
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, REPEAT_S)
        stderr = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(settings.timeout + EXIT_S, exit=True, file=stderr)
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_cancel_timer(item):
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node):
    """Set the timer for the teardown of a failed test: the plugin has cancelled it, so that a debugger can be used."""
    if isinstance(node, pytest.Item) and TIMER in node.stash:
        node.ihook.pytest_timeout_set_timer(item=node, settings=node.stash[TIMER])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Let a test fail whose timeout raised its error in a finaliser, which goes on without it."""
    report = yield
    if item.stash.get(TIMED_OUT, False):
        item.stash[TIMED_OUT] = False
        if report.passed:
            report.outcome = "failed"
            report.longrepr = "The test exceeded its timeout. A finaliser, or other code, kept the error."
    return report


def pytest_ignore_collect(collection_path):
    """Look for documented examples in the package alone: to look for them here, pytest imports what tests import once more."""
    return True if collection_path.suffix == ".py" and not collection_path.name.startswith("test_") else None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    """Look for documented examples in no module of tests either: to look for them takes a second per process."""
    return [node for node in (yield) if not isinstance(node, DoctestModule)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark cases ``slow`` that the default run leaves out of a grid: all but every n-th with ``@pytest.mark.every(n)``.

    With an n that has no common factor with the number of values of an argument, each value is in the default run.
    """
    places = Counter()
    for item in items:
        if marker := item.get_closest_marker("every"):
            name = item.nodeid.partition("[")[0]
            if places[name] % marker.args[0]:
                item.add_marker("slow")
            places[name] += 1


class ModuleForCards(pytest.Module):
    """A module of GPU tests on a machine without a GPU: imported, and skipped as one, which is faster than test by test."""

    def collect(self):
        assert self.obj.pytestmark
        pytest.skip("needs 1 CUDA device, got 0")


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path, parent):
    if module_path.parent == GPU_TESTS and os.environ.get("GPUAUG_REQUIRE_GPU") != "1" and not torch.cuda.is_available():
        return ModuleForCards.from_parent(parent, path=module_path)
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Collect tests without looking for garbage, of which there is next to none: a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session):
    _let_loggers_propagate()
    gc.freeze()  # without looking for garbage, which would take longer than all that it saves
    gc.set_threshold(*RARELY)
    if sys.platform == "linux":
        _use_huge_pages()
        os.register_at_fork(after_in_parent=lambda: forks.append(1))


def _let_loggers_propagate():
    """Let torch's loggers propagate. Otherwise pytest attaches its handlers to each of the 58, six times per test: 0.6 ms."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.split(".")[0] == "torch":
            logger.propagate = True


def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or nextitem.path != item.path:  # after the imports of the tests of a file
        _let_loggers_propagate()
        _freeze()
        if len(forks) >= MANY_FORKS and not HAS_CARD:  # the driver of a card holds parts of the memory in place
            _use_huge_pages()
            forks.clear()


def _freeze():
    """Keep the garbage collector from walking over what stays to the end, here or in hundreds of workers."""
    gc.collect()
    gc.freeze()


def _use_huge_pages():
    """Have memory that is in use now in pages of 2 MB, where Linux can: to fork a worker then takes a quarter of the time."""
    madvise = ctypes.CDLL(None).madvise
    with open("/proc/self/maps", encoding="utf-8") as maps:
        mappings = [line.split() for line in maps]
    for span, access, *_, name in ([*mapping, ""] if len(mapping) == 5 else mapping for mapping in mappings):
        if access == "rw-p" and name in ("", "[heap]"):
            first, last = (int(end, 16) // HUGE for end in span.split("-"))
            for page in range(first + 1, last):
                madvise(ctypes.c_void_p(page * HUGE), ctypes.c_size_t(HUGE), COLLAPSE)


@pytest.fixture
def interrupts():
    """The handler that Python starts with, which a shell that runs the tests in the background takes away."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="session")
def _leaving_a_loop_waits_for_its_loader():
    """Let ``close`` wait for a loader as long as a busy machine needs, so that what it leaves behind is no matter of speed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetch, "STOP_S", leftovers.SETTLE_S)
        yield


@pytest.fixture(scope="session")
def _first_state():
    """State of torch's generator before the first test. A thread that outlives its test may draw from it at any time."""
    torch.manual_seed(0)  # torch's own first seed differs from process to process
    return torch.get_rng_state()


@pytest.fixture(autouse=True)
def _every_test_draws_as_the_first(_first_state):
    def put_back():
        torch.set_rng_state(_first_state)
        random.seed(0)
        np.random.seed(0)  # a fifth of the time of np.random.set_state

    put_back()
    cards = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    yield
    put_back()
    if cards is not None:
        torch.cuda.set_rng_state_all(cards)


@pytest.fixture(autouse=True)
def _threads_of_torch_are_as_many_as_at_first():
    """Threads of torchdata's nodes set the number to one, for all threads that start later, of this process too."""
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def _accelerate_has_no_state():
    """Clear the state that all ``Accelerator`` objects of a process share: later tests would accumulate gradients as well."""
    yield
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture(autouse=True)
def _nothing_is_left_running():
    """End what a test has left running, and report it as an error of this test alone."""
    started = leftovers.Leftovers()
    yield
    # The traceback of a failed test holds its iterators. Without this, they would end in the next test.
    sys.last_exc = sys.last_value = sys.last_traceback = None
    names = started.end()
    assert not names, f"the test has ended, and these have not: {', '.join(names)}"
