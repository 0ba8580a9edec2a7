"""The ring by itself: who may write into a slot, until when, and what is left when it is let go."""

import gc
import pickle
import weakref
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from support import internals
from support.feed.poison import overwrite_freed_slots
from torch.utils.data import default_collate

from gpuaug.core.errors import ArgumentTypeError, GpuAugWarning
from gpuaug.feed import ring as rings
from gpuaug.feed import ring_memory
from gpuaug.feed import worker as worker_module
from gpuaug.feed.ring import Ring
from gpuaug.feed.ring_memory import batch_bytes
from gpuaug.feed.worker import SlotCollate

pytestmark = pytest.mark.usefixtures("_reads_for_feed")


@pytest.fixture(autouse=True)
def _slots_are_overwritten_when_they_are_given_back():
    """Not here, unless a test asks for it: some look at what a slot holds after it was given back."""


class Event:
    def __init__(self):
        self.passed = self.waited_for = False

    def query(self):
        return self.passed

    def synchronize(self):
        self.waited_for = True


def batch():
    return {"images": torch.arange(600.0).reshape(2, 3, 10, 10), "labels": torch.tensor([1, 2]), "names": ["a", "b"]}


@pytest.fixture
def ring():
    made = Ring(workers=2, slots_per_worker=2, budget_bytes=1 << 20)
    yield made
    made.close()


def sent(ring, worker, value):
    """What arrives of a batch that a worker puts into the queue, or ``None`` where it found no slot."""
    writer = ring.memory.take_slot(worker)
    return pickle.loads(pickle.dumps(writer.describe(value))) if writer is not None else None


def test_slots_are_carved_once_a_batch_has_shown_its_size(ring):
    assert ring.memory.take_slot(0) is None
    assert ring.make_room(batch())
    first, slot_bytes, each = ring.memory.generation(1)
    assert slot_bytes >= batch_bytes(batch())
    assert each == 2
    assert first % 4096 == 0


def test_slot_is_released_after_copy(ring):
    ring.make_room(batch())
    mark = Event()
    got, slot = ring.receive(sent(ring, 0, batch()))
    ring.free_after(slot, mark)
    assert torch.equal(got["images"], batch()["images"])
    del got, slot
    assert sent(ring, 0, batch()) is not None  # its other slot, dropped at once
    for _ in range(3):
        ring.free_read_slots()
        writers = [ring.memory.take_slot(0), ring.memory.take_slot(0)]
        assert [writer is not None for writer in writers] == [True, False]
        writers[0].free()
    mark.passed = True
    ring.free_read_slots()
    assert all(ring.memory.take_slot(0) is not None for _ in range(2))


def test_slots_are_released_in_order_of_their_events(ring):
    ring.make_room(batch())
    marks = [Event(), Event()]
    for mark in marks:
        ring.free_after(ring.receive(sent(ring, 0, batch()))[1], mark)
    marks[1].passed = True
    ring.free_read_slots()
    assert len(ring.memory.slots_in_use) == 2
    marks[0].passed = True
    ring.free_read_slots()
    assert not ring.memory.slots_in_use


def test_worker_takes_only_its_own_slots(ring):
    ring.make_room(batch())
    writers = [ring.memory.take_slot(0) for _ in range(3)]
    assert [writer is not None for writer in writers] == [True, True, False]
    assert ring.memory.take_slot(1) is not None


def test_new_workers_frees_slots_of_ended_workers_but_not_held_ones(ring):
    ring.make_room(batch())
    assert ring.memory.take_slot(0) is not None  # and never sent
    held = sent(ring, 0, batch())
    ring.free_slots_of_ended_workers()
    assert ring.memory.take_slot(0) is not None
    assert ring.memory.take_slot(0) is None
    del held
    assert ring.memory.take_slot(0) is not None


def test_larger_batches_get_a_new_generation_and_old_memory_is_returned(ring):
    ring.make_room(batch())
    old, slot = ring.receive(sent(ring, 0, batch()))
    larger = {"images": torch.ones(2, 3, 20, 20)}
    assert ring.make_room(larger)
    assert ring.memory.newest_generation()[0] == 2
    new = sent(ring, 0, larger)
    assert {generation for generation, _ in ring.memory.slots_in_use} == {1, 2}
    assert torch.equal(old["images"], batch()["images"])
    del old, new, slot
    ring.free_slots_of_ended_workers()
    first, slot_bytes, each = ring.memory.generation(1)
    assert each == 0
    assert not ring.memory.bytes[first : first + slot_bytes].any()


