"""What the checks of arguments take, what they say, and how an error shows a value."""

import numpy as np
import pytest
import torch

from gpuaug import ArgumentError
from gpuaug.core.errors import one_of, shown, whole_number


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


def test_whole_number_has_bounds():
    assert [whole_number("n", n, "", least=1, most=3) for n in (1, np.int64(2), torch.tensor(3))] == [1, 2, 3]
    assert whole_number("n", -5, "", least=None) == -5
    with pytest.raises(ArgumentError) as caught:
        whole_number("n", 4, "Count to three.", least=1, most=3)
    assert str(caught.value) == "n must be 3 or less, got 4. Count to three."


def test_one_of_few():
    assert one_of("channels", np.int64(3), (1, 3), "") == 3
    for value in (True, 1.0, 2, "1", [1], torch.tensor(1)):
        with pytest.raises(ArgumentError) as caught:
            one_of("channels", value, (1, 3), "Leave it out.")
        assert str(caught.value) == f"channels must be 1 or 3, got {value!r}. Leave it out."
    with pytest.raises(ArgumentError, match="must be 'a', 'b' or 'c', got ndarray of shape"):
        one_of("letter", np.array(["a", "b"]), ("a", "b", "c"), "")
