"""Labels and draws of a sample in words."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_CONSTANT = ("Normalize", "Denormalize", "CenterCrop", "PadTo", "Resize")
"""Modules without random draws, which captions leave out."""

_LEAST_SHARE = 0.005
"""Smallest share of a mixed label at which a class is named."""

_PAIRS = (("shift", "shift", 0.0), ("translate", "shift", 0.0), ("shear", "shear", 0.0), ("scale", "scale", 1.0))
_RECTANGLES = (("width", "height", "x", "y"), ("widths", "heights", "xs", "ys"), ("sides_x", "sides_y", "start_x", "start_y"))
_NEUTRAL = {"additions": 0.0, "gain": 1.0}


def drawn(draws: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A line for each module that drew something for the sample; modules in ``_CONSTANT`` are left out."""
    lines = [_line(_kind(name), dict(numbers)) for name, numbers in draws.items() if _kind(name) not in _CONSTANT]
    return lines or ["as it was"]


Label = tuple[tuple[str, str], ...]
"""(class name, text after it) for each class of a label."""


def label(value: Tensor, name: Callable[[Any], str], *, mixed: bool, rest: bool) -> Label:
    """One sample's label: its class, or the two classes with the largest shares and these shares.

    Args:
        value: A class; or (classes,) shares; or, where it is ``mixed``, (3,): own class, partner's class, lambda.
        name: Gives a class its name.
        mixed: Whether ``value`` is Kornia's label of mixed images.
        rest: Whether Kornia's lambda is the sample's own share, and not its partner's.
    """
    if value.ndim == 0:
        return ((name(value.item()), ""),)
    if mixed:
        own, partner, share = value.tolist()
        share = share if rest else 1 - share
        shares = {own: share, partner: 1 - share} if own != partner else {own: 1.0}
    else:
        best = value.float().topk(min(2, len(value)))
        shares = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    told = sorted(((share, index) for index, share in shares.items() if share >= _LEAST_SHARE), reverse=True)
    if len(told) == 1 and told[0][0] > 1 - _LEAST_SHARE:
        return ((name(told[0][1]), ""),)
    return tuple((name(index), f" {share:.0%}") for share, index in told)


def namer(classes: Sequence[Any] | None, nameless: str = "{}") -> Callable[[Any], str]:
    """A function from a class to its name: its entry in ``classes``, else its number formatted by ``nameless``. Text stays."""
    if not isinstance(classes, list | tuple):
        classes = ()

    def say(value: Any) -> str:
        if isinstance(value, str):
            return value
        known = math.isfinite(value) and value == int(value) and 0 <= value < len(classes)
        return str(classes[int(value)]) if known else nameless.format(f"{value:g}")

    return say


def is_labels(value: Any, count: int) -> bool:
    """Whether a member of a batch looks like a class, or shares of classes, for each of ``count`` samples."""
    if not isinstance(value, Tensor) or not value.ndim or len(value) != count:
        return False
    if value.ndim == 1:
        return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool
    shares = value.ndim == 2 and value.shape[1] > 1 and value.is_floating_point()
    return shares and bool((value >= 0).all()) and bool(((value.float().sum(1) - 1).abs() < 0.02).all())


def is_words(value: Any, count: int) -> bool:
    """Whether a value is a list of strings whose length is a multiple of ``count`` samples."""
    words = isinstance(value, list | tuple) and len(value) > 0 and len(value) % count == 0
    return words and all(isinstance(each, str) for each in value)


def _kind(name: str) -> str:
    """A module's name without its path, its number, ``Random`` and ``V2``."""
    bare = re.sub(r"(_\d+)?( \(\d+\))?$", "", name.rsplit("/", 1)[-1])
    return bare.removeprefix("Random").removesuffix("V2")


def _line(kind: str, numbers: dict[str, float]) -> str:
    parts = []
    for names in _RECTANGLES:
        if all(name in numbers for name in names):
            wide, high, left, top = (round(numbers.pop(name)) for name in names)
            parts.append(f"{wide}x{high} at {left}, {top}")
    if "x" in numbers and "y" in numbers:
        parts.append(f"at {round(numbers.pop('x'))}, {round(numbers.pop('y'))}")
    if "times" in numbers:
        parts.append(f"{round(numbers.pop('times')) % 4 * 90}°")
    parts += [f"{numbers.pop(name):.1f}°" for name in ("degrees", "angle") if name in numbers]
    for stem, said, neutral in _PAIRS:
        x, y = (numbers.pop(f"{stem}_{axis}", neutral) for axis in "xy")
        if (x, y) != (neutral, neutral):
            parts.append(f"{said} {_said(x)}" if stem == "scale" and x == y else f"{said} {_said(x)}, {_said(y)}")
    channels = [str(round(numbers.pop(name))) for name in list(numbers) if name.startswith(("channels_", "channel_idx_"))]
    parts += [" ".join(channels)] if channels else []
    if "lambda" in numbers:
        parts.append(_said(numbers.pop("lambda")))
    if "partner" in numbers:
        parts.append(f"of sample {round(numbers.pop('partner'))}")
    for name, value in numbers.items():
        if "end_points" in name:
            continue  # four corners: the picture shows them
        stem = name.removesuffix("_factor")
        if value != _NEUTRAL.get(stem):
            parts.append(_said(value) if stem == kind.lower() else f"{stem} {_said(value)}")
    return " ".join([kind, ", ".join(parts)]).strip().replace(", of sample", " of sample")


def _said(value: float) -> str:
    """A number with two decimals; integers without, and one significant digit below 0.01."""
    if value == round(value):
        return f"{value:.0f}"
    return f"{value:.1g}" if abs(value) < 0.01 else f"{value:.2f}"
