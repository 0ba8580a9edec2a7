import multiprocessing
import threading

import pytest


@pytest.fixture
def feeds():
    """The threads that the test has started and that have not ended."""
    before = set(threading.enumerate())
    return lambda: [thread for thread in threading.enumerate() if thread.name == "gpuaug-feed" and thread not in before]


@pytest.fixture
def workers():
    """The processes that the test has started and that have not ended."""
    before = set(multiprocessing.active_children())
    return lambda: set(multiprocessing.active_children()) - before
