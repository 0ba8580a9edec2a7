"""Corpora of encoded photographs."""

import pytest
from PIL import Image, JpegImagePlugin
from support.bench.file_corpora import file_corpora

from bench.data import encoded_images

__all__ = ["file_corpora"]


def opened(root):
    return [Image.open(path) for path in sorted(root.glob("*/*"), key=lambda path: path.stem)]


def bytes_of(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.glob("*/*")}


def test_small_files_are_baseline_and_of_sizes_that_differ(file_corpora):
    images = opened(encoded_images.make("small"))
    assert len(images) == 12
    assert {image.format for image in images} == {"JPEG"}
    assert {JpegImagePlugin.get_sampling(image) for image in images} == {2}, "4:2:0"
    assert not any("progressive" in image.info for image in images)
    assert all(400 <= image.width <= 600 and 330 <= image.height <= 500 for image in images)
    assert len({image.size for image in images}) > 8


def test_every_twentieth_file_of_the_mix_is_of_another_form(file_corpora):
    images = opened(encoded_images.make("mix"))
    forms = [(image.format, image.mode, "progressive" in image.info) for image in images]
    others = {index: form for index, form in enumerate(forms) if form != ("JPEG", "RGB", False)}
    assert others == {0: ("JPEG", "RGB", True), 20: ("PNG", "RGB", False), 40: ("JPEG", "CMYK", False)}
    small = opened(encoded_images.make("small"))
    assert [image.size for image in images[:12]] == [image.size for image in small], "so that they differ in their form alone"


def test_a_camera_s_files_are_large(file_corpora):
    made = encoded_images.corpus(encoded_images.make("camera"))
    assert made.count == 2
    assert 3800 <= made.largest_px[0] <= 4200
    assert 2850 <= made.largest_px[1] <= 3150
    assert 2e6 < made.mean_bytes < 6e6


def test_files_are_the_same_wherever_they_are_made_and_made_once(file_corpora, monkeypatch, tmp_path):
    first = encoded_images.make("small", count=3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    second = encoded_images.make("small", count=3)
    assert first != second
    assert bytes_of(first) == bytes_of(second)
    monkeypatch.setattr(encoded_images, "_write", lambda *_: pytest.fail("written again"))
    assert encoded_images.make("small", count=3) == second


def test_a_corpus_is_what_its_files_are(class_folder, monkeypatch):
    made = encoded_images.corpus(class_folder)
    paths = list(class_folder.glob("*/*"))
    sizes = [Image.open(path).size for path in paths]
    assert made.count == 24
    assert made.mean_bytes == pytest.approx(sum(path.stat().st_size for path in paths) / 24)
    assert made.largest_px == (max(width for width, _ in sizes), max(height for _, height in sizes))
    monkeypatch.setattr(encoded_images, "_MOST_READ", 5)
    few = encoded_images.corpus(class_folder)
    assert few.count == 24
    assert few.mean_bytes != made.mean_bytes, "of some of them"


def test_without_photographs_there_is_a_way_out(monkeypatch, tmp_path):
    monkeypatch.setattr(encoded_images, "PHOTOGRAPHS", ("none.png",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no photographs to read, because scikit-image has none"):
        encoded_images.make("small", count=2)
    assert not list((tmp_path / "gpuaug").iterdir())
