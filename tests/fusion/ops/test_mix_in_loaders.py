"""Mixes in a loader: keyed by position at every depth, and turned off between epochs with labels in the same form."""

import multiprocessing

import kornia.augmentation as K
import pytest
import torch
from support.comparison.replay import photographs
from support.comparison.values import assert_values
from torch.nn.functional import one_hot
from torch.utils.data import DataLoader, TensorDataset

from gpuaug import StreamedLoader, TransformStage, fuse

CLASSES, SMOOTHING, EPOCHS = 10, 0.1, 3
BOTH = {0: "input", 1: "class"}


def dataset():
    return TensorDataset(photographs(24), torch.arange(24) % CLASSES)


def stages(*, mixing, pick="batch"):
    """Crops; a copy of what they made, to be looked at; mixes, or the same without them."""
    mixes = K.RandomMixUpV2(), K.RandomCutMixV2(use_correct_lambda=True)
    either = K.AugmentationSequential(*mixes, random_apply=1)
    last = [either, K.Normalize(0.5, 0.25)] if mixing else [K.Normalize(0.5, 0.25)]
    return [
        TransformStage(fuse([K.RandomResizedCrop((16, 20)), K.RandomHorizontalFlip()]), name="crop"),
        TransformStage(torch.clone, into=2, name="look"),
        TransformStage(fuse(last, pick=pick, num_classes=CLASSES, label_smoothing=SMOOTHING), on=BOTH, name="mix"),
    ]


def epochs(loader, off_from):
    """All batches of all epochs, without mixes from one epoch on."""
    made = []
    for epoch in range(EPOCHS):
        if epoch == off_from:
            loader.stages = stages(mixing=False)
        loader.set_epoch(epoch)
        made.append([tuple(value.clone() for value in batch) for batch in loader])
    return made


def pids():
    return {child.pid for child in multiprocessing.active_children()}


def same(one, other):
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


@pytest.mark.parametrize("pick", ["batch", "sample"])
def test_mixes_are_keyed_by_position_at_every_depth(pick):
    batches = list(DataLoader(dataset(), batch_size=5))
    made = {}
    for depth in (0, 2):
        loader = StreamedLoader(batches, stages(mixing=True, pick=pick), device="cpu", depth=depth, seed=7)
        made[depth] = epochs(loader, off_from=None)
    for in_line, streamed in zip(*made.values(), strict=True):
        assert len(in_line) == 5
        assert all(map(same, in_line, streamed))
    assert not torch.equal(made[0][0][0][1], made[0][1][0][1])  # another epoch, other shares


@pytest.mark.parametrize(
    ("workers", "depth"),
    [pytest.param({}, 0, id="in line"), pytest.param({"num_workers": 2, "persistent_workers": True}, 2, id="workers")],
)
def test_replacing_stages_turns_mixing_off_for_the_last_epochs(workers, depth):
    made = []
    for off_from in (None, 1):
        source = DataLoader(dataset(), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(0), **workers)
        with StreamedLoader(source, stages(mixing=True), device="cpu", depth=depth, seed=7) as loader:
            made.append(epochs(loader, off_from))
    mixed, ended = made
    assert all(map(same, mixed[0], ended[0]))
    seen, mixed_batches = set(), 0
    for epoch in range(1, EPOCHS):
        for (images, labels, cropped), (other, other_labels, other_cropped) in zip(mixed[epoch], ended[epoch], strict=True):
            # What stays draws as it did, whatever became of the stage that was replaced.
            assert_values(cropped, other_cropped)
            assert_values(other, (cropped - 0.5) / 0.25)
            mixed_batches += not torch.equal(images, other)
            assert labels.shape == other_labels.shape == (len(images), CLASSES)
            assert labels.dtype is other_labels.dtype is torch.float32
            own = other_labels.argmax(1)
            expected = one_hot(own, CLASSES) * (1 - SMOOTHING) + SMOOTHING / CLASSES
            torch.testing.assert_close(other_labels, expected, atol=1e-7, rtol=0)
            seen.add(tuple(own.tolist()))
    assert len(seen) == 5 * (EPOCHS - 1)
    assert mixed_batches >= 4 * (EPOCHS - 1)  # among few samples all may be their own partners


def test_replacing_stages_keeps_persistent_workers():
    source = DataLoader(dataset(), batch_size=6, num_workers=2, persistent_workers=True)
    others = pids()
    with StreamedLoader(source, stages(mixing=True), device="cpu") as loader:
        list(loader)
        workers = pids() - others
        loader.stages = stages(mixing=False)
        assert len(list(loader)) == 4
        assert len(workers) == 2
        assert pids() - others == workers
