"""What the checks of arguments take, what they say, and how an error shows a value."""

import numpy as np
import pytest
import torch

from gpuaug import ArgumentError, ArgumentTypeError, DecodeStage, read_clip
from gpuaug.core.errors import shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(64, 3, 32, 32), "Tensor of shape (64, 3, 32, 32)"),
        (np.zeros((2, 3)), "ndarray of shape (2, 3)"),
        (torch.tensor(3), "tensor(3)"),
        (torch.Tensor, "<class 'torch.Tensor'>"),
        ([1, "a"], "[1, 'a']"),
        (None, "None"),
        (torch.nn.Sequential(torch.nn.ReLU()), "Sequential( (0): ReLU() )"),
    ],
)
def test_shown_value(value, text):
    assert shown(value) == text


@pytest.mark.parametrize("value", ["x" * 5000, list(range(5000)), [torch.zeros(9, 9)] * 9, dict.fromkeys(range(99), "x" * 100)])
def test_shown_value_is_short_and_one_line(value):
    assert len(shown(value)) < 500
    assert "\n" not in shown(value)


TAKERS = [
    lambda value: DecodeStage(on_error="replace", max_replaced=value).max_replaced,
    lambda value: read_clip("video.mp4", at=value).at,
]


@pytest.mark.parametrize("take", TAKERS, ids=["max_replaced", "at"])
def test_shares_are_numbers_from_0_to_1(take):
    for value in (0, 1, 0.25, np.float32(0.25), torch.tensor(0.25), np.int64(1)):
        assert take(value) == float(value)
    for value in (-1e-9, 1.0001, 2, float("nan"), float("inf"), torch.tensor(1.5)):
        with pytest.raises(ArgumentError, match=r" must be from 0 to 1, got .*\. [LP]"):
            take(value)
    for value in ("0.5", b"1", True, np.bool_(True), torch.tensor(True), [0.5], torch.ones(2), 1j, 10**400):
        with pytest.raises(ArgumentTypeError, match=r".* must be a number, got .*\. .*"):
            take(value)
