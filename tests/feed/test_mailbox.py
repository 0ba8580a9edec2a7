"""The queue between the feed's thread and the training thread: when the thread waits before it pulls."""

from types import SimpleNamespace

import pytest

from gpuaug.feed import mailbox
from gpuaug.feed.mailbox import MAX_PAUSE_S, PAUSE, Mailbox, Pulled


@pytest.fixture
def pauses(monkeypatch):
    """Seconds of every pause, on a clock that the test turns: ``pauses.now_s``."""

    class Pauses(list):
        now_s = 100.0

    made = Pauses()
    monkeypatch.setattr(mailbox, "time", SimpleNamespace(perf_counter=lambda: made.now_s, sleep=made.append))
    return made


def step(box, pauses, seconds):
    """A training step: takes a batch and lets the thread pull the next."""
    assert box.take(block=False) is not None
    pauses.now_s += seconds
    box.refill()


def running(pauses, seconds):
    """A full mailbox after one step of so many seconds."""
    box = Mailbox()
    for _ in range(mailbox.QUEUED):
        assert box.wait_for_permit(0.0)
        box.put(Pulled())
    step(box, pauses, seconds)
    assert box.wait_for_permit(0.0)
    box.put(Pulled())
    return box


def test_thread_pauses_for_a_share_of_the_step_while_a_batch_is_ready(pauses):
    box = running(pauses, 0.02)
    assert not pauses, "no two steps have been seen"
    step(box, pauses, 0.02)
    assert box.wait_for_permit(0.001)
    assert pauses == [pytest.approx(PAUSE * 0.02 - 0.001)]


def test_pause_of_long_steps_is_bounded(pauses):
    box = running(pauses, 3.0)
    step(box, pauses, 3.0)
    box.wait_for_permit(0.0)
    assert pauses == [MAX_PAUSE_S]


@pytest.mark.parametrize("seconds", [(3.0,), (3.0, 0.02)])
def test_one_long_step_does_not_lengthen_the_pause(pauses, seconds):
    """The thread would still wait when short steps have taken the batches that were ready."""
    box = running(pauses, 0.02)
    for each in seconds:
        step(box, pauses, each)
        pauses.clear()
        box.wait_for_permit(0.0)
        box.put(Pulled())
    assert pauses == [pytest.approx(PAUSE * 0.02)]


@pytest.mark.parametrize("pull_s", [0.01, 0.5])
def test_thread_does_not_pause_when_pulling_takes_long(pauses, pull_s):
    box = running(pauses, 0.02)
    step(box, pauses, 0.02)
    box.wait_for_permit(pull_s)
    assert not pauses


def test_thread_does_not_pause_when_no_batch_is_ready(pauses):
    box = running(pauses, 0.02)
    for _ in range(mailbox.QUEUED):
        step(box, pauses, 0.02)
    box.wait_for_permit(0.0)
    assert not pauses
