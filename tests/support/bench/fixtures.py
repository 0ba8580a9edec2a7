"""What tests of the measuring kit and of the suites need."""

import random

import pytest
import torch


@pytest.fixture(scope="session")
def class_folder(tmp_path_factory):
    """Two classes of twelve small images, of sizes that differ."""
    from PIL import Image

    root = tmp_path_factory.mktemp("images")
    draw = random.Random(0)
    for label in ("cat", "dog"):
        (root / label).mkdir()
        for index in range(12):
            size = (draw.randint(40, 90), draw.randint(40, 90))
            Image.effect_noise(size, 50).convert("RGB").save(root / label / f"{index}.jpg")
    return root


@pytest.fixture(scope="session")
def made_photographs(tmp_path_factory):
    """Cache folder in which the photographs of scikit-image have been made, which takes a second."""
    from gpuaug.benchkit.photos import photographs

    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        photographs()
    return folder


@pytest.fixture
def photograph_cache(made_photographs, monkeypatch):
    """The user's cache folder, with the photographs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(made_photographs))
    return made_photographs


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Steps this small gain nothing from a second thread, and lose a hundredfold when its core is busy."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
