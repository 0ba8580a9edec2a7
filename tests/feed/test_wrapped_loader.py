"""Settings of the user's: the wrapped loader's own, and those around a loop. Errors that its collate function raises."""

import functools
import os
import signal
import sys
import time
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from contract.sources import failure
from PIL import Image
from support.feed.overridden_loaders import AsTheyAre
from support.feed.ring_cleanup import leave_by_break
from support.feed.ring_equality import assert_same
from support.feed.ring_inputs import COUNT, Samples, Source, padded, sized, values, with_workers, without_workers
from support.files.encoded import encoded
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.stateful_dataloader import _StatefulMultiProcessingDataLoaderIter

import gpuaug
from gpuaug import StreamedLoader

# What a finaliser raises nobody else hears of.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=["one epoch", "persistent"])
def test_wrapped_loader_is_not_changed(options):
    wrapped = with_workers(Samples(), num_workers=1, **options)()
    before = dict(vars(wrapped))
    with StreamedLoader(wrapped, device="cpu", feed="ring") as loader:
        list(loader)
        leave_by_break(loader)
        assert vars(wrapped) == before
        want = list(wrapped)
        assert all(type(batch) is dict for batch in want)
        assert_same(list(loader), want)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 0), (0, 2), pytest.param(1, 10, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:Batches of .* travel without slots")
def test_num_workers_may_change_between_epochs(before, after):
    sizes = [int(50_000 * 1.4 ** (i // 6)) for i in range(25)]
    wrapped = sized(sizes, num_workers=before)()
    want = list(sized(sizes, num_workers=0)())
    loader = StreamedLoader(wrapped, device="cpu", feed="ring", feed_bytes=500_000)
    assert_same([next(iter(loader)) for _ in range(2)], [want[0]] * 2)
    wrapped.num_workers = after
    wrapped.prefetch_factor = 2 if after else None
    assert_same(list(loader), want)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_num_workers_may_change_with_open_iterator(after):
    wrapped = with_workers(Samples())()
    want = list(without_workers(with_workers(Samples()))())
    loader = StreamedLoader(wrapped, device="cpu", feed="ring")
    list(loader)
    first = iter(loader)
    got = [next(first)]
    wrapped.num_workers = after
    wrapped.prefetch_factor = 2 if after else None
    second = iter(loader)
    again = [next(second)]
    got.extend(first)
    again.extend(second)
    assert_same(got, want)
    assert_same(again, want)


def test_collate_fn_may_be_replaced_between_epochs():
    wrapped = with_workers(Samples(), num_workers=1)()
    loader = StreamedLoader(wrapped, device="cpu", feed="ring")
    assert "image" in next(iter(loader))
    wrapped.collate_fn = padded
    assert_same(list(loader), list(wrapped))
    assert "images" in next(iter(loader))


def test_inference_mode_of_each_epoch_is_kept():
    make = with_workers(Samples(), num_workers=1)
    for feed in ("plain", "ring"):
        loader = StreamedLoader(make(), device="cpu", feed=feed)
        found = []
        for mode in (True, False, True):
            with torch.inference_mode(mode):
                found.append(list(loader))
        assert [epoch[-1]["image"].is_inference() for epoch in found] == [True, False, True]
        assert [batch["label"].tolist() for batch in found[0]] == [batch["label"].tolist() for batch in without_workers(make)()]
        found[1][-1]["image"].add_(1)
    assert loader.stats().slot_batches > 0


def test_inference_mode_without_workers():
    loader = StreamedLoader(DataLoader(Samples(), batch_size=2), device="cpu", feed="ring")
    for mode in (True, False):
        with torch.inference_mode(mode):
            images = [batch["image"] for batch in loader]
        assert images[-1].is_inference() == mode
        assert torch.equal(torch.cat(images)[-1], values(2 * COUNT, 3, 4, 4))
    assert loader.stats().slot_batches > 0


def test_default_device_does_not_apply_to_slots():
    # Only a source that draws nothing by itself can be read so: a DataLoader takes its seed from the default device.
    loader = StreamedLoader(Source(lambda i: torch.full((3,), i, device="cpu")), device="cpu", feed="ring")
    for device in ("meta", "cpu"):
        with torch.device(device):
            found = [batch[0] for batch in loader]
        assert {each.device.type for each in found} == {"cpu"}
        assert torch.stack(found).tolist() == list(range(COUNT))
    assert loader.stats().slot_batches > 0


# Errors of default_collate

SIZES = "For images of several sizes, or target dicts, pass collate_fn=gpuaug.collate_ragged"
ENCODED = "For encoded files, pass collate_fn=gpuaug.collate_encoded"
NOT_COLLATED = {
    "images of PIL's": (
        [Image.new("RGB", (4, 4))] * 2,
        "For PIL images, use v2.PILToTensor() in the dataset, or pass collate_fn=gpuaug.collate_ragged",
    ),
    "tensors of several sizes": ([torch.zeros(3, 4, 4), torch.zeros(3, 5, 4)], SIZES),
    "arrays of several sizes": ([np.zeros((4, 4, 3)), np.zeros((5, 4, 3))], SIZES),
    "several numbers of boxes": ([{"boxes": torch.zeros(1, 4)}, {"boxes": torch.zeros(2, 4)}], SIZES),
    "files": ([gpuaug.read_encoded(__file__)] * 2, ENCODED),
    "paths": ([Path(__file__)] * 2, ENCODED),
}


@pytest.mark.parametrize(("name", "num_workers"), [*((name, 0) for name in NOT_COLLATED), ("files", 1)])
def test_errors_of_default_collate_get_a_note(name, num_workers):
    samples, way_out = NOT_COLLATED[name]
    arrived, error = failure(StreamedLoader(DataLoader(samples, batch_size=2, num_workers=num_workers), device="cpu"))
    assert not arrived
    assert error.__notes__ == [
        f"gpuaug: the DataLoader could not stack these samples. {way_out}.",
        "gpuaug: raised by the wrapped loader, at batch 0 of epoch 0.",
    ]


IMAGE = Image.new("RGB", (8, 8))
PNG = encoded(8, 8, "PNG")


def collated_by_a_user(samples):
    return {"batch": gpuaug.collate_encoded(samples)}


@pytest.mark.parametrize(
    ("collate", "image", "num_workers"),
    [
        (gpuaug.collate_ragged, IMAGE, 0),
        (functools.partial(gpuaug.collate_ragged, convert=True), IMAGE, 0),
        (gpuaug.collate_encoded, PNG, 0),
        (collated_by_a_user, PNG, 1),
    ],
)
def test_collate_functions_of_gpuaug_are_not_proposed_in_place_of_themselves(collate, image, num_workers):
    others = [pair for pair, _ in NOT_COLLATED.values() if not isinstance(pair[0], dict)]
    others += [[np.zeros((8, 8), np.uint8), np.zeros((9, 8), np.uint8)], [None, None]]
    tried = 0
    for pair in others:
        samples = [(image, value) for value in pair]
        try:
            collate(samples)
        except Exception as error:
            is_default_collates = type(error) in (TypeError, RuntimeError)
        else:
            continue
        if not is_default_collates:  # the value was taken for an image
            continue
        tried += 1
        _, error = failure(StreamedLoader(DataLoader(samples, 2, num_workers=num_workers, collate_fn=collate), device="cpu"))
        text = "".join([str(error), *error.__notes__])
        assert "raised by default_collate for [1] of the samples. Put values that" in text
        assert not [note for note in error.__notes__ if "could not stack" in note]
    assert tried >= 3


@pytest.mark.parametrize("samples", [[object()], [torch.zeros(2), "a"]])
def test_other_errors_of_default_collate_get_none(samples):
    _, error = failure(StreamedLoader(DataLoader(samples, batch_size=2), device="cpu"))
    assert error.__notes__ == ["gpuaug: raised by the wrapped loader, at batch 0 of epoch 0."]


class KilledWithLock(Dataset):
    """A worker that reads index 2 is killed while it holds a lock that it shares with the training process."""

    def __init__(self, lock):
        self.lock = lock
        """Attribute path of the lock, from the variables of torch's worker loop."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 2:
            frame = sys._getframe()
            while "done_event" not in frame.f_locals:
                frame = frame.f_back
            attrgetter(self.lock)(SimpleNamespace(**frame.f_locals)).acquire()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)


LOCKS = ["done_event._cond", "index_queue._rlock", "data_queue._wlock"]


@pytest.mark.parametrize(
    ("kind", "lock", "persistent"),
    [
        (kind, lock, (row + column) % 2 > 0)
        for row, kind in enumerate([DataLoader, StatefulDataLoader, AsTheyAre])
        for column, lock in enumerate(LOCKS)
    ],
)
def test_loop_ends_after_a_worker_was_killed_with_a_lock(monkeypatch, kind, lock, persistent):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)  # what DataLoader gives its workers to end
    for iterator in (_MultiProcessingDataLoaderIter, _StatefulMultiProcessingDataLoaderIter):
        monkeypatch.setattr(iterator._try_get_data, "__defaults__", (0.1,))  # after which it asks whether they are alive
    wrapped = kind(KilledWithLock(lock), batch_size=2, num_workers=2, persistent_workers=persistent)
    loader = StreamedLoader(wrapped, device="cpu")
    with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
        list(loader)
    loader.close()


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_iter_ends_if_a_worker_is_killed_with_a_lock_before_it_returns(kind, monkeypatch):
    loader = StreamedLoader(kind(KilledWithLock("done_event._cond"), batch_size=2, num_workers=2), device="cpu")
    iterator_type = type(iter(kind([0], num_workers=1)))
    send_indices = iterator_type._reset

    def wait_for_signal(*arguments, **options):
        send_indices(*arguments, **options)
        while True:
            time.sleep(0.01)  # torch's handler raises its error here

    monkeypatch.setattr(iterator_type, "_reset", wait_for_signal)
    with pytest.raises(RuntimeError, match="killed by signal"):
        list(loader)
