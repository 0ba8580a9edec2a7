import pytest
from PIL import Image

from gpuaug import ArgumentError
from gpuaug.benchkit import photos
from gpuaug.benchkit.photos import CROPS_PER_PHOTOGRAPH, class_folders, photographs

pytest.importorskip("skimage")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gpuaug"


def test_photographs_are_jpegs_in_class_folders_of_varied_sizes(photograph_cache):
    root = photographs()
    assert root.parent == photograph_cache / "gpuaug"
    images = class_folders(root, None)
    assert len(images) == CROPS_PER_PHOTOGRAPH * len(images.classes) >= 200
    assert {"astronaut", "chelsea", "coffee"} <= set(images.classes)
    sizes = set()
    for path, label in images.samples[:: CROPS_PER_PHOTOGRAPH // 2]:
        with Image.open(path) as image:
            image.load()
            assert (image.format, image.mode) == ("JPEG", "RGB")
            assert all(300 <= side <= 500 for side in image.size)
            sizes.add(image.size)
        assert images.classes[label] in path
    assert len(sizes) > 10


def test_an_interrupted_build_leaves_nothing_behind(cache, monkeypatch):
    def interrupted(root):
        (root / "astronaut").mkdir()
        (root / "astronaut" / "000.jpg").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(photos, "_build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        photographs()
    assert list(cache.iterdir()) == []
    monkeypatch.setattr(photos, "_build", lambda root: (root / "chelsea").mkdir())
    assert [folder.name for folder in photographs().iterdir()] == ["chelsea"], "made anew"


def test_an_installation_without_photographs_says_what_to_do(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(photos.resources, "files", lambda _: tmp_path)
    with pytest.raises(ArgumentError, match=r"scikit-image has none .* Install scikit-image from a wheel"):
        photographs()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("nothing", "No such file or directory"),
        ("a file", "Not a directory"),
        ("no classes", "no folders in it"),
        ("an empty class", "no images in it"),
    ],
)
def test_data_that_is_no_folder_of_class_folders_is_refused(tmp_path, content, reason):
    root = tmp_path / "data"
    if content == "a file":
        root.touch()
    elif content != "nothing":
        root.mkdir()
        if content == "an empty class":
            (root / "cat").mkdir()
    text = rf"data must be a folder of class folders with images in them, got '.*data' \({reason}\)\. Arrange"
    with pytest.raises(ValueError, match=text):
        class_folders(root, None)
