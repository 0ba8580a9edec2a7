"""Every loop over three batches and three lanes: exhausted with ``-m slow``, else each pair of choices for two batches.

What the device may do needs no enumeration: the checker orders by happens-before, so one history stands for all speeds of its
lanes. What is left are the choices of the host. Of each of three batches: on which of two streams it is taken and read, and
whether it is dropped at once, kept, dropped with those that were kept, or the loop is left; and besides the depth and whether a
batch is there when it is asked for.
"""

import itertools
import sys

import pytest
from protocol import test_order as broken
from protocol.scenarios import Scenario, Step, run

BATCHES = 3
THERE, NOT_THERE = ((True,),), ((False,),)
"""Whether a batch is there when it is asked for. test_order.py has slow and unsteady loaders in its scenarios."""
TURNS = [
    Step(stream=stream, **what)
    for stream in (0, 1)
    for what in ({}, {"keep": True}, {"forget": True}, {"leave": True}, {"keep": True, "leave": True})
]
AFTER = (Step(forget=True), *[Step()] * BATCHES)
"""The end of the loop and another: what a broken order damages shows when memory is used again."""


EVERY_LOOP = list(itertools.product(TURNS, repeat=BATCHES))
EVERY_PAIR = [
    (first, second, TURNS[(TURNS.index(first) + TURNS.index(second)) % len(TURNS)])
    for first, second in itertools.product(TURNS, repeat=2)
]
"""A tenth of all loops, a Latin square: each pair of choices for each two of the batches. All broken orders fail in it."""


def loops(depths, arrivals, choices):
    for depth, there, turns in itertools.product(depths, arrivals, choices):
        yield Scenario(steps=(*turns, *AFTER), depth=depth, batches=BATCHES, there=there)


@pytest.mark.parametrize(
    ("depths", "arrivals", "choices"),
    [
        pytest.param((2,), THERE, EVERY_PAIR, id="two ahead, every pair"),
        pytest.param((2,), THERE, EVERY_LOOP, id="two ahead", marks=pytest.mark.slow),
        pytest.param((2,), NOT_THERE, EVERY_LOOP, id="two ahead, of a slow loader", marks=pytest.mark.slow),
        pytest.param((0, 1, 3), THERE + NOT_THERE, EVERY_LOOP, id="other depths", marks=pytest.mark.slow),
    ],
)
def test_every_loop_over_three_batches_is_ordered(depths, arrivals, choices, capsys):
    scenarios = list(loops(depths, arrivals, choices))
    for scenario in scenarios:
        history, _ = run(scenario)
        assert not history.violations, f"{scenario}\n{history.report()}"
    assert len(set(scenarios)) == len(depths) * len(arrivals) * len(choices)
    with capsys.disabled():
        sys.stdout.write(f" {len(scenarios)} loops over {BATCHES} batches and 3 lanes, {len(TURNS)} choices for each batch ")


@pytest.mark.parametrize(
    "mutate",
    [
        broken.no_consumer_wait,
        broken.consumer_of_the_first_batch,
        broken.no_reverse_wait,
        broken.reverse_wait_on_another_lane,
        broken.reverse_wait_for_another_stream,
        broken.reverse_wait_for_the_last_consumer_alone,
        broken.reverse_wait_for_the_step_before,
        broken.record_on_the_producer,
        broken.wait_for_the_tail,
        broken.one_event_recorded_again,
        broken.wait_when_launched,
        broken.mark_before_the_last_write,
        broken.labels_on_a_stream_of_their_own,
        broken.labels_copied_after_the_mark,
        broken.no_wait_between_lanes,
        broken.intermediates_not_kept,
        broken.intermediates_dropped_without_waiting,
        broken.intermediates_dropped_before_waiting_on_the_stage,
    ],
)
def test_every_broken_order_fails_in_some_loop(mutate):
    assert any(run(scenario, mutate)[0].violations for scenario in loops((2,), THERE, EVERY_PAIR))
