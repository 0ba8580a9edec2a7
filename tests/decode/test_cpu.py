"""Decoding on the CPU, with and without simplejpeg."""

import io

import numpy as np
import pytest
from PIL import Image
from support.encoded import by_pil, encoded, mixed_files

from gpuaug import DecodeStage, collate_encoded
from gpuaug.decode import cpu


@pytest.fixture(params=[True, False], ids=["simplejpeg", "PIL alone"], autouse=True)
def _with_and_without_simplejpeg(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(cpu, "simplejpeg", lambda: None)


def test_images_are_those_of_pil():
    files = mixed_files()
    for image, file in zip(DecodeStage()(collate_encoded(files), "cpu"), files, strict=True):
        assert np.array_equal(image.permute(1, 2, 0).numpy(), by_pil(file))


@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"progressive": True}, {"mode": "L"}, {"mode": "CMYK"}], ids=str)
@pytest.mark.parametrize("scale", [2, 4, 8])
def test_smaller_images_are_those_of_a_draft(options, scale):
    width, height = 501, 377  # no multiples of a scale
    file = encoded(width, height, **options)
    (image,) = DecodeStage(min_side=-(-height // scale))(collate_encoded([file]), "cpu")
    with Image.open(io.BytesIO(file)) as opened:
        opened.draft(opened.mode, (width // scale, height // scale))
        wanted = np.asarray(opened.convert("RGB"))
    assert wanted.shape == (-(-height // scale), -(-width // scale), 3)
    assert np.array_equal(image.permute(1, 2, 0).numpy(), wanted)
