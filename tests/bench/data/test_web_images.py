"""The sets of files as the web has them."""

from collections import Counter
from statistics import median

import pytest
from PIL import Image, JpegImagePlugin
from support.bench.file_corpora import file_corpora

from bench.data import encoded_images, web_images

__all__ = ["file_corpora"]

SIZES = [(1600, 1067), (1067, 1600), (1600, 1000), (512, 512), (451, 300)]


def opened(root):
    return [Image.open(path) for path in sorted(root.glob("*/*"), key=lambda path: path.stem)]


def test_shares_sizes_and_crops_are_those_of_the_whole_set():
    plain, web = (web_images.plans(name, 2048, SIZES) for name in ("plain", "web"))
    assert Counter(plan.file_format for plan in plain) == {"jpeg": 2048}
    assert Counter(plan.file_format for plan in web) == {"jpeg": 1597, "progressive": 308, "png": 82, "webp": 61}
    assert [plan._replace(file_format="") for plan in plain] == [plan._replace(file_format="") for plan in web], (
        "the same images"
    )
    assert len({(plan.photograph, plan.box) for plan in web}) > 2000
    assert {plan.photograph for plan in web} == set(range(len(SIZES)))
    assert {plan.quality for plan in web} == set(range(90, 98))
    shares = Counter(plan.subsampling for plan in plain)
    assert shares["4:2:0"] > shares["4:4:4"] > shares["4:2:2"] > 0
    assert 430 < median(side for plan in web for side in plan.size) < 470
    for plan in web:
        left, top, right, bottom = plan.box
        width, height = SIZES[plan.photograph]
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        assert plan.size[0] <= right - left, "made smaller, never larger"
        assert (right - left) / (bottom - top) == pytest.approx(plan.size[0] / plan.size[1], rel=0.02)


def test_formats_are_those_of_the_set(file_corpora):
    plain, web = (opened(web_images.make(name)) for name in ("plain", "web"))
    assert {(image.format, "progressive" in image.info) for image in plain} == {("JPEG", False)}
    assert Counter((image.format, "progressive" in image.info) for image in web) == {
        ("JPEG", False): 20,
        ("JPEG", True): 3,
        ("PNG", False): 1,
        ("WEBP", False): 1,
    }
    assert {JpegImagePlugin.get_sampling(image) for image in web if image.format == "JPEG"} >= {0, 2}, "4:4:4 and 4:2:0"
    assert {image.mode for image in web} == {"RGB"}
    assert [image.size for image in plain] == [image.size for image in web][: len(plain)]


def test_files_and_their_hash_are_the_same_wherever_they_are_made(file_corpora, monkeypatch, tmp_path):
    first = web_images.make("web", count=6)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    second = web_images.make("web", count=6)
    assert first != second
    hashes = [encoded_images.corpus(root).facts["sha256"] for root in (first, second)]
    assert hashes[0] == hashes[1]
    changed = next(second.glob("*/*"))
    changed.write_bytes(changed.read_bytes()[:-1] + b"\0")
    assert encoded_images.corpus(second).facts["sha256"] != hashes[0]
