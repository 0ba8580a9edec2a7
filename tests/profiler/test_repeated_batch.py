"""One batch for call after call: containers made anew, tensors copied where calls write to them."""

from collections import UserDict

import torch

from gpuaug.profiler.repeated_batch import RepeatedBatch


def test_containers_are_new_and_tensors_are_copied_where_they_are_written_to():
    first, held = torch.arange(3.0), UserDict(a=1)
    again = RepeatedBatch({"x": [first, first], "held": held, "movable": UserDict(y=first)})
    one, two, three = again(), again(), again()
    assert one["x"][0] is one["x"][1], "one tensor in two places stays one"
    assert one["x"][0] is not first, "the first is a copy, to see whether it is written to"
    assert two["x"][0] is three["x"][0] is first
    assert two is not three
    assert two["x"] is not three["x"]
    two["movable"].pop("y")
    assert "y" in three["movable"]
    written = RepeatedBatch([first])
    for _ in range(3):
        (tensor,) = written()
        assert tensor.tolist() == [0, 1, 2]
        tensor.add_(1)
    with torch.inference_mode():
        assert RepeatedBatch(torch.ones(2))().tolist() == RepeatedBatch([torch.ones(2)])()[0].tolist() == [1, 1]
