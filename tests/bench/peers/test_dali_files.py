"""Files through DALI."""

import itertools

import pytest
import torch
from PIL import Image

from bench.peers import dali_files

CPU = torch.device("cpu")


@pytest.fixture
def coloured(tmp_path):
    """Two classes of one colour each, in images of several sizes."""
    for label, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
        (tmp_path / label).mkdir()
        for index in range(5):
            Image.new("RGB", (60 + 10 * index, 50), colour).save(tmp_path / label / f"{index}.jpg")
    return tmp_path


@pytest.mark.parametrize("region", [True, False])
def test_batches_are_cropped_and_have_their_labels(coloured, region):
    pytest.importorskip("nvidia.dali")
    options = {"largest_px": (100, 50), "threads": 1, "region": region, "ahead": 2}
    batches = dali_files.batches(coloured, 4, 32, CPU, **options)
    seen = set()
    for images, labels in itertools.islice(batches, 6):
        assert (images.shape, images.dtype, labels.shape) == ((4, 3, 32, 32), torch.float16, (4,))
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(images[:, 0].mean((1, 2)) > images[:, 2].mean((1, 2)), labels == 1)
        seen.update(labels.tolist())
    assert seen == {0, 1}


def test_settings_suit_the_cores():
    for cores, threads in ((16, {4, 8, 16}), (12, {4, 8}), (4, {4}), (2, {2})):
        mixed, crops, ahead = dali_files.axes(cores, mixed=True)
        assert {settings["threads"] for settings in mixed} == threads
        assert {settings["load"] for settings in mixed} == {0.65, 0.9, 1.0, 0.5, 0.0}
        assert len(mixed) == 3 * len(threads) + 2
        assert {settings["threads"] for settings in mixed if settings["load"] < 0.65} == {max(threads)}
        assert (len(crops), len(ahead)) == (2, 2)
    assert dali_files.axes(4, mixed=False)[0] == [{"threads": 4}]
    hidden, crops, _ = dali_files.axes(8, mixed=True, engines=False)
    assert hidden == [{"threads": 4, "load": 0.0}, {"threads": 8, "load": 0.0}]
    assert dali_files.axes(8, mixed=False, regions=(False,))[1] == [{"region": False}]
