"""Decoders by themselves, and beside a training step."""

import itertools
from collections import deque
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor

import gpuaug
from bench.data import encoded_images
from bench.peers import decoders
from bench.peers.file_loaders import FileCase

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def case_of(root, device):
    return FileCase(encoded_images.corpus(root), batch_size=7, size=32, device=device, cores=1)


@pytest.mark.parametrize(
    ("name", "package"),
    [
        (decoders.CPU, "gpuaug"),
        (decoders.TORCHVISION, "torchvision"),
        (decoders.TORCHCODEC, "torchcodec"),
        (decoders.NVIMAGECODEC, "nvidia.nvimgcodec"),
    ],
)
def test_a_decoder_gives_the_images_of_its_files(name, package, class_folder):
    pytest.importorskip(package, exc_type=ImportError)
    case = case_of(class_folder, CPU)
    paths = decoders.paths(case)
    assert len({path for batch in paths for path in batch}) == 24, "a folder with fewer is gone through again"
    with ExitStack() as stack:
        batches = decoders.DECODERS[name].open(case, stack)
        for batch in paths:
            images, labels = next(batches)
            assert len(labels) == 7
            for image, path in zip(images, batch, strict=True):
                found = image if isinstance(image, torch.Tensor) else torch.from_numpy(np.asarray(image)).permute(2, 0, 1)
                expected = pil_to_tensor(Image.open(path).convert("RGB"))
                assert found.shape == expected.shape
                assert (found.float() - expected.float()).abs().mean() < 3


class FailingStage:
    """A stage that decodes twice and then fails."""

    def __init__(self, **_):
        self.calls = 0

    def __call__(self, encoded, device):
        self.calls += 1
        if self.calls > 2:
            raise ZeroDivisionError("broken on purpose")


@pytest.mark.gpu
def test_an_error_beside_a_step_is_raised_in_the_loop(class_folder, monkeypatch):
    monkeypatch.setattr(gpuaug, "DecodeStage", FailingStage)
    resident = itertools.repeat((torch.zeros(7, device=CUDA), range(7)))
    with ExitStack() as stack:
        batches = decoders.beside_training(case_of(class_folder, CUDA), stack, resident=resident)
        with pytest.raises(ZeroDivisionError, match="broken on purpose"):
            deque(batches, maxlen=0)
