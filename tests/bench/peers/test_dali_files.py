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
    seen_labels = set()
    for images, labels in itertools.islice(batches, 6):
        assert (images.shape, images.dtype, labels.shape) == ((4, 3, 32, 32), torch.float16, (4,))
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(images[:, 0].mean((1, 2)) > images[:, 2].mean((1, 2)), labels == 1)
        seen_labels.update(labels.tolist())
    assert seen_labels == {0, 1}
