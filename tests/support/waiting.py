"""Waiting for what another thread or process brings about."""

import time

WAIT_S = 10.0
"""How long a test waits before it fails."""


def until(condition):
    """Return as soon as ``condition`` holds; fail if it does not come about."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)
