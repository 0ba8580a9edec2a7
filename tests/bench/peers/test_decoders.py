"""Decoders by themselves, and beside a training step."""

import io
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


def case_of(root):
    return FileCase(encoded_images.corpus(root), batch_size=7, size=32, device=torch.device("cpu"), cores=1)


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
    case = case_of(class_folder)
    paths = decoders.path_batches(case)
    assert len({path for batch in paths for path in batch}) == 24, "a folder with fewer is gone through again"
    with ExitStack() as stack:
        batches = decoders.DECODERS[name].open(case, stack)
        for batch in paths:
            images, labels = next(batches)
            assert len(labels) == 7
            for image, path in zip(images, batch, strict=True):
                decoded = image if isinstance(image, torch.Tensor) else torch.from_numpy(np.asarray(image)).permute(2, 0, 1)
                expected = pil_to_tensor(Image.open(path).convert("RGB"))
                assert decoded.shape == expected.shape
                assert (decoded.float() - expected.float()).abs().mean() < 3


@pytest.mark.gpu
def test_engines_alone_decode_the_files(class_folder):
    decoder = decoders.BatchedDecoder(torch.device("cuda", 0))
    files = [Path(path).read_bytes() for path in decoders.path_batches(case_of(class_folder))[0]]
    *_, pixels = batch = decoder.prepare(files)
    decoder.decode(batch)
    torch.cuda.synchronize()
    expected = torch.cat(
        [pil_to_tensor(Image.open(io.BytesIO(file)).convert("RGB")).permute(1, 2, 0).flatten() for file in files]
    )
    assert (pixels.cpu().float() - expected.float()).abs().mean() < 3
