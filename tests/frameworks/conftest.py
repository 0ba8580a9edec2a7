"""What the tests with real frameworks share. ``pytest -m frameworks`` runs them: pip install -e '.[test,frameworks]'."""

import pytest
import torch


@pytest.fixture
def noise():
    """A stage whose draws are seen in what it gives: images are zeros, so a batch is its noise."""

    def noise(images):
        return images + torch.rand_like(images)

    return noise
