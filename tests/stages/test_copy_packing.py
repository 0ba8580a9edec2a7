"""Packing the small tensors of a batch into one buffer, which is copied at once."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision import tv_tensors

from gpuaug.stages.copy import SMALL_BYTES, _can_be_packed, copy_together

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
]


@st.composite
def small_tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8).tolist()


def round_trip(*leaves):
    copies = copy_together(leaves, torch.device("cpu"))
    return [copies[id(leaf)] for leaf in leaves]


@given(st.lists(small_tensors(), min_size=1, max_size=6))
def test_unpacked_tensors_equal_packed_ones_and_do_not_overlap(leaves):
    parts = round_trip(*leaves)
    for leaf, part in zip(leaves, parts, strict=True):
        assert part.dtype is leaf.dtype
        assert part.shape == leaf.shape
        assert part.stride() == leaf.stride()
        assert bits(part) == bits(leaf)
        assert part.data_ptr() % part.element_size() == 0
        assert part._base is None, "not a view"
    for number, part in enumerate(parts):
        part.fill_(number % 2)
    for number, part in enumerate(parts):
        assert part.float().eq(number % 2).all()


def test_packing_copies_leaves():
    leaf = torch.zeros(3)
    (part,) = round_trip(leaf)
    leaf.fill_(7)
    assert part.eq(0).all()


def test_in_place_change_of_unpacked_tensor_keeps_autograd_of_others():
    labels, weights = round_trip(torch.arange(3), torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    loss = (x * weights).sum()
    labels.add_(1)
    loss.backward()
    assert x.grad.tolist() == [1, 1, 1]


def test_in_place_change_of_saved_unpacked_tensor_is_noticed():
    (weights,) = round_trip(torch.ones(3))
    loss = (torch.ones(3, requires_grad=True) * weights).sum()
    weights.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_packing_in_inference_mode():
    with torch.inference_mode():
        (part,) = round_trip(torch.arange(3))
    assert part.tolist() == [0, 1, 2]


def test_packing_ignores_default_device():
    leaf = torch.ones(2)
    with torch.device("meta"):
        (part,) = round_trip(leaf)
    assert part.device.type == "cpu"


def test_packing_records_no_autograd_graph():
    with torch.enable_grad():
        (part,) = round_trip(torch.ones(2))
    assert not part.requires_grad
    assert part.grad_fn is None
    part.requires_grad_()


def unusual():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "transposed": torch.rand(3, 4).t(),
            "expanded": torch.ones(1).expand(3),
            "odd strides": torch.arange(6.0).as_strided((1, 3), (5, 1)),
            "offset": torch.arange(6.0)[1:3],
            "complex": torch.ones(2, dtype=torch.complex64),
            "conjugate": torch.tensor([1 + 2j]).conj(),
            "negated view": torch.tensor([1 + 2j]).conj().imag,
            "empty": torch.empty(0, 3),
            "sparse": torch.eye(2).to_sparse(),
            "sparse rows": torch.eye(2).to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(torch.ones(2), 0.5, 1, torch.qint8),
            "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
            "ragged": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        }


@pytest.mark.parametrize("leaf", unusual().values(), ids=unusual().keys())
def test_unusual_tensors_are_packed_exactly_or_not_at_all(leaf):
    if _can_be_packed(leaf):
        _, part = round_trip(torch.zeros(1, dtype=leaf.dtype), leaf)
        assert type(part) is type(leaf)
        assert torch.equal(part, leaf)


REFUSED = {
    "subclass": tv_tensors.Image(torch.rand(3, 4, 4)),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "requires grad": torch.ones(2, requires_grad=True),
    "large": torch.zeros(SMALL_BYTES + 1, dtype=torch.uint8),
    "on a device": torch.empty(2, device="meta"),
    "a number": 3,
}


@pytest.mark.parametrize("leaf", REFUSED.values(), ids=REFUSED.keys())
def test_large_subclassed_or_device_tensors_are_not_packed(leaf):
    assert not _can_be_packed(leaf)


@pytest.mark.parametrize("leaf", [torch.tensor(1), torch.zeros(SMALL_BYTES, dtype=torch.uint8), torch.rand(2, 1, 3)])
def test_small_plain_tensors_are_packed(leaf):
    assert _can_be_packed(leaf)
