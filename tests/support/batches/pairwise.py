"""Fewer combinations than a full product, in which every two values still meet."""

import itertools

import pytest


def pairwise(combinations):
    """Combinations, in order, until every pair of values that meets in ``combinations`` (tuples) has met."""
    pairs = [
        (combination, {(i, one, j, other) for (i, one), (j, other) in itertools.combinations(enumerate(combination), 2)})
        for combination in combinations
    ]
    missing = set().union(*(met for _, met in pairs))
    while missing:
        combination, met = max(pairs, key=lambda pair: len(pair[1] & missing))
        missing -= met
        yield combination


def sweep(*values):
    """Parameters of a test: combinations in which every two values meet, of two lists each value once; the rest is slow."""
    product = list(itertools.product(*values))
    if len(values) == 2:
        longest = max(map(len, values))
        chosen = {tuple(each[number % len(each)] for each in map(list, values)) for number in range(longest)}
    else:
        chosen = set(pairwise(product))
    return [pytest.param(*each, marks=() if each in chosen else pytest.mark.slow) for each in product]
