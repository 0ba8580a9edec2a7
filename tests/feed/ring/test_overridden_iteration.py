"""Loaders that override how a DataLoader is iterated use slots, and may keep, change, reorder and drop batches."""

import gc
import os
import time
from types import SimpleNamespace

import pytest
import torch
from support import internals
from support.feed.feed_iterators import take
from support.feed.overridden_loaders import (
    KINDS,
    AsTheyAre,
    AtOnce,
    AtRandom,
    AtTheEnd,
    Continued,
    InAThread,
    Itself,
    OfTorchdata,
    SideBySide,
    made,
)
from support.feed.ring_cleanup import leave_by_break
from support.feed.ring_equality import assert_ring_is_plain, assert_same
from support.feed.ring_inputs import COUNT, Made, Samples, any_bits, values, whole, with_workers
from support.feed.unsendable import with_unsendable
from support.process.waiting import until
from torch.utils.data import DataLoader

from gpuaug import IteratorEndedError, StreamedLoader
from gpuaug.feed.feed import Feed

# What a finaliser raises nobody else hears of.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize(("seed", "workers"), [(0, 0), (1, 1), (2, 2), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_batches_that_a_loader_keeps_and_changes_are_those_of_the_plain_feed(seed, workers):
    assert_ring_is_plain(made(AtRandom, num_workers=workers, seed=100 * seed), epochs=3)


@pytest.mark.parametrize("kind", KINDS)
def test_each_way_to_override_iteration_uses_slots(kind):
    assert_ring_is_plain(made(kind), epochs=2)


def test_batches_that_another_thread_reads_are_copies():
    assert_ring_is_plain(made(InAThread), epochs=3, slots=False)


def is_in_ring(batch, ring):
    memory = ring.memory.bytes
    return 0 <= batch["image"].data_ptr() - memory.data_ptr() < len(memory)


def test_workers_of_a_second_iterator_do_not_write_into_the_ring_of_the_first():
    feed = Feed(made(SideBySide, num_workers=1)(), "auto", None, torch.device("cuda", 0))

    def are_in_ring():
        source = feed.open(lambda: None, 2)
        while not (pulled := take(source)).ended:
            yield tuple(is_in_ring(batch, feed._ring) for batch in pulled.batch)

    assert len(list(are_in_ring())) == COUNT + 1
    assert set(are_in_ring()) == {(True, False)}
    feed.close()


@pytest.mark.parametrize(("kind", "workers"), [(AsTheyAre, 1), (AtOnce, 2), (Continued, 1)])
def test_persistent_workers_use_slots(kind, workers):
    # After the next to last batch there are larger slots. Workers have written the first batches of the next epoch, if it is
    # the same iterator's, into the older slots.
    batches = Made(lambda i: any_bits(i, torch.uint8, 1000 + 200_000 * (i == COUNT - 2)))
    options = {"num_workers": workers, "persistent_workers": True, "prefetch_factor": 6}
    with StreamedLoader(kind(batches, 1, collate_fn=whole, **options), device="cpu", feed="ring") as loader:
        for _ in range(3):
            for index, batch in enumerate(loader):
                assert_same(batch, batches[index])
                time.sleep(0.1 if index == COUNT - 6 else 0)  # in which workers write
            del batch
            internals.shared(loader).feed.free_read_slots()
        assert loader.stats().slot_batches > COUNT


class Reads(DataLoader):
    """Its code reads lists of dicts."""

    def __iter__(self):
        for batch in super().__iter__():
            assert type(batch) is list
            yield {"masks": [each["masks"] for each in batch], "count": len(batch)}


def test_code_of_a_loader_reads_batches_as_its_collate_function_returns_them():
    def make():  # every list is packed, some in a slot, some without one, and some for which the slot is too small
        sizes = [100 if index < COUNT else 10 ** (3 + index % 2) for index in range(2 * COUNT)]
        masks = Made(lambda i: [{"masks": any_bits(i, torch.uint8, 1, sizes[i])} for _ in range(8)], 2 * COUNT)
        return Reads(masks, collate_fn=whole, num_workers=1)

    assert_ring_is_plain(make, epochs=2)


def test_new_iterator_takes_over_a_loader_that_is_its_own_iterator():
    loader = StreamedLoader(made(Itself)(), device="cpu", feed="ring")
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    with pytest.raises(IteratorEndedError, match="reads the same source"):
        next(first)
    loader.close()


class KeepsOneOfThree(DataLoader):
    def __iter__(self):
        for index, batch in enumerate(super().__iter__()):
            if index % 3 == 0:
                yield batch


