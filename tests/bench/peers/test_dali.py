import itertools

import pytest
import torch
from support.bench.labelled_images import Labelled
from torch.utils.data import DataLoader

from bench.data import pipelines
from bench.peers import dali

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_dali_keeps_labels_with_their_images():
    pytest.importorskip("nvidia.dali")
    endless = itertools.cycle(DataLoader(Labelled(), batch_size=4))
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (pipelines.MEAN, pipelines.STD))
    for images, labels in itertools.islice(dali.Batches("seed", endless, 4, 32, CPU), 7):
        assert images.shape == (4, 3, 32, 32)
        # The middle, which no rotation leaves.
        colours = ((images * std + mean) * 255)[:, 0, 16, 16]
        torch.testing.assert_close(colours, 10.0 * labels, atol=1.0, rtol=0)


def test_dali_takes_images_of_different_sizes_and_antialiases_when_told():
    pytest.importorskip("nvidia.dali")
    images = [torch.randint(256, (height, 150, 3), dtype=torch.uint8) for height in (120, 200)]
    spread = {}
    for antialias in (False, True):
        call = dali.build_ragged(images, 16, antialias=antialias, device=CPU)
        found = torch.stack([call() for _ in range(8)])
        assert found.shape == (8, 2, 3, 16, 16)
        spread[antialias] = found.float().std()
    # Noise that is averaged over several pixels varies less.
    assert spread[True] < 0.8 * spread[False]


def test_dali_pads_masks_where_it_pads_images():
    pytest.importorskip("nvidia.dali")
    images, masks = torch.full((8, 3, 52, 52), 200, dtype=torch.uint8), torch.full((8, 1, 52, 52), 7, dtype=torch.uint8)
    found, labels = dali.build(dali.segmentation_preset, images, masks, torch.float32)()
    assert found.shape == (8, 3, 48, 48)
    assert (labels.shape, labels.dtype) == ((8, 1, 48, 48), torch.int64)
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (pipelines.MEAN, pipelines.STD))
    bright = (found * std + mean).amin(1, keepdim=True) > 0.3
    assert torch.equal(labels, torch.where(bright, 7, 255))
    assert 0 < bright.float().mean() < 1
