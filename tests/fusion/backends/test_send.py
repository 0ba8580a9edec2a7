import numpy as np
import pytest
import torch

from gpuaug.fusion.backends.readers import send


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_arrays_of_several_types_and_odd_sizes_arrive_as_they_are(device):
    numbers = np.arange(15)
    arrays = [
        numbers[:3].astype(np.int32),
        numbers.reshape(5, 3),
        np.float32(numbers[:5]) / 7,
        np.zeros((0, 4), np.int64),
        numbers.reshape(3, 5).T[::2],
        np.int32(numbers).reshape(1, 3, 5),
    ]
    for array, tensor in zip(arrays, send(arrays, torch.device(device)), strict=True):
        assert tensor.device.type == device
        assert tensor.dtype == torch.from_numpy(array.copy()).dtype
        assert np.array_equal(tensor.cpu().numpy(), array)
