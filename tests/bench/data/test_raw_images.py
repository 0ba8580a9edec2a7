"""Images that lie uncompressed in one file."""

import numpy as np
from PIL import Image, ImageOps
from torchvision.datasets import ImageFolder

from bench.data import raw_images


def test_images_are_those_of_the_files_shrunk(class_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = raw_images.make(class_folder, 30, 24)
    images = raw_images.RawImages(folder)
    samples = ImageFolder(class_folder).samples
    assert len(images) == 30, "six are taken twice"
    for index in (0, 23, 24):
        path, label = samples[index % 24]
        image, image_label = images[index]
        assert image_label == label
        assert np.array_equal(image, ImageOps.fit(Image.open(path).convert("RGB"), (24, 24), Image.Resampling.BICUBIC))
    assert raw_images.make(class_folder, 30, 24) == folder
