"""The copy lane's work. ``meta`` stands in for a card: tensors are moved to it as to any other device, without their values."""

import dataclasses
import logging
import warnings
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batches.containers import Encoding
from support.feed.ring_equality import assert_same
from support.feed.ring_inputs import target_dicts
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torchvision import tv_tensors

from gpuaug import ArgumentTypeError, DeviceError, StreamedLoader
from gpuaug.core.packed_targets import unpack_targets
from gpuaug.stages import copy
from gpuaug.stages.copy import SMALL_BYTES, Copier, _can_be_packed, copy_together

CPU, META = torch.device("cpu"), torch.device("meta")


# Leaf by leaf


def test_copier_on_cpu_returns_the_batch_itself():
    batch = {"images": torch.zeros(2), "labels": [torch.zeros(1), "name"]}
    copied = Copier(CPU).copy(batch)
    assert copied.batch is batch
    assert copied.num_bytes == 0


def test_copier_moves_and_counts_every_tensor():
    batch = {"images": torch.zeros(2, 3), "labels": [torch.zeros(4, dtype=torch.uint8), "name"]}
    copied = Copier(META).copy(batch)
    assert copied.batch["images"].is_meta
    assert copied.batch["labels"][0].is_meta
    assert copied.batch["labels"][1] == "name"
    assert copied.num_bytes == 2 * 3 * 4 + 4
    assert not batch["images"].is_meta


def test_copier_keeps_strides():
    images = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert Copier(META).copy(images).batch.stride() == images.stride()


@pytest.mark.parametrize("device", [CPU, META])
def test_copier_keeps_tensor_subclass(device):
    image = tv_tensors.Image(torch.rand(3, 4, 4))
    assert type(Copier(device).copy((image,)).batch[0]) is tv_tensors.Image


@pytest.mark.parametrize("device", [CPU, META])
def test_copier_moves_packed_sequence_by_its_to(device):
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])
    moved = Copier(device).copy([packed]).batch[0]
    assert type(moved) is PackedSequence
    assert moved.data.device.type == device.type


def test_copier_keeps_shared_tensor_shared():
    tensor = torch.zeros(2)
    batch = Copier(META).copy({"a": tensor, "b": [tensor, torch.zeros(2)]})
    assert batch.batch["a"] is batch.batch["b"][0]
    assert batch.batch["b"][1] is not batch.batch["a"]
    assert batch.num_bytes == 2 * 8


