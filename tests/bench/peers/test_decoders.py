"""Decoders by themselves, and beside a training step."""

import io
import itertools
from collections import deque
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor

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


class FailingDecoder:
    """A decoder that decodes twice and then fails."""

    def __init__(self, _device):
        self.calls = 0

    def prepare(self, files):
        return files

    def decode(self, _files):
        self.calls += 1
        if self.calls > 2:
            raise ZeroDivisionError("broken on purpose")


@pytest.mark.gpu
def test_an_error_beside_a_step_is_raised_in_the_loop(class_folder, monkeypatch):
    monkeypatch.setattr(decoders, "BatchedDecoder", FailingDecoder)
    resident = itertools.repeat((torch.zeros(7, device=CUDA), range(7)))
    with ExitStack() as stack:
        batches = decoders.beside_training(case_of(class_folder, CUDA), stack, resident=resident)
        with pytest.raises(ZeroDivisionError, match="broken on purpose"):
            deque(batches, maxlen=0)


@pytest.mark.gpu
def test_engines_alone_decode_the_files(class_folder):
    case = case_of(class_folder, CUDA)
    decoder = decoders.BatchedDecoder(CUDA)
    files = [Path(path).read_bytes() for path in decoders.paths(case)[0]]
    *_, pixels = batch = decoder.prepare(files)
    decoder.decode(batch)
    torch.cuda.synchronize()
    wanted = torch.cat(
        [pil_to_tensor(Image.open(io.BytesIO(file)).convert("RGB")).permute(1, 2, 0).flatten() for file in files]
    )
    assert (pixels.cpu().float() - wanted.float()).abs().mean() < 3
