"""Fewer combinations than a full product, in which every two values still meet."""

import itertools


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
