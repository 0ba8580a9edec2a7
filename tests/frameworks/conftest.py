"""Fixtures of the tests with real frameworks. Packages that are not in the extra ``test`` have the marker ``frameworks``."""

import pytest
import torch
from support.bench.fixtures import class_folder

__all__ = ["class_folder"]


@pytest.fixture
def noise():
    """A stage whose draws are seen in what it gives: images are zeros, so a batch is its noise."""

    def noise(images):
        return images + torch.rand_like(images)

    return noise
