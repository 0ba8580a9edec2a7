"""Folders of encoded photographs at their smallest."""

import pytest

from bench.data import encoded_images, web_images
from bench.peers import file_cases


@pytest.fixture
def file_corpora(monkeypatch, tmp_path_factory):
    """The corpora of the suite ``files`` have a few files each, in a cache of the test's own."""
    cache = tmp_path_factory.getbasetemp() / "corpora"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(encoded_images, "COUNTS", {"small": 12, "camera": 2, "mix": 41})
    monkeypatch.setattr(web_images, "COUNTS", {"plain": 12, "web": 25})
    monkeypatch.setattr(file_cases, "_RAW_IMAGES", 6)
    monkeypatch.setattr(file_cases, "_RAW_PX", 24)
    return cache / "gpuaug"
