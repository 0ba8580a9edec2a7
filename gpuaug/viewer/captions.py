"""Text about a sample: its label and its *draws* (the random parameters of its augmentation)."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpuaug.stages.encoders import is_dense

_WITHOUT_DRAWS = ("Normalize", "Denormalize", "CenterCrop", "PadTo", "Resize")
"""Names of modules without random parameters, which captions omit."""

_MIN_SHARE = 0.005
"""Smallest probability of a class in a mixed label at which the class is shown."""

_PAIRS = (("shift", "shift", 0.0), ("translate", "shift", 0.0), ("shear", "shear", 0.0), ("scale", "scale", 1.0))
"""(name of a parameter without ``_x`` or ``_y``, word in a caption, value without effect)."""

_RECTANGLES = (("width", "height", "x", "y"), ("widths", "heights", "xs", "ys"), ("sides_x", "sides_y", "start_x", "start_y"))
"""Names of the parameters of rectangles: width, height, left and top."""

_NEUTRAL = {"additions": 0.0, "gain": 1.0}
"""Parameter → value without effect. Captions omit a parameter with this value."""


def draw_lines(draws: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return one line per module that was applied to the sample, without the modules of ``_WITHOUT_DRAWS``.

    A sample that no other module has changed gets the line ``unchanged``.

    ``draws``: module name → name of a random parameter → value (``Draws.of``).
    """
    modules = ((_short_name(name), dict(numbers)) for name, numbers in draws.items())
    lines = [_module_text(module, numbers) for module, numbers in modules if module not in _WITHOUT_DRAWS]
    return lines or ["unchanged"]


Label = tuple[tuple[str, str], ...]
"""(class name, text that follows the name) for each class of a label."""


def label(value: Tensor, name_of: Callable[[Any], str], *, mixed: bool, lam_is_sample: bool) -> Label:
    """Return the label of one sample: its class, or the two classes of largest probability with their probabilities.

    Args:
        value: A class index; (classes,) probabilities; or, if ``mixed``, (3,): class of the sample, class of the sample that
            was mixed into it (its partner), lambda.
        name_of: Function that returns the name of a class.
        mixed: Whether ``value`` is Kornia's label of a mixed image.
        lam_is_sample: Whether Kornia's lambda is the weight of the sample, not the weight of its partner.
    """
    if value.ndim == 0:
        return ((name_of(value.item()), ""),)
    if mixed:
        sample_class, partner, share = value.tolist()
        share = share if lam_is_sample else 1 - share
        shares = {sample_class: share, partner: 1 - share} if sample_class != partner else {sample_class: 1.0}
    else:
        top = value.float().topk(min(2, len(value)))
        shares = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    largest = sorted(((share, index) for index, share in shares.items() if share >= _MIN_SHARE), reverse=True)
    if len(largest) == 1 and largest[0][0] > 1 - _MIN_SHARE:
        return ((name_of(largest[0][1]), ""),)
    return tuple((name_of(index), f" {share:.0%}") for share, index in largest)


def class_namer(classes: Sequence[Any] | None, unnamed_format: str = "{}") -> Callable[[Any], str]:
    """Return a function from a class index to a name: its entry in ``classes``, or without an entry the formatted index.

    The returned function returns strings unchanged.

    Args:
        classes: Names of the classes, or ``None``. The attribute ``classes`` of a dataset may also be something else, which is
            ignored.
        unnamed_format: Format string of an index without an entry.
    """
    if not isinstance(classes, list | tuple):
        classes = ()

    def name(value: Any) -> str:
        if isinstance(value, str):
            return value
        has_name = math.isfinite(value) and value == int(value) and 0 <= value < len(classes)
        return str(classes[int(value)]) if has_name else unnamed_format.format(f"{value:g}")

    return name


def is_labels(value: Any, count: int) -> bool:
    """Return whether ``value`` may be the labels of a batch: (count,) class indices or (count, classes) probabilities."""
    if not isinstance(value, Tensor) or not is_dense(value) or not value.ndim or len(value) != count:
        return False
    if value.ndim == 1:
        return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool
    has_classes = value.ndim == 2 and value.shape[1] > 1 and value.is_floating_point()
    return has_classes and bool((value >= 0).all()) and bool(((value.float().sum(1) - 1).abs() < 0.02).all())


def are_class_names(value: Any, count: int) -> bool:
    """Return whether ``value`` is a list or tuple of strings, with a multiple of ``count`` items: one or more per sample."""
    has_length = isinstance(value, list | tuple) and len(value) > 0 and len(value) % count == 0
    return has_length and all(isinstance(item, str) for item in value)


def _short_name(name: str) -> str:
    """Return the name of a module without its path, ``Random``, ``V2``, its index (``_3``) and its repetition (`` (2)``)."""
    return re.sub(r"(_\d+)?( \(\d+\))?$", "", name.rsplit("/", 1)[-1]).removeprefix("Random").removesuffix("V2")


def _module_text(module: str, numbers: dict[str, float]) -> str:
    """Return the text about one module: its short name ``module``, then its random parameters. Removes items of ``numbers``."""
    parts = []
    for names in _RECTANGLES:
        if all(name in numbers for name in names):
            wide, high, left, top = (round(numbers.pop(name)) for name in names)
            parts.append(f"{wide}x{high} at {left}, {top}")
    if "x" in numbers and "y" in numbers:
        parts.append(f"at {round(numbers.pop('x'))}, {round(numbers.pop('y'))}")
    if "times" in numbers:  # quarter turns
        parts.append(f"{round(numbers.pop('times')) % 4 * 90}°")
    parts += [f"{numbers.pop(name):.1f}°" for name in ("degrees", "angle") if name in numbers]
    for stem, word, neutral in _PAIRS:
        x, y = (numbers.pop(f"{stem}_{axis}", neutral) for axis in "xy")
        if (x, y) != (neutral, neutral):
            equal = stem == "scale" and x == y
            parts.append(f"{word} {_formatted(x)}" if equal else f"{word} {_formatted(x)}, {_formatted(y)}")
    # The order in which channels are permuted.
    channels = [str(round(numbers.pop(name))) for name in list(numbers) if name.startswith(("channels_", "channel_idx_"))]
    parts += [" ".join(channels)] if channels else []
    if "lambda" in numbers:
        parts.append(_formatted(numbers.pop("lambda")))
    if "partner" in numbers:
        parts.append(f"of sample {round(numbers.pop('partner'))}")
    for name, value in numbers.items():
        if "end_points" in name:
            continue  # four corners, which are visible in the picture
        stem = name.removesuffix("_factor")
        if value != _NEUTRAL.get(stem):
            parts.append(_formatted(value) if stem == module.lower() else f"{stem} {_formatted(value)}")
    # "0.40 of sample 3": no comma between lambda and partner
    return " ".join([module, ", ".join(parts)]).strip().replace(", of sample", " of sample")


def _formatted(value: float) -> str:
    """Format a number with two decimals; an integer without decimals; below 0.01 with one significant digit."""
    if value == round(value):
        return f"{value:.0f}"
    return f"{value:.1g}" if abs(value) < 0.01 else f"{value:.2f}"
