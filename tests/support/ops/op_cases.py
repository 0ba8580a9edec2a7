"""The case of each lowered class of Kornia's, which feeds the tables of the tests of ops."""

from support.ops.cases import channel, color, color_jitter, filters, geometry, mix, positional
from support.ops.op_case import MEAN, STD, Case

__all__ = ["CASES", "MEAN", "MIXES", "STD", "Case", "table"]

MIXES = mix.CASES


def by_name(pairs):
    """A dict of pairs whose names differ."""
    found = {}
    for name, value in pairs:
        assert name not in found, f"{name} is there twice"
        found[name] = value
    return found


FAMILIES = (geometry, color, channel, positional, color_jitter, filters, mix)

CASES = by_name((case.kind, case) for family in FAMILIES for case in family.CASES)
"""The case of each class."""


def table(settings_of):
    """(case, settings) by name, of what ``settings_of`` returns for each case."""
    return by_name((name, (case, settings)) for case in CASES.values() for name, settings in settings_of(case).items())
