"""``Ragged`` by itself: its index, its ``to`` and its ``pin_memory``."""

import pytest
import torch
from support.files.images import pil
from torch.utils.data._utils.pin_memory import pin_memory

from gpuaug import Ragged, collate_ragged


def test_ragged_index_may_be_negative():
    images = [pil(i, 2 + i, 3) for i in range(3)]
    batch = collate_ragged(images)
    assert torch.equal(batch[-1], batch[2])
    assert torch.equal(batch[-3], batch[0])
    for index in (3, -4):
        with pytest.raises(IndexError):
            batch[index]
    assert repr(batch) == "Ragged(3 images of 3 channels, hwc, cpu)"
    clips = collate_ragged([torch.zeros(4, 3, side, 5, dtype=torch.uint8) for side in (6, 7)])
    assert repr(clips) == "Ragged(2 clips of 4 frames of 3 channels, chw, cpu)"


def test_ragged_to_device(monkeypatch):
    moves = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, **move: moves.append((id(self), move)) or self.clone())
    batch = collate_ragged([pil(0, 2, 3)])
    moved = batch.to("cpu", non_blocking=True)
    move = {"device": torch.device("cpu"), "non_blocking": True}
    assert moves == [(id(batch.data), move), (id(batch.places), move)]
    assert moved.data is not batch.data
    assert moved.shapes is batch.shapes
    assert torch.equal(moved[0], batch[0])


def test_dataloader_pin_memory_pins_ragged(monkeypatch):
    locked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: locked.append(self) or self.clone())
    batch = collate_ragged([(pil(0, 2, 3), 1), (pil(1, 4, 4), 2)])
    images, labels = pin_memory(batch)
    assert [id(tensor) for tensor in locked] == [id(batch[0].data), id(batch[0].places), id(batch[1])]
    assert type(images) is Ragged
    assert images.shapes is batch[0].shapes
    assert torch.equal(images.data, batch[0].data)
    assert images.data is not batch[0].data
    assert labels.tolist() == [1, 2]
