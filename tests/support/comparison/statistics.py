"""Whether two samples are of one distribution.

Samples of one distribution fail a single comparison once in a million times (``ALPHA``). A result over 1 is a failure.
"""

import itertools

import numpy as np
from scipy.special import chdtri, ndtri

ALPHA = 1e-6
FEW = 64
"""Parameters of so few values are compared by their frequencies too."""


def distance(one, other):
    """How far two samples' distribution functions are apart at most, by Kolmogorov and Smirnov, over what ALPHA allows."""
    values = np.concatenate((one, other))
    if values.dtype.kind not in "iu" or np.ptp(values) > 8 * len(values):
        values = ranks(values)
    values = values - values.min()  # few enough to count each of them, which takes a tenth of the time of sorting
    samples = values[: len(one)], values[len(one) :]
    below = [np.bincount(sample, minlength=values.max() + 1).cumsum() / len(sample) for sample in samples]
    allowed = np.sqrt(-np.log(ALPHA / 2) / 2 * (1 / len(one) + 1 / len(other)))
    return np.abs(below[0] - below[1]).max() / allowed


def frequencies_apart(one, other):
    """Chi-squared of two samples' frequencies, over what ALPHA allows; rare values are counted together."""
    values, index = np.unique(np.concatenate((one, other)), return_inverse=True)
    counts = np.stack([np.bincount(part, minlength=len(values)) for part in np.split(index, [len(one)])])
    rare = counts.sum(0) < 40
    counts = np.concatenate((counts[:, ~rare], counts[:, rare].sum(1, keepdims=True)), 1)
    counts = counts[:, counts.sum(0) > 0]
    if counts.shape[1] < 2:
        return 0.0
    weight = np.sqrt(len(other) / len(one))
    chi_squared = ((counts[0] * weight - counts[1] / weight) ** 2 / counts.sum(0)).sum()
    return chi_squared / chdtri(counts.shape[1] - 1, ALPHA)


def apart(one, other):
    """Over 1: two samples are of different distributions."""
    few = len(np.unique(np.concatenate((one, other)))) <= FEW
    return max(frequencies_apart(one, other) if few else 0.0, distance(one, other))


def ranks(values):
    """How many of the values are smaller than each."""
    return np.searchsorted(np.sort(values), values).astype(np.int32)


def together_apart(one, other):
    """Over 1: some columns do not hang together in one sample as they do in the other; both are {name: (N,)}.

    Two columns' ranks among all values of both samples are added and subtracted, and what comes out is compared: under one
    joint distribution it has one distribution, too.
    """
    count = len(next(iter(one.values())))
    both = {name: ranks(np.concatenate((one[name], other[name]))) for name in one}
    pairs = itertools.combinations(both.values(), 2)
    return max(distance(mixed[:count], mixed[count:]) for x, y in pairs for mixed in (x + y, x - y))


def related(one, other):
    """The rank correlation of two columns of one sample, over what ALPHA allows for independent ones."""
    return abs(np.corrcoef(ranks(one), ranks(other))[0, 1]) * np.sqrt(len(one)) / -ndtri(ALPHA / 2)
