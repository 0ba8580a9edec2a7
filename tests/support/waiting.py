"""Waiting for what another thread or process brings about."""

import time

WAIT_S = 60.0
"""Seconds until a test that waits fails: many, because the machine may be busy."""


def until(condition):
    """Return as soon as ``condition`` holds; fail if it does not come about."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)
