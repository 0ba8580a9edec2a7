import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support.bench.labelled_images import Labelled
from torch.utils.data import DataLoader

from bench.harness import optional_rows
from bench.peers import timm

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_timm_that_overwrites_batches_is_not_measured(monkeypatch):
    old = ModuleType("timm.data.loader")
    old.PrefetchLoader = lambda loader, **settings: SimpleNamespace(**settings)
    monkeypatch.setitem(sys.modules, "timm.data.loader", old)
    monkeypatch.setitem(sys.modules, "timm.data", ModuleType("timm.data"))
    monkeypatch.setitem(sys.modules, "timm", ModuleType("timm"))
    with pytest.raises(optional_rows.MissingError, match="timm must be newer"):
        timm.Prefetched([], CPU, None)


def test_timm_scales_and_does_nothing_else():
    pytest.importorskip("timm")
    loader = DataLoader(Labelled(), batch_size=4)
    try:
        prefetched = list(timm.Prefetched(loader, CPU, lambda images: images * 2))
    except optional_rows.MissingError as error:
        pytest.skip(str(error))
    assert len(prefetched) == 5
    for (images, labels), (expected, own) in zip(prefetched, loader, strict=True):
        torch.testing.assert_close(images, expected / 255 * 2)
        assert torch.equal(labels, own)
