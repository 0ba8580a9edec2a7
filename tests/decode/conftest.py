"""The device of a test of decoding."""

import pytest
from support.files import nvjpeg_double
from support.files.decode_devices import ON_CARD

from gpuaug.decode.decoders import registry


@pytest.fixture
def device(request, monkeypatch):
    """A CPU, the same with a double of nvJPEG, or a GPU whose images are decoded by this decoder if nothing else is told."""
    if request.param == "double":
        nvjpeg_double.use(monkeypatch)
    if request.param not in ON_CARD:
        return "cpu"
    find = registry.find
    monkeypatch.setattr(registry, "find", lambda backend, device: find(request.param if backend == "auto" else backend, device))
    return "cuda"
