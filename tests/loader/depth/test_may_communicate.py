"""Ranks that may wait for one another do not decide each for itself."""

import kornia.augmentation as K
import pytest
from protocol.scenarios import Encoder
from support.depth_tuning import ALL, Training, augment, auto, decided
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import gpuaug
from gpuaug import FeatureStage, TransformStage
from gpuaug.loader import depth
from gpuaug.loader.depth import AHEAD, COUNT, SETTLE, WARM, may_communicate
from gpuaug.stages.base import Stage


class Own(Stage):
    kind = "own"

    def bind(self, name, lanes):
        raise NotImplementedError


def bare(kind):
    """A module of a kind that can be made only where there are several processes."""
    module = object.__new__(kind)
    nn.Module.__init__(module)
    return module


def frozen(*modules):
    return nn.Sequential(nn.Linear(2, 2), *modules).requires_grad_(False)


class FullyShardedDataParallel(nn.Module):
    """Goes by the name of torch's own, which is not imported to be found."""


class Sharded(FSDPModule, nn.Linear):
    """As ``fully_shard`` makes of a module."""


SILENT = {
    "nothing": list,
    "a module": lambda: [nn.Conv2d(3, 3, 3)],
    "BatchNorm": lambda: [frozen(nn.BatchNorm2d(3))],
    "an encoder": lambda: [FeatureStage(frozen())],
    "a mapping": lambda: [FeatureStage({"a": frozen(), "b": frozen(nn.ReLU())})],
    "DataParallel": lambda: [FeatureStage(bare(nn.DataParallel))],
    "a stage of a module": lambda: [TransformStage(nn.ReLU(), name="named")],
    "fused": lambda: [gpuaug.fuse(K.AugmentationSequential(K.RandomHorizontalFlip()))],
}
TALKING = {
    "a function": lambda: [lambda x: x],
    "a stage of a function": lambda: [TransformStage(len, name="named")],
    "a method": lambda: [frozen().forward],
    "a stage of one's own": lambda: [Own(on=..., into=..., name=None)],
    "SyncBatchNorm": lambda: [FeatureStage(frozen(nn.Sequential(nn.SyncBatchNorm(2))))],
    "SyncBatchNorm in a transform": lambda: [TransformStage(frozen(nn.SyncBatchNorm(2)))],
    "DistributedDataParallel": lambda: [FeatureStage(frozen(bare(DistributedDataParallel)))],
    "in a mapping": lambda: [FeatureStage({"a": frozen(), "b": frozen(nn.SyncBatchNorm(2))})],
    "FullyShardedDataParallel": lambda: [FeatureStage(frozen(bare(FullyShardedDataParallel)))],
    "fully_shard": lambda: [FeatureStage(frozen(bare(Sharded)))],
    "the last of several": lambda: [nn.ReLU(), FeatureStage(frozen()), lambda x: x],
}


def as_given(stages):
    return [stage if isinstance(stage, Stage) else TransformStage(stage) for stage in stages]


@pytest.mark.parametrize("name", SILENT)
def test_may_communicate_is_false_for_modules_without_collectives(name):
    assert may_communicate(as_given(SILENT[name]())) is False


@pytest.mark.parametrize("name", TALKING)
def test_may_communicate_is_true_for_collectives_and_functions(name):
    assert may_communicate(as_given(TALKING[name]())) is True


def test_ranks_is_world_size_of_torch_distributed():
    assert depth.ranks() == 1
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    try:
        assert depth.ranks() == 3
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("communicates", [False, True])
def test_tuner_streams_on_all_ranks_when_stages_may_communicate(cuda, monkeypatch, ranks, communicates):
    monkeypatch.setattr(depth, "ranks", lambda: ranks)
    stage = augment(cuda) if communicates else FeatureStage(Encoder(cuda), capture="never")
    training = Training(cuda, auto(cuda, ALL + 10, stage), 10, 8)
    training.epoch()
    if ranks > 1 and communicates:
        assert decided(training.loader) == "'auto' (streamed on all ranks, because stages may wait for those of others)"
        assert set(training.depths) == {AHEAD}
        training.loader.stages = []
        Training(cuda, training.loader, 10, 8).epoch()
    assert decided(training.loader) == "'auto' (in line: 8 ms a batch in line, 10 streamed)"


def test_process_group_started_during_tuning_ends_it(cuda, monkeypatch):
    training = Training(cuda, auto(cuda, 40, augment(cuda)), 10, 8)
    training.epoch(WARM + SETTLE + COUNT)
    assert training.loader.stats().depth == 0
    monkeypatch.setattr(depth, "ranks", lambda: 2)
    training.depths.clear()
    training.epoch()
    assert "on all ranks" in decided(training.loader)
    assert set(training.depths) == {AHEAD}
