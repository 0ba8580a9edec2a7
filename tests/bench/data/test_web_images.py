"""The sets of files as the web has them."""

from collections import Counter
from statistics import median

import pytest

from bench.data import web_images

SIZES = [(1600, 1067), (1067, 1600), (1600, 1000), (512, 512), (451, 300)]


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
