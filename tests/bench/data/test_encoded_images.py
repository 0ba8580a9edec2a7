"""Corpora of encoded photographs."""

import pytest
from PIL import Image
from support.bench.file_corpora import file_corpora

from bench.data import encoded_images

__all__ = ["file_corpora"]


def opened(root):
    return [Image.open(path) for path in sorted(root.glob("*/*"), key=lambda path: path.stem)]


def bytes_of(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.glob("*/*")}


def test_every_twentieth_file_of_the_mix_is_of_another_form(file_corpora):
    images = opened(encoded_images.make("mix"))
    formats = [(image.format, image.mode, "progressive" in image.info) for image in images]
    rare_formats = {index: file_format for index, file_format in enumerate(formats) if file_format != ("JPEG", "RGB", False)}
    assert rare_formats == {0: ("JPEG", "RGB", True), 20: ("PNG", "RGB", False), 40: ("JPEG", "CMYK", False)}
    small = opened(encoded_images.make("small"))
    assert [image.size for image in images[:12]] == [image.size for image in small], "so that they differ in their form alone"


def test_files_are_the_same_wherever_they_are_made_and_made_once(file_corpora, monkeypatch, tmp_path):
    first = encoded_images.make("small", count=3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    second = encoded_images.make("small", count=3)
    assert first != second
    assert bytes_of(first) == bytes_of(second)
    monkeypatch.setattr(encoded_images, "_write", lambda *_: pytest.fail("written again"))
    assert encoded_images.make("small", count=3) == second


def test_a_corpus_is_what_its_files_are(class_folder, monkeypatch):
    corpus = encoded_images.corpus(class_folder)
    paths = list(class_folder.glob("*/*"))
    sizes = [Image.open(path).size for path in paths]
    assert corpus.count == 24
    assert corpus.mean_bytes == pytest.approx(sum(path.stat().st_size for path in paths) / 24)
    assert corpus.largest_px == (max(width for width, _ in sizes), max(height for _, height in sizes))
    monkeypatch.setattr(encoded_images, "_MAX_FILES_READ", 5)
    subset_corpus = encoded_images.corpus(class_folder)
    assert subset_corpus.count == 24
    assert subset_corpus.mean_bytes != corpus.mean_bytes, "of some of them"