def test_copier_moves_target_dicts_by_key(monkeypatch):
    monkeypatch.setattr(copy, "_page_locked", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    copier = Copier(META)
    monkeypatch.setattr(copier, "_non_blocking", True)  # as on a card
    moved = []
    monkeypatch.setattr(copier, "_move", lambda leaf, _: moved.append(leaf) or leaf)
    kept = ("boxes", "masks", "labels", "image_id")
    targets = tuple({key: record.get(key) for key in kept} for record in target_dicts(0, 9) if "labels" in record)
    got = unpack_targets(copier.copy((torch.zeros(5), targets)).batch)
    assert_same(got[1], targets)
    assert [type(got[1]), *map(type, got[1])] == [tuple, *[dict] * 8]
    shapes = [tuple(leaf.shape) for leaf in moved if isinstance(leaf, torch.Tensor)]
    rows = sum(len(record["boxes"]) for record in targets)
    assert shapes == [(5,), (rows, 4), (sum(record["masks"].numel() for record in targets),), (rows,)]


@pytest.mark.parametrize("make", [lambda: torch.eye(2).to_sparse(), lambda: torch.eye(2).to_sparse_csr()])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_copier_moves_sparse_tensors(make):
    assert Copier(META).copy((make(),)).batch[0].is_meta


class Asked:
    """Moves itself, and remembers how it was asked to."""

    def __init__(self, asked=()):
        self.asked = asked


class AskedPlainly(Asked):
    def to(self, device):
        return AskedPlainly((device,))


class AskedByName(Asked):
    def to(self, device, *, non_blocking=False):
        return AskedByName((device, non_blocking))


class AskedByAnyName(Asked):
    def to(self, *args, **kwargs):
        return AskedByAnyName((*args, kwargs.get("non_blocking", False)))


def test_copier_without_lanes_moves_objects_blocking():
    assert Copier(META).copy([AskedByName()]).batch[0].asked == (META, False)


def test_copier_asks_each_type_for_non_blocking(monkeypatch):
    copier = Copier(META)
    monkeypatch.setattr(copier, "_non_blocking", True)
    for _ in range(2):
        moved = copier.copy([AskedByName(), AskedPlainly(), AskedByAnyName(), AskedByName()]).batch
        assert [one.asked for one in moved] == [(META, True), (META,), (META, True), (META, True)]


class Forgetful:
    """Moves itself in place, and returns nothing."""

    def to(self, device):
        self.device = device


class ForgetfulDict(dict):
    def to(self, device):
        self["device"] = device


@pytest.mark.parametrize("kind", [Forgetful, ForgetfulDict])
def test_objects_whose_to_returns_nothing_are_refused(kind):
    with pytest.raises(ArgumentTypeError, match=kind.__name__):
        Copier(META).copy({"image": torch.zeros(2), "other": kind()})


class Reading:
    """Moves itself into something smaller, so that its memory is soon another's."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value

    def to(self, device):
        return self.value


class Lazy(Mapping):
    """Makes a value when it is asked for it, and does not keep it."""

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        value = self._items[key]
        return Reading(key) if value is None else value

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


def test_leaves_made_on_access_stay_apart():
    assert dict(Copier(CPU).copy(Lazy(dict.fromkeys(range(8)))).batch) == {key: key for key in range(8)}


class Elsewhere(torch.Tensor):
    """Says that it is on a card that this machine does not have."""

    device = torch.device("cuda", 3)


def test_batch_on_another_accelerator_is_refused():
    with pytest.raises(DeviceError, match="moved to cpu, because it has a tensor on cuda:3"):
        Copier(CPU).copy((torch.zeros(1).as_subclass(Elsewhere),))


# What the first batch shows is said once


@dataclasses.dataclass
class Sample:
    images: torch.Tensor
    name: str


def said(caplog, *batches):
    with caplog.at_level(logging.INFO, "gpuaug"):
        for _ in StreamedLoader(batches, device="cpu"):
            pass
    return [record.getMessage() for record in caplog.records]


def test_leaves_that_stay_on_host_are_logged_once(caplog):
    batch = {"images": torch.zeros(1), "meta": [Sample(torch.zeros(1), "a.jpg"), {"id": 3}]}
    assert said(caplog, batch, {**batch, "late": 1}) == [
        "These leaves of a batch stay on the host, unchanged: ['meta'][0].name (str), ['meta'][1]['id'] (int)"
    ]


def test_batch_without_tensor_is_logged(caplog):
    assert said(caplog, "text") == ["These leaves of a batch stay on the host, unchanged: the batch (str)"]


def test_log_counts_many_host_leaves(caplog):
    (text,) = said(caplog, [torch.zeros(1), *"abcdefghij"])
    assert text.endswith("[8] (str) and 2 more")


def test_nothing_is_logged_where_everything_moves(caplog):
    assert said(caplog, (torch.zeros(1), pack_sequence([torch.zeros(1)]), AskedPlainly())) == []


def test_host_leaves_are_handed_on():
    names = ["a.jpg"]
    ((_, same),) = StreamedLoader([(torch.zeros(1), names)], device="cpu")
    assert same is names


def test_mapping_with_to_is_moved_without_changing_it():
    batch = Encoding({"ids": torch.arange(3)})
    before = batch.data
    copied = Copier(torch.device("cpu")).copy([batch]).batch[0]
    assert type(copied) is Encoding
    assert copied is not batch
    assert copied["ids"].tolist() == [0, 1, 2]
    assert batch.data is before


class Wrapped:
    """An object whose ``to`` gives another that may share the tensor."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device):
        return Wrapped(self.tensor.to(device))


@pytest.mark.parametrize(
    ("leaf", "resident"),
    [
        (Encoding({"ids": torch.zeros(2)}), True),  # changed in place, so it cannot be told from one that was there
        (Wrapped(torch.zeros(2)), True),
        (Wrapped(torch.nn.Identity()), False),
    ],
    ids=["in place", "shares its tensor", "holds none"],
)
def test_objects_with_tensors_on_device_are_found(leaf, resident):
    assert Copier(torch.device("cpu")).copy([leaf]).has_resident_objects is resident


# Packing


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
    return [copies[id(leaf)][1] for leaf in leaves]


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
