"""Strategies for the settings of one module, and what is known of its result: the building blocks of random pipelines."""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

ROUNDING = 2e-6
"""What an op on single pixels may be off by, in image units."""

INTERPOLATING = 5e-5
"""What an interpolation may be off by at these sizes."""


@dataclass(frozen=True)
class Step:
    """A module to be made, and what it does to an error and to the range of the values."""

    kind: type
    options: dict[str, Any]
    own: float = 0.0
    """What it adds to an error, for values in [0, 1]."""
    gain: float = 1.0
    """The largest ``|d output / d input|``: a bound found by hand, rounded up."""
    reach: float | None = 1.0
    """The largest value that may come out; ``None``: as large as those that went in."""
    jumps: bool = False
    """Whether values a little apart may come out far apart."""
    spreads: bool = False
    """Whether one wrong value may make others wrong."""
    of_exact: bool = False
    """True if the op depends on statistics of a whole channel (histogram, minimum): it is left out behind an inexact op."""
    rgb: bool = False

    def make(self):
        return self.kind(**self.options)

    def __repr__(self):
        return f"K.{self.kind.__name__}({', '.join(f'{key}={value!r}' for key, value in self.options.items())})"


COMMON = {"p": st.sampled_from([0.0, 0.5, 1.0]), "same_on_batch": st.booleans()}

ALWAYS = {"p": st.sampled_from([1.0, 1.0, 1.0, 0.0]), "same_on_batch": st.booleans()}
"""For ops that change the size: by chance they would change it in one set of draws and not in another."""

SURE = {"p": ALWAYS["p"]}
SIDES = st.tuples(st.integers(1, 16), st.integers(1, 16))
FILTERS = st.sampled_from(["bilinear", "nearest"])
MOVES = {"reach": None}


def numbers(low, high):
    return st.integers(round(low * 100), round(high * 100)).map(lambda number: number / 100)


def ranges(low, high):
    return st.tuples(numbers(low, high), numbers(low, high)).map(sorted).map(tuple)


def steps(fixed=None, common=COMMON, **options):
    """Function that makes the strategy of a class's steps.

    Args:
        fixed: What :class:`Step` says of them, or a function of the drawn settings that returns it.
        common: Strategies of settings that most classes have.
        **options: Strategies of its own settings.
    """

    def of(kind):
        def made(drawn):
            return Step(kind, drawn, **(fixed(drawn) if callable(fixed) else fixed or {}))

        return st.fixed_dictionaries({**common, **options}).map(made)

    return of


def either(*alternatives):
    """Steps of one of several :func:`steps`."""
    return lambda kind: st.one_of(*(of(kind) for of in alternatives))


def padded(mode, fill, common, size=SIDES, **options):
    """Steps that pad. Kornia takes a fill for the constant mode alone."""
    constant = {mode: st.just("constant"), fill: st.sampled_from([0.5, 0.25])}
    edges = {mode: st.sampled_from(["reflect", "replicate"])}
    return either(*(steps(MOVES, common, size=size, **options, **padding) for padding in (constant, edges)))


def warped(drawn):
    """What is known of a step that interpolates."""
    nearest = drawn.get("resample") == "nearest"
    return {"own": 0.0 if nearest else INTERPOLATING, "reach": None, "jumps": nearest, "spreads": not nearest}
