"""Which device a loader takes, and when."""

from contextlib import closing

import pytest
import torch
from protocol.scenarios import Source, install
from support import internals

from gpuaug import StreamedLoader, TransformStage
from gpuaug.loader.inspection import Inspection


@pytest.fixture
def cuda(monkeypatch):
    """A double with two cards, of which ``current`` is current."""
    double = install(monkeypatch)
    double.current = 0
    double.device_count, double.current_device = lambda: 2, lambda: double.current
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    return double


def card(index):
    return torch.device("cuda", index)


@pytest.mark.parametrize("given", [None, "cuda", torch.device("cuda")])
def test_device_without_index_is_the_current_one_at_the_first_batch(given, cuda):
    loader = StreamedLoader(Source(cuda, 3), [lambda images: images], device=given)
    batches = iter(loader)
    assert loader.stats().pinned_bytes == 0
    assert not cuda._streams, "nothing is made on a card that may not be this rank's"
    assert loader.device == card(0)
    cuda.current = 1
    assert loader.device == card(1)
    assert "stages=[transform=TransformStage(<lambda>)], device=cuda:1, depth=2" in repr(loader)
    next(batches)
    lanes = internals.shared(loader).lanes
    cuda.current = 0
    next(iter(loader))
    loader.stages = [lambda images: images]
    assert loader.device == lanes.device == card(1)
    assert internals.shared(loader).lanes is lanes


@pytest.mark.parametrize("given", ["cuda:0", 0])
def test_device_with_index_is_kept(given, cuda):
    loader = StreamedLoader(Source(cuda, 3), device=given)
    cuda.current = 1
    next(iter(loader))
    assert loader.device == internals.shared(loader).lanes.device == card(0)


def test_lanes_that_were_asked_for_earlier_are_made_anew(cuda):
    loader = StreamedLoader([cuda.host_batch()], [TransformStage(lambda images: images)], device="cuda")
    inspection, state = Inspection(loader), loader.state_dict()
    earlier, copier, [(bound, _)] = inspection.lanes, internals.shared(loader).device_setup.copier, inspection.stages
    assert earlier.device == card(0)
    cuda.current = 1
    loader.load_state_dict(state)
    next(iter(loader))
    [(now, _)] = inspection.stages
    assert inspection.lanes.device == card(1)
    assert internals.shared(loader).device_setup.copier is not copier
    assert now.lane is inspection.lanes.lane("stage/transform") is not bound.lane


def test_inspected_iterator_runs_stages_on_the_device_that_is_current_when_it_begins(cuda):
    loader = StreamedLoader([cuda.host_batch()], [TransformStage(lambda images: images)], device="cuda")
    inspection = Inspection(loader)
    assert inspection.lanes.device == card(0)
    cuda.current = 1
    with closing(inspection.begin(0)) as iterator:
        [bound] = internals.bound_stages(iterator)
        assert bound.lane is inspection.lanes.lane("stage/transform")
        assert inspection.lanes.device == card(1)
