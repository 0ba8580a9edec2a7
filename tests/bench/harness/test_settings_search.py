"""The best of a row's settings."""

import pytest

from bench.harness.settings_search import max_trials, rank_settings

AXES = [[{"a": 1}, {"a": 2}, {"a": 3}], [{"b": 1, "c": 0}, {"b": 2, "c": 5}], [{"d": 1}]]


def test_axes_are_searched_one_after_another():
    tried = []

    def rate(settings):
        tried.append(dict(settings))
        return settings["a"] * (10 if settings["b"] == 2 else 1)

    assert rank_settings(AXES, rate)[:2] == [{"a": 3, "b": 2, "c": 5, "d": 1}, {"a": 3, "b": 1, "c": 0, "d": 1}]
    assert tried == [
        {"a": 1, "b": 1, "c": 0, "d": 1},
        {"a": 2, "b": 1, "c": 0, "d": 1},
        {"a": 3, "b": 1, "c": 0, "d": 1},
        {"a": 3, "b": 2, "c": 5, "d": 1},
    ]
    assert max_trials(AXES) == len(tried)
    assert max_trials([[{"a": 1}], [{"b": 2}]]) == 0


def test_without_a_choice_there_is_no_measurement():
    assert rank_settings([[{"a": 1}], [{"b": 2}]], lambda _: pytest.fail("measured")) == [{"a": 1, "b": 2}]


def test_settings_that_raise_are_left_out():
    def rate(settings):
        if settings["a"] != 2:
            raise ZeroDivisionError(f"with {settings['a']}")
        return 1.0

    assert rank_settings([[{"a": 1}, {"a": 2}, {"a": 3}], [{"b": 1}]], rate) == [{"a": 2, "b": 1}]
    with pytest.raises(ZeroDivisionError, match="with 1"):
        rank_settings([[{"a": 1}, {"a": 3}]], rate)
