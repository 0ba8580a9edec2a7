"""What the checks of arguments take, what they say, and how an error shows a value."""

import numpy as np
import pytest
import torch

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
