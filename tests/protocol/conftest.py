import pytest
from protocol.scenarios import install


@pytest.fixture
def cuda(monkeypatch):
    return install(monkeypatch)
