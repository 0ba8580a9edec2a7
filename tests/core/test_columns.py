"""Dicts of tensors as columns, and their way from a worker to the device as a few tensors."""

import copy
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.feed.ring_equality import assert_same
from support.feed.ring_inputs import DTYPES, any_bits, target_dicts
from support.targets.target_records import RECORDS
from torchvision import tv_tensors

from gpuaug.core import batch as batches
from gpuaug.core import packed_targets
from gpuaug.core.packed_targets import pack_targets, unpack_targets
from gpuaug.core.targets import Column, PackedTargets, holds_targets, indices_of


def in_memory_of_its_own(shape, dtype):
    return torch.empty(shape, dtype=dtype)


def in_memory_of_torch(shape, dtype):
    return None


def packed(batch, **options):
    return pack_targets(batch, in_memory_of_its_own, **options)


@pytest.fixture
def _any_number_is_packed(monkeypatch):
    monkeypatch.setattr(packed_targets, "MIN_PACKED_TENSORS", 1)


@pytest.mark.usefixtures("_any_number_is_packed")
@given(RECORDS, st.sampled_from([list, tuple]), st.sampled_from([in_memory_of_its_own, in_memory_of_torch]))
def test_packed_dicts_come_out_as_they_went_in(records, kind, allocate):
    batch = [torch.ones(2), {"targets": kind(records)}]
    before = copy.deepcopy(batch)
    sent = pickle.loads(pickle.dumps(pack_targets(batch, allocate)))
    assert_same(unpack_targets(sent), before)
    assert_same(batch, before)


def test_tensors_of_a_key_are_one_tensor():
    records = [{"boxes": torch.full((n, 4), float(n)), "labels": torch.arange(n), "image_id": n} for n in range(8)]
    found = packed((torch.zeros(3), records))
    assert type(found[1]) is PackedTargets
    assert [tuple(leaf.shape) for leaf in batches.tensors(found)] == [(3,), (28, 4), (28,)]


def test_masks_of_any_size_are_one_tensor():
    records = [{"masks": torch.ones(2, 300 + n, 200, dtype=torch.uint8)} for n in range(8)]
    (flat,) = batches.tensors(packed(records))
    assert flat.shape == (sum(record["masks"].numel() for record in records),)
    assert packed(records, any_mask_size=False) is records


def test_large_tensors_that_are_no_masks_stay_apart():
    records = [{"image": torch.zeros(3, 100, 120), "boxes": torch.zeros(2, 4)} for _ in range(8)]
    found = packed(records)
    assert [found.others["image"][n] is record["image"] for n, record in enumerate(records)] == [True] * 8
    assert [tuple(each.shape) for each in found.flat] == [(16, 4)]


ALONE = torch.ones(2, 4)
NOT_PACKED = {
    "of another mapping": [OrderedDict(boxes=torch.ones(2, 4)) for _ in range(9)],
    "few": [{"boxes": torch.ones(2, 4)} for _ in range(7)],
    "one tensor of two samples": [{"boxes": ALONE} for _ in range(9)],
    "a tensor of the batch": ([{"boxes": torch.ones(2, 4)} for _ in range(8)] + [{"boxes": ALONE}], ALONE),
    "a tensor within a dict": [{"boxes": torch.ones(2, 4)} for _ in range(8)] + [{"boxes": ALONE, "all": [ALONE]}],
    "needing gradients": [{"boxes": torch.ones(2, 4, requires_grad=True)} for _ in range(9)],
    "turned": [{"boxes": torch.ones(4, 2).t()} for _ in range(9)],
    "of two dtypes": [{"boxes": torch.ones(2, 4, dtype=(torch.float32, torch.float64)[n % 2])} for n in range(9)],
    "of two types": [{"boxes": (torch.ones, lambda *s: tv_tensors.Mask(torch.ones(s)))[n % 2](2, 4)} for n in range(9)],
    "videos": [{"clip": tv_tensors.Video(torch.ones(1, 3, 2, 2))} for _ in range(9)],
    "on another device": [{"boxes": torch.ones(2, 4, device="meta")} for _ in range(9)],
    "sparse": [{"boxes": torch.eye(2).to_sparse()} for _ in range(9)],
}


@pytest.mark.parametrize("batch", NOT_PACKED.values(), ids=NOT_PACKED)
def test_what_cannot_be_packed_is_handed_on(batch):
    assert packed(batch) is batch


def part():
    return {"boxes": torch.ones(1, 4), "points": torch.ones(3, 2)}


