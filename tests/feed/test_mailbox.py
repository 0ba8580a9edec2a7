"""The queue between the feed's thread and the training thread: when the thread waits before it pulls."""

from types import SimpleNamespace

import pytest

from gpuaug.feed import mailbox
from gpuaug.feed.mailbox import MOST_PAUSE_S, PAUSE, Mailbox, Pulled


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


def filled(box):
    for _ in range(mailbox.QUEUED):
        assert box.wait_for_place(0.0)
        box.put(Pulled())
    return box


def test_thread_pauses_for_a_share_of_the_step_while_a_batch_is_ready(pauses):
    box = filled(Mailbox())
    assert not pauses, "no step has been seen"
    step(box, pauses, 0.02)
    assert box.wait_for_place(0.001)
    assert pauses == [pytest.approx(PAUSE * 0.02 - 0.001)]


def test_pause_of_a_long_step_is_bounded(pauses):
    box = filled(Mailbox())
    step(box, pauses, 3.0)
    box.wait_for_place(0.0)
    assert pauses == [MOST_PAUSE_S]


@pytest.mark.parametrize("pull_s", [0.01, 0.5])
def test_thread_does_not_pause_when_pulling_takes_long(pauses, pull_s):
    box = filled(Mailbox())
    step(box, pauses, 0.02)
    box.wait_for_place(pull_s)
    assert not pauses


def test_thread_does_not_pause_when_no_batch_is_ready(pauses):
    box = filled(Mailbox())
    for _ in range(mailbox.QUEUED):
        step(box, pauses, 0.02)
    box.wait_for_place(0.0)
    assert not pauses