def test_batch_larger_than_budget_gets_no_slot_and_is_warned_of_once():
    small = Ring(workers=2, slots_per_worker=2, budget_bytes=3000)
    with pytest.warns(GpuAugWarning) as caught:
        assert [small.make_room(batch()) for _ in range(2)] == [False, False]
    (text,) = (str(warning.message) for warning in caught)
    assert text == (
        "Batches of 0.0 MB travel without slots, which is slower, because one slot for each of 2 workers takes 8192 bytes and "
        "feed_bytes is 3000. Raise feed_bytes of the StreamedLoader, or lower batch_size or num_workers of the DataLoader."
    )
    assert small.memory.take_slot(0) is None
    small.close()
    larger = Ring(workers=2, slots_per_worker=2, budget_bytes=8192)
    assert larger.make_room(batch())
    assert larger.memory.take_slot(0) is not None
    larger.close()


def test_close_waits_for_copies():
    ring, mark = Ring(workers=1, slots_per_worker=2, budget_bytes=1 << 20), Event()
    ring.make_room(batch())
    ring.free_after(ring.receive(sent(ring, 0, batch()))[1], mark)
    ring.close()
    assert mark.waited_for


def test_poison_overwrites_released_slot(ring, monkeypatch):
    ring.make_room(batch())
    overwrite_freed_slots(monkeypatch)
    got = sent(ring, 0, batch())
    start = got["images"].data_ptr() - ring.memory.bytes.data_ptr()
    del got
    assert (ring.memory.bytes[start : start + 2400] == 0xAA).all()


def test_register_page_locks_slots_although_a_larger_batch_did_not_fit(monkeypatch):
    small, locked = Ring(workers=1, slots_per_worker=2, budget_bytes=16384), []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: locked.append(size) or 0, cudaHostUnregister=lambda address: 0
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    assert small.make_room(batch())
    with pytest.warns(GpuAugWarning, match="because one slot takes 503808 bytes and feed_bytes is 16384"):
        small.make_room({"images": torch.zeros(100_000)})
    _, slot = small.receive(sent(small, 0, batch()))
    small.page_lock()
    assert locked == [small.memory.generation(1)[1]]
    del slot
    small.close()


class PageLocks:
    """CUDA's own list of what is page-locked. It refuses memory that it holds already, wherever that lay before."""

    def __init__(self):
        self.locked, self.interrupt, self.most = {}, None, 1 << 40

    def cudaHostRegister(self, address, size, flags):
        if sum(self.locked.values()) + size > self.most:
            return 2  # out of memory
        if any(start < address + size and address < start + length for start, length in self.locked.items()):
            return 712
        self.locked[address] = size
        return self._returned()

    def cudaHostUnregister(self, address):
        return self._returned() if self.locked.pop(address, None) else 713

    def _returned(self):
        """A signal that arrived within the call raises as it returns."""
        error, self.interrupt = self.interrupt, None
        if error is not None:
            raise error
        return 0


@pytest.fixture
def page_locks(monkeypatch):
    made = PageLocks()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    yield made
    Ring(workers=1, slots_per_worker=1, budget_bytes=4096).close()
    assert not made.locked
    assert not rings._page_locked_memories


def page_lock_all(workers, budget_bytes):
    """Ring whose slots were all received once, and its ``pinned_bytes`` after each slot."""
    made, held = Ring(workers=workers, slots_per_worker=2, budget_bytes=budget_bytes), []
    made.make_room(batch())
    slots = []
    for worker in range(workers):
        while (received := sent(made, worker, batch())) is not None:
            slots.append(made.receive(received)[1])
            made.page_lock()
            held.append(made.pinned_bytes)
    return made, held


def test_ring_says_how_many_bytes_are_page_locked(page_locks):
    made, held = page_lock_all(2, 1 << 20)
    assert held == [4096, 8192, 12288, 16384]
    assert held[-1] == sum(page_locks.locked.values())
    made.make_room({"images": torch.zeros(4000)})
    made.release_old_generations()
    assert made.pinned_bytes == 0
    made.close()


def test_refused_page_locks_are_warned_of_with_the_feed_bytes_that_can_be_locked(page_locks):
    page_locks.most = 12_288
    with pytest.warns(GpuAugWarning) as caught:
        made, held = page_lock_all(2, 1 << 20)
    (text,) = (str(warning.message) for warning in caught)
    assert text == (
        "Copies of batches make the training thread wait, because a slot of 0.0 MB could not be page-locked (CUDA error 2). "
        "Lower feed_bytes of the StreamedLoader to 12288, the bytes that could be page-locked."
    )
    assert held[-1] == 12_288
    assert len(held) == 4, "slots are used all the same"
    made.close()
    made, held = page_lock_all(2, 12_288)
    assert held[-1] == made.memory.newest_generation()[2] * len(held)
    made.close()


