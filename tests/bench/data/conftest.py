import pytest

from bench.data import character_images


@pytest.fixture(scope="session")
def character_folder(tmp_path_factory):
    """The smallest built-in set: each character in one face, once to train on and once to validate on."""
    root = tmp_path_factory.mktemp("characters")
    character_images.make(root, copies=1, typefaces=1)
    return root
