"""Samples that ``collate_ragged`` refuses, by the index of the sample and with a way out."""

import io
from collections import namedtuple

import numpy as np
import PIL.Image
import pytest
import torch
from support.files.images import pil, png

import gpuaug
from gpuaug import ArgumentError, collate_ragged
from gpuaug.feed.collate_members import allocating_with

Pair = namedtuple("Pair", "image label")

FINE = pil(0, 2, 3)
CLIP = np.zeros((2, 4, 4, 3), np.uint8)
LARGE = np.broadcast_to(np.zeros(1, np.uint8), (16384, 16384, 3))
"""Three quarters of 2**30 pixels' values, in one byte."""
REFUSED = {
    "floating member": (
        [(torch.rand(3, 4, 4), 1)],
        r"Images must be uint8, got torch.float32 in sample 0 at \[0\]. Remove",
    ),
    "floating later": (
        [{"x": FINE}, {"x": np.zeros((2, 2, 3), np.float32)}],
        r"Images must be uint8, got float32 in sample 1 at \[.x.\]. Remove",
    ),
    "nothing later": (
        [Pair(FINE, 1), Pair(None, 1)],
        r"got NoneType in sample 1 at .image. Decode the image",
    ),
    "an empty sample": ([()], r"got tuple in sample 0. Decode the image"),
    "five dimensions": (
        [(np.zeros((1, 1, 4, 4, 3), np.uint8),)],
        r"Images must be .*, and clips .*, got an array of shape \(1, 1, 4, 4, 3\) in sample 0 at \[0\]",
    ),
    "a clip behind an image": (
        [(FINE,), (CLIP,)],
        r"an image in all samples or a clip in all samples, got an array of shape \(2, 4, 4, 3\) in sample 1 at \[0\]. Return",
    ),
    "a number behind a clip": ([CLIP, 3], r"got int in sample 1. Decode the image"),
    "a floating clip": ([torch.rand(2, 3, 4, 4)], r"must be uint8, got torch.float32 in sample 0. Remove"),
    "a clip without channels": ([CLIP, CLIP[..., :0]], r"1 to 4 channels, .* of shape \(4, 4, 0\) in sample 1"),
    "channels first in an array": (
        [FINE, np.zeros((3, 48, 64), np.uint8)],
        r"1 to 4 channels, .* \(3, 48, 64\) in sample 1",
    ),
    "no channels": ([np.zeros((4, 4, 0), np.uint8)], r"1 to 4 channels, .* \(4, 4, 0\) in sample 0"),
    "no pixels": (
        [FINE, np.zeros((0, 4, 3), np.uint8)],
        r"Images must have pixels, got an array of shape \(0, 4, 3\) in sample 1. Leave the image out of the dataset.",
    ),
    "too long": (
        [FINE, np.zeros((1, 2**24, 3), np.uint8)],
        r"sides of fewer than 2\*\*24 pixels, got 1x16777216 in sample 1. Split the image in the dataset",
    ),
    "too large together": (
        [(LARGE, 0), (LARGE, 1), (LARGE, 2), (LARGE, 3)],
        r"The images of a batch must have fewer than 2\*\*31 values, got 2415919104 up to sample 2 at \[0\]\. "
        r"Lower batch_size, or downsample large images in the dataset\.",
    ),
    "another length": (
        [(FINE, 1), (FINE, 1), (FINE, 1, 2)],
        r"the first, 0, 1, got 0, 1, 2 in sample 2. Return",
    ),
    "another form": ([(FINE, 1), 5], r"the first, 0, 1, got int in sample 1. Return"),
    "other views": ([([FINE, FINE], 1), ([FINE], 1)], r"the first, 0, 1, got 0 in sample 1 at \[0\]. Return"),
}


@pytest.mark.parametrize(("samples", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_invalid_samples_are_refused_with_sample_index(samples, text):
    for convert in (False, True):
        with pytest.raises(gpuaug.GpuAugError, match=text):
            collate_ragged(samples, convert=convert)


class AskedForMemory(Exception):
    pass


def ask(shape, dtype):
    raise AskedForMemory(*shape)


def test_batch_of_2_31_values_is_refused():
    one = LARGE[:1, :1, :1]
    fits = [np.broadcast_to(one, (2**24 - 1, 128, 1)), np.broadcast_to(one, (127, 1, 1))]
    with allocating_with(ask):
        with pytest.raises(AskedForMemory, match="2147483647"):  # which two gigabytes are too much of, for a test
            collate_ragged(fits, channels=1)
        with pytest.raises(ArgumentError, match=r"fewer than 2\*\*31 values, got 2147483648 up to sample 2"):
            collate_ragged([*fits, one], channels=1)


def test_truncated_image_error_names_sample():
    whole = png(pil(0, 40, 40)).numpy().tobytes()
    broken = PIL.Image.open(io.BytesIO(whole[: len(whole) // 2]))
    with pytest.raises(OSError, match="truncated") as caught:
        collate_ragged([(FINE, 1), (broken, 2)])
    assert caught.value.__notes__ == ["gpuaug: raised by PIL for the image in sample 1 at [0]."]


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([None, 3], "values that are not numbers or tensors into a dict"),
        ([[1, 2], [3]], "values that differ in size from sample to sample into a dict"),
    ],
)
def test_default_collate_error_has_fitting_way_out(members, said):
    with pytest.raises((TypeError, RuntimeError)) as caught:
        collate_ragged([(pil(0, 3, 4), member) for member in members])
    assert said in caught.value.__notes__[0]