def test_page_locks_that_are_all_refused_are_warned_of_with_another_feed(page_locks):
    page_locks.most = 0
    with pytest.warns(GpuAugWarning) as caught:
        made, held = page_lock_all(2, 1 << 20)
    (text,) = (str(warning.message) for warning in caught)
    assert text.endswith(
        "because a slot of 0.0 MB could not be page-locked (CUDA error 2). Lower batch_size of the DataLoader, or pass "
        "feed='plain' to the StreamedLoader and pin_memory=True to the DataLoader."
    )
    assert set(held) == {0}
    made.close()


def registered(ring, event=None):
    """The ring after one of its slots has been page-locked and read."""
    ring.make_room(batch())
    slot = ring.receive(sent(ring, 0, batch()))[1]
    ring.page_lock()
    ring.free_after(slot, event or Event())
    return ring


@pytest.fixture(params=[RuntimeError, KeyboardInterrupt])
def error(request):
    """What a signal raises: that a ``DataLoader`` worker was killed, or an interrupt."""
    return request.param()


def test_slot_is_locked_once_however_many_batches_it_holds(page_locks, caplog):
    made, event = Ring(workers=1, slots_per_worker=1, budget_bytes=1 << 20), Event()
    event.passed = True
    for _ in range(3):
        registered(made, event).free_read_slots()
    assert len(page_locks.locked) == 1
    assert not caplog.records  # CUDA refuses memory that is locked already, which is warned about
    made.close()


def test_slots_are_unlocked_if_an_error_arrives_while_one_is_locked(page_locks, error):
    made = Ring(workers=1, slots_per_worker=2, budget_bytes=1 << 20)
    page_locks.interrupt = error
    with pytest.raises(type(error)):
        registered(made)
    assert page_locks.locked
    made.close()
    assert not page_locks.locked


@pytest.mark.parametrize("within", ["event", "call"])
def test_memory_stays_mapped_until_all_of_it_is_unlocked(page_locks, within, error):
    class Interrupted(Event):
        def synchronize(self):
            if not self.waited_for:
                self.waited_for = True
                raise error

    made = registered(Ring(workers=1, slots_per_worker=2, budget_bytes=1 << 20), Interrupted() if within == "event" else None)
    page_locks.interrupt = error if within == "call" else None
    with suppress(KeyboardInterrupt):
        made.close()
    memory = weakref.ref(made.memory)
    internals.copies(made).clear()
    if within == "event":
        assert page_locks.locked
    assert memory() is not None
    made.close()
    assert not page_locks.locked
    error.__traceback__ = None
    del made
    gc.collect()
    assert memory() is None


def test_slot_that_is_locked_after_close_is_unlocked_when_the_ring_goes(page_locks):
    made = Ring(workers=1, slots_per_worker=2, budget_bytes=1 << 20)
    made.close()
    registered(made)
    assert page_locks.locked
    internals.copies(made).clear()
    del made
    gc.collect()
    assert not page_locks.locked


def test_next_ring_unlocks_what_an_error_left_of_one_that_is_gone(page_locks):
    made = registered(Ring(workers=1, slots_per_worker=2, budget_bytes=1 << 20))
    page_locks.cudaHostUnregister = lambda address: 900  # a graph is being captured
    internals.copies(made).clear()
    del made
    gc.collect()
    assert page_locks.locked
    del page_locks.cudaHostUnregister
    Ring(workers=1, slots_per_worker=2, budget_bytes=1 << 20).close()
    assert not page_locks.locked


def test_older_slots_stay_until_they_are_unlocked(page_locks):
    made = registered(Ring(workers=1, slots_per_worker=2, budget_bytes=1 << 20))
    internals.copies(made).clear()
    made.make_room({"images": torch.zeros(4000)})
    page_locks.cudaHostUnregister = lambda address: 900
    made.release_old_generations()
    assert made.memory.generation(1)[2], "or new pages would lie where CUDA reads the old ones"
    del page_locks.cudaHostUnregister
    made.release_old_generations()
    assert not made.memory.generation(1)[2]
    made.close()


def test_slot_is_released_when_batch_cannot_be_described(ring, monkeypatch):
    ring.make_room(batch())
    monkeypatch.setattr(worker_module, "get_worker_info", lambda: SimpleNamespace(id=0))

    def refuse(value, allocate):
        raise ArgumentTypeError("a batch must be of containers that can be rebuilt, got another. Use a dict.")

    monkeypatch.setattr(ring_memory, "pack_targets", refuse)
    first = SlotCollate(default_collate, ring.memory)([torch.ones(3), torch.ones(3)])
    again = SlotCollate(default_collate, ring.memory)([torch.zeros(3), torch.zeros(3)])
    assert torch.equal(first, torch.ones(2, 3))
    assert torch.equal(again, torch.zeros(2, 3))
    assert sum(ring.memory.take_slot(0) is not None for _ in range(3)) == 2
