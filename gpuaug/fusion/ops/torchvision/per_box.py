"""Keys of target dicts, the annotations of one image each, that hold one entry per box."""

from collections.abc import Iterable
from typing import Any

from gpuaug.core.errors import warn


def label_key(names: Iterable[Any]) -> str | None:
    """Return the key of the labels among the keys of target dicts, by the rule of torchvision's ``SanitizeBoundingBoxes``.

    It is the first key that is ``labels`` in lower case, otherwise the first key that contains ``label``; ``None`` without one.
    """
    texts = {name: name.lower() for name in names if isinstance(name, str)}
    exact = (name for name, text in texts.items() if text == "labels")
    return next(exact, next((name for name, text in texts.items() if "label" in text), None))


def check_labels_getter(name: str, getter: Any) -> None:
    """Warn that ``gpuaug.sanitize`` does not call the ``labels_getter`` of a ``SanitizeBoundingBoxes``."""
    if callable(getter):
        warn(
            f"labels_getter of {name} is not used, because gpuaug.sanitize removes entries by their keys. Leave labels_getter "
            "out. If the key of the labels does not contain 'label', pass all keys with one entry per box: "
            "gpuaug.sanitize(targets, per_box=['boxes', 'masks', …])."
        )