@pytest.mark.parametrize("kind", [AsTheyAre, KeepsOneOfThree])
def test_every_slot_is_free_again_after_an_epoch(kind):
    with StreamedLoader(made(kind, num_workers=1)(), device="cpu", feed="ring") as loader:
        count = sum(1 for _ in loader)
        for _ in range(2):
            leave_by_break(loader)
            before = loader.stats().slot_batches
            assert sum(1 for _ in loader) == count
            assert loader.stats().slot_batches - before == count
        own = internals.ring(loader)
        until(lambda: not own.memory.slots_in_use)


def test_slot_is_in_use_as_long_as_a_part_of_its_batch():
    parts = []

    class KeepsAPart(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                if not parts:
                    parts.append(batch["image"][1, :, 2])
                yield batch

    with StreamedLoader(made(KeepsAPart)(), device="cpu", feed="ring") as loader:
        list(loader)
        parts.clear()
        batches = iter(loader)
        next(batches)
        want = parts[0].clone()
        own = internals.ring(loader)
        assert sum(1 for _ in batches) == COUNT
        until(lambda: len(own.memory.slots_in_use) == 1)
        assert torch.equal(parts[0], want)
        list(loader)
        assert torch.equal(parts[0], want)
        del batches
        parts[0] = None
        until(lambda: not own.memory.slots_in_use)


def test_batches_outlive_their_loader():
    loader = StreamedLoader(made(AsTheyAre)(), device="cpu", feed="ring")
    list(loader)
    got = list(loader)
    loader.close()
    del loader
    gc.collect()
    assert_same(got, list(with_workers(Samples(), num_workers=0)()))


def test_larger_batches_get_larger_slots():
    sizes = [int(1000 * 1.5 ** (i // 4)) for i in range(24)]

    def make(workers=1):
        return AsTheyAre(Made(lambda i: (torch.tensor(i), any_bits(i, torch.uint8, sizes[i])), 24), None, num_workers=workers)

    assert_ring_is_plain(make, epochs=2)
    with StreamedLoader(make(), device="cpu", feed="ring") as loader:
        list(loader)
        before = loader.stats().slot_batches
        assert sum(1 for _ in loader) == 24
        assert internals.ring(loader).memory.newest_generation()[2] >= sizes[-1]
        assert loader.stats().slot_batches - before == 24


class Failing(Samples):
    def __getitem__(self, index):
        if index == 2 * COUNT - 6:
            raise LookupError("of sample 18")
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", [AsTheyAre, AtOnce])
def test_error_of_a_data_set_arrives_and_the_next_epoch_uses_slots(kind):
    wrapped = kind(Failing(), batch_size=2, num_workers=2)
    with StreamedLoader(wrapped, device="cpu", feed="ring") as loader:
        for _ in range(3):
            got = []
            with pytest.raises(LookupError, match="of sample 18"):
                got.extend(loader)
            assert len(got) == COUNT - 3
        assert loader.stats().slot_batches > COUNT


@pytest.mark.parametrize("feed", ["plain", "ring"])
@pytest.mark.parametrize("kind", [AsTheyAre, OfTorchdata])
def test_batch_that_cannot_be_sent_is_an_error_in_its_place(kind, feed):
    wrapped = kind(range(40), batch_size=2, collate_fn=with_unsendable, num_workers=1)
    with StreamedLoader(wrapped, device="cpu", feed=feed) as loader:
        # More often than there are slots, where it is known how many batches are in one.
        for _ in range(8 if feed == "ring" and kind is not OfTorchdata else 2):
            got = []
            before = loader.stats().slot_batches
            with pytest.raises(TypeError, match="number 10 cannot be sent"):
                got.extend(loader)
            assert [numbers.tolist() for numbers, _ in got] == [[number, number + 1] for number in range(0, 10, 2)]
        # torchdata's loader refers to its last iterator until it has the next one, whose workers then have no slots.
        assert loader.stats().slot_batches - before == 5 * (feed == "ring") or kind is OfTorchdata


def test_old_workers_do_not_write_into_slots_of_new_ones():
    iterators = []

    class Kept(DataLoader):
        """Its iterators are kept, and so their workers run on."""

        def __iter__(self):
            iterators.append(super().__iter__())
            yield from iterators[-1]

    with StreamedLoader(made(Kept)(), device="cpu", feed="ring") as loader:
        want = list(loader)
        leave_by_break(loader)
        assert_same(list(loader), want)
        iterators.clear()


def test_wrapped_loader_keeps_its_attributes_and_is_not_deleted():
    class Deleted(AtRandom):
        deleted = 0

        def __del__(self):
            self.deleted += 1

    wrapped = made(Deleted, seed=1)()
    before = dict(vars(wrapped))
    with StreamedLoader(wrapped, device="cpu", feed="ring") as loader:
        for epoch in range(1, 4):
            list(loader)
            assert vars(wrapped) == {**before, "seed": 1 + epoch}
    del loader
    gc.collect()
    wrapped.seed = 1
    assert_same(list(wrapped), list(made(AtRandom, num_workers=0, seed=1)()))
    assert vars(wrapped) == {**before, "seed": 2}


@pytest.mark.parametrize("deleted", [False, True])
def test_batches_that_a_user_reads_from_workers_of_a_ring_are_copies(deleted):
    wrapped = made(Continued, num_workers=1)()
    loader = StreamedLoader(wrapped, device="cpu", feed="ring")
    assert sum(1 for _ in loader) == len(wrapped)
    own = internals.ring(loader)
    until(lambda: not own.memory.slots_in_use)
    if deleted:
        loader.close()
        del loader, own
        gc.collect()
    want = list(Continued(Samples(), batch_size=2))
    for _ in range(2):
        got = list(wrapped)
        assert_same(got, want)
        assert deleted or not own.memory.slots_in_use
    if deleted:  # the workers still write into the memory of the ring
        assert_same(list(StreamedLoader(wrapped, device="cpu", feed="plain")), want)
    del wrapped.batches


class Stateful(DataLoader):
    """Has a state, as loaders of streaming data sets."""

    position = 0

    def __iter__(self):
        batches = super().__iter__()
        for index, batch in enumerate(batches):
            if index >= self.position:
                self.position = index + 1
                yield batch
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.mark.parametrize("workers", [0, 1])
def test_state_after_each_batch_resumes_as_without_slots(workers):
    def rest(feed, stop, workers):
        with StreamedLoader(made(Stateful, num_workers=workers)(), device="cpu", feed=feed) as loader:
            list(loader)
            for index, _ in enumerate(loader):
                if index == stop:
                    break
            state = loader.state_dict()
        with StreamedLoader(made(Stateful, num_workers=workers)(), device="cpu", feed=feed) as resumed:
            resumed.load_state_dict(state)
            return list(resumed)

    for stop in (5,) if workers else (0, COUNT):
        got = rest("ring", stop, workers)
        assert len(got) == COUNT - stop
        assert_same(got, rest("plain", stop, 0))


def test_slots_are_in_use_until_the_copy_has_ended(monkeypatch):
    class Copied:
        passed = False

        def query(self):
            return self.passed

        synchronize = query

    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    feed = Feed(
        AtTheEnd(Made(lambda i: {"images": values(i, 100)}), None, num_workers=1), "auto", None, torch.device("cuda", 0)
    )
    copies = []
    for _ in range(2):
        source = feed.open(lambda: None, 2)
        while not (pulled := take(source)).ended:
            feed.prepare(pulled)
            copies.append(Copied())
            feed.free_after(pulled, copies[-1])
            pulled.batch.clear()  # as a stage may do
        source.close()
    locked = internals.page_locked_slots(feed._ring)
    assert feed._ring.memory.slots_in_use == set(locked)
    assert len(locked) > 1
    copies[-1].passed = True
    feed.free_read_slots()
    assert feed._ring.memory.slots_in_use == set(locked)
    for copied in copies:
        copied.passed = True
    feed.free_read_slots()
    until(lambda: not feed._ring.memory.slots_in_use)
    feed.close()


class RequiresGrad(DataLoader):
    """Every second batch is a tensor that requires grad."""

    def __iter__(self):
        for index, batch in enumerate(super().__iter__()):
            yield batch.requires_grad_(index % 2 == 1)


def test_slots_of_tensors_that_require_grad_are_in_use_until_the_copy_has_ended(monkeypatch):
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    copied = SimpleNamespace(query=lambda: False, synchronize=lambda: None)
    feed = Feed(RequiresGrad(Made(lambda i: values(i, 100)), None, num_workers=1), "auto", None, torch.device("cuda", 0))
    starts = set()
    for _ in range(2):
        source = feed.open(lambda: None, 2)
        while not (pulled := take(source)).ended:
            offset = pulled.batch.data_ptr() - feed._ring.memory.bytes.data_ptr()
            feed.prepare(pulled)
            feed.free_after(pulled, copied)
            pulled.batch = None  # as after the copy
            if 0 <= offset < feed._ring.memory.num_bytes:
                assert offset not in starts, "the worker has written into a slot that is still read"
                starts.add(offset)
        source.close()
    assert len(starts) > 1
    feed.close()


def test_slots_stay_free_of_a_forked_process():
    with StreamedLoader(made(AsTheyAre)(), device="cpu", feed="ring") as loader:
        list(loader)
        batches = iter(loader)
        kept = next(batches)
        want = kept["image"].clone()
        if os.fork() == 0:
            del kept
            os._exit(0)
        os.wait()
        list(batches)
        assert torch.equal(kept["image"], want)
