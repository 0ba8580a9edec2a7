"""The device of a test of decoding."""

import pytest
from support.files import nvjpeg_double
from support.files.decode_devices import CARD_HUFFMAN, ON_CARD

from gpuaug.decode.decoders import hybrid, registry


@pytest.fixture
def device(request, monkeypatch):
    """A CPU, the same with a double of nvJPEG, or a GPU whose images are decoded by this decoder if nothing else is told."""
    if request.param == "double":
        nvjpeg_double.use(monkeypatch)
    if request.param not in (*ON_CARD, CARD_HUFFMAN):
        return "cpu"
    if request.param == CARD_HUFFMAN:
        monkeypatch.setattr(hybrid, "CARD_HUFFMAN_PIXELS", 1)
    find, decoder = registry.find, request.param.partition(",")[0]
    monkeypatch.setattr(registry, "find", lambda backend, device: find(decoder if backend == "auto" else backend, device))
    return "cuda"
