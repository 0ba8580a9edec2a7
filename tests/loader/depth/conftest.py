"""The device of these tests."""

import pytest
from protocol.scenarios import install, script_arrivals


@pytest.fixture
def cuda(monkeypatch):
    """A device that keeps up, and a loader that has a batch whenever it is asked."""
    cuda = install(monkeypatch, keeps_up=True)
    script_arrivals(monkeypatch, [True])
    return cuda
