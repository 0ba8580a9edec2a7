import pytest
from support.cache.cached_loaders import write_images


@pytest.fixture
def paths(tmp_path):
    return write_images(tmp_path / "images")