@pytest.mark.parametrize(
    "make",
    [part, lambda: [part() for _ in range(9)], lambda: [[part() for _ in range(9)] for _ in range(2)]],
    ids=["dict", "list", "lists"],
)
def test_packed_dicts_are_not_packed_again(make):
    """As on the copy lane, after a worker has packed them: values that are not packed may be target dicts, or lists of them."""
    records = [{"boxes": torch.ones(2, 4), "parts": make()} for _ in range(9)]
    found = packed([torch.zeros(3), records])
    assert packed(found) is found
    assert_same(unpack_targets(found)[1], records)


def test_an_empty_tensor_may_be_shared():
    nothing = torch.zeros(0, 4)
    records = [{"boxes": torch.ones(1, 4)} for _ in range(8)] + [{"boxes": nothing}] * 2
    found = packed(records)
    assert type(found) is PackedTargets
    assert_same(unpack_targets(found), records)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_any_dtype_are_packed(dtype):
    records = [{"rows": any_bits(n, dtype, n, 3), "maps": any_bits(n, dtype, 1, n + 1)} for n in range(9)]
    found = packed(records)
    assert len(found.flat) == 2
    assert_same(unpack_targets(found), records)


def test_unpacked_tensors_share_memory_alone():
    records = [{"boxes": torch.ones(2, 4), "map": torch.ones(1, n + 1), "number": torch.tensor(n)} for n in range(9)]
    got = unpack_targets(packed(records))
    tensors = list(batches.tensors(got))
    assert all(tensor._base is None for tensor in tensors)
    tensors[0].add_(1)
    assert [tensor._version for tensor in tensors] == [1] + [0] * (len(tensors) - 1)
    assert all(tensor.requires_grad_().is_leaf for tensor in tensors if tensor.is_floating_point())


def test_stages_see_whether_packed_dicts_hold_targets():
    records = target_dicts(1)
    plain = [{key: value for key, value in each.items() if key in ("labels", "image_id")} for each in records * 3]
    assert holds_targets(packed(records))
    assert not holds_targets(packed([{"labels": torch.arange(n)} for n in range(9)]))
    assert not holds_targets(plain)
    inside = [{"labels": torch.arange(n), "of": [tv_tensors.Mask(torch.ones(2, 2))]} for n in range(9)]
    assert holds_targets(packed(inside))


BOXES = [torch.arange(4.0 * count).view(count, 4) for count in (2, 0, 3)]
JOINED = {
    "boxes": BOXES,
    "views": [*torch.arange(20.0).view(5, 4).split([2, 0, 3])],
    "labels": [torch.arange(2), torch.arange(0), torch.arange(3)],
    "columns of a tensor": [torch.arange(20.0).view(5, 4)[:, ::2], torch.ones(1, 2)],
    "torchvision's": [tv_tensors.BoundingBoxes(each, format="XYXY", canvas_size=(8, 8)) for each in BOXES],
    "of no entries": [torch.zeros(0, 4)] * 3,
}
APART = {
    "an empty tensor of one axis": [torch.ones(2, 4), torch.zeros(0), torch.ones(3, 4)],
    "rows of other sizes": [torch.ones(2, 4), torch.ones(2, 3)],
    "rows without elements": [torch.ones(2, 0), torch.ones(3, 0)],
    "other numbers of axes": [torch.ones(2, 4), torch.ones(2)],
    "scalars": [torch.ones(()), torch.ones(())],
    "dtypes": [torch.ones(2, 4), torch.ones(2, 4, dtype=torch.float64)],
    "devices": [torch.ones(2, 4), torch.ones(2, 4, device="meta")],
    "another device": [torch.ones(2, 4, device="meta")],
    "sparse": [torch.ones(2, 4).to_sparse()] * 2,
    "sparse and dense": [torch.ones(2, 4), torch.ones(2, 4).to_sparse()],
    "numbers": [1, 2],
    "none": [],
}


@pytest.mark.parametrize("name", [*JOINED, *APART])
def test_a_joined_column_is_as_its_tensors_say(name):
    values = {**JOINED, **APART}[name]
    column, expected = (Column(range(len(values)), values) for _ in range(2))
    column.join(torch.device("cpu"))
    is_joined = "joined" in vars(column)
    assert not is_joined or name not in APART or name == "devices"
    if name in JOINED:
        assert is_joined
        assert_same(column.joined, torch.cat([each.as_subclass(torch.Tensor) for each in values]))
    if name not in ("numbers", "none"):
        attributes = ("row_shape", "lengths", "dtypes")
        assert [getattr(column, each) for each in attributes] == [getattr(expected, each) for each in attributes]
        assert column.are_on(torch.device("cpu")) == expected.are_on(torch.device("cpu"))


@pytest.mark.parametrize("samples", [range(3), range(2, 9, 3), range(0), [1, 5], []])
def test_indices_of_a_column_are_those_of_a_list(samples):
    indices = indices_of(samples)
    assert (indices.dtype, indices.tolist()) == (np.int64, list(samples))
