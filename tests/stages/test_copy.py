"""The copy lane's work. ``meta`` stands in for a card: tensors are moved to it as to any other device, without their values."""

import dataclasses
import logging
from collections.abc import Mapping

import pytest
import torch
from support.batches.containers import Encoding
from support.feed.ring_equality import assert_same
from support.feed.ring_inputs import target_dicts
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torchvision import tv_tensors

from gpuaug import ArgumentTypeError, DeviceError, StreamedLoader
from gpuaug.core.packed_targets import unpack_targets
from gpuaug.stages import copy
from gpuaug.stages.copy import Copier

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


@pytest.mark.parametrize(
    ("kind", "asked"), [(AskedPlainly, (META,)), (AskedByName, (META, True)), (AskedByAnyName, (META, True))]
)
def test_copier_passes_non_blocking_to_objects_that_take_it(kind, asked, monkeypatch):
    copier = Copier(META)
    monkeypatch.setattr(copier, "_non_blocking", True)  # as on a card
    for _ in range(2):
        assert copier.copy([kind()]).batch[0].asked == asked


def test_copier_without_lanes_moves_objects_blocking():
    assert Copier(META).copy([AskedByName()]).batch[0].asked == (META, False)


def test_copier_asks_each_type_for_non_blocking(monkeypatch):
    copier = Copier(META)
    monkeypatch.setattr(copier, "_non_blocking", True)
    moved = copier.copy([AskedByName(), AskedPlainly(), AskedByName()]).batch
    assert [len(one.asked) for one in moved] == [2, 1, 2]


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
    assert Copier(torch.device("cpu")).copy([leaf]).resident_objects is resident
