"""Errors of datasets and collate functions are those that the plain feed raises."""

import pytest
import torch
from support.feed.ring_cleanup import failure
from support.feed.ring_equality import assert_same
from support.feed.ring_inputs import COUNT, Samples, values, with_workers
from torch.utils.data import Dataset, IterableDataset, default_collate

from gpuaug import StreamedLoader

# What a finaliser raises nobody else hears of.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


class OwnError(Exception):
    def __init__(self, number, *, text):
        super().__init__(f"{number}: {text}")


class Failing(Dataset):
    """Fails at some sample."""

    def __init__(self, error, at=14):
        self.error, self.at = error, at

    def __len__(self):
        return 2 * COUNT

    def __getitem__(self, index):
        if index == self.at:
            raise self.error
        return values(index, 3)


class FailingStream(IterableDataset):
    def __iter__(self):
        for index in range(2 * COUNT):
            if index == 14:
                raise LookupError("fourteen")
            yield values(index, 3)


def failing_collate(samples):
    if any(sample["label"] == 14 for sample in samples):
        raise ZeroDivisionError("of the collate function")
    return default_collate(samples)


def fail_to_prepare(worker_id):
    raise OSError("no worker")


class Ragged(Dataset):
    def __len__(self):
        return 2 * COUNT

    def __getitem__(self, index):
        return torch.zeros(3 if index != 15 else 4)


def alone(dataset, **options):
    return with_workers(dataset, num_workers=1, **options)


FAILURES = {
    "dataset": with_workers(Failing(LookupError("fourteen"))),
    "key": alone(Failing(KeyError("a\nb"))),
    "no message": alone(Failing(ValueError())),
    "cannot be made again": alone(Failing(OwnError(7, text="x"))),
    "stop": alone(Failing(StopIteration("odd"))),
    "first sample": alone(Failing(LookupError("first"), at=0)),
    "stream": alone(FailingStream()),
    "collate": with_workers(Samples(), collate_fn=failing_collate),
    "default collate": alone(Ragged()),
    "preparing": alone(Samples(), worker_init_fn=fail_to_prepare),
    "persistent": alone(Failing(LookupError("fourteen")), persistent_workers=True),
    "persistent collate": alone(Samples(), collate_fn=failing_collate, persistent_workers=True),
}


SLOW = ("no message", "stop", "first sample", "persistent collate")
CASES = [pytest.param(make, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, make in FAILURES.items()]


@pytest.mark.parametrize("make", CASES)
def test_worker_error_is_the_same_as_with_plain_feed(make):
    found = {}
    for feed in ("plain", "ring"):
        torch.manual_seed(7)
        with StreamedLoader(make(), device="cpu", feed=feed) as loader:
            found[feed] = [failure(loader) for _ in range(2 if loader.loader.persistent_workers else 1)]
            if feed == "ring" and len(found[feed][0][0]) > 6:
                assert loader.stats().slot_batches > 0
    for (got, error), (want, plain_error) in zip(found["ring"], found["plain"], strict=True):
        assert_same(got, want)
        assert error == plain_error


def every_third_fails(samples):
    if samples[0] % 3 == 0:
        raise LookupError("every third")
    return torch.tensor(samples)


def test_collate_fn_errors_leak_no_slots():
    order = {"sampler": [1, 2, 4, 5, 1, 2, 4, 5, 3], "batch_size": 1}
    wrapped = with_workers(range(7), collate_fn=every_third_fails, num_workers=1, persistent_workers=True, **order)()
    with StreamedLoader(wrapped, device="cpu", feed="ring") as loader:
        for _ in range(20):
            assert failure(loader)[1][0] is LookupError
        before = loader.stats().slot_batches
        assert failure(loader)[1][0] is LookupError
        assert loader.stats().slot_batches - before == 8
