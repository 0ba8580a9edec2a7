"""Keys of target dicts, the annotations of one image each, that hold one entry per box."""

import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from gpuaug.core.errors import GpuAugWarning

PER_BOX = frozenset(
    {
        *("boxes", "bbox", "valid", "labels", "class_labels", "classes", "names", "masks", "keypoints", "segmentation"),
        *("area", "areas", "iscrowd", "is_crowd", "scores", "weights", "visibility", "difficult", "truncated", "occluded"),
        *("id", "ids", "category_id", "category_ids", "annotation_id", "annotation_ids", "track_id", "track_ids"),
    }
)
"""Keys that hold one entry per box.

The keys are listed because lengths are ambiguous: in an image with two boxes, ``size`` (height, width) has one entry per box.
"""


def label_key(names: Iterable[Any]) -> str | None:
    """Return the key of the labels among the keys of target dicts, by the rule of torchvision's ``SanitizeBoundingBoxes``.

    It is the first key that is ``labels`` in lower case, otherwise the first key that contains ``label``; ``None`` without one.
    """
    first: str | None = None
    for name in names:
        text = name.lower() if isinstance(name, str) else ""
        if text == "labels":
            return str(name)
        if first is None and "label" in text:
            first = str(name)
    return first


class _Key(str):
    """Key that a ``labels_getter`` reads."""


class _Keys(dict[Any, Any]):
    """Target dict for a ``labels_getter``: the value of every key is the key."""

    def __missing__(self, key: Any) -> Any:
        return _Key(key)

    def get(self, key: Any, default: Any = None) -> Any:
        return _Key(key)


def check_labels_getter(name: str, getter: Any) -> None:
    """Warn if ``gpuaug.sanitize`` keeps the labels that the ``labels_getter`` of a ``SanitizeBoundingBoxes`` returns."""
    if not callable(getter):
        return
    keys: Any = ()
    for sample in ((None, _Keys()), _Keys()):
        with suppress(Exception):  # a function of the user, for samples of another form
            keys = getter(sample)
            break
    keys = keys if isinstance(keys, tuple) else (keys,)
    if keys and all(isinstance(key, _Key) and (key in PER_BOX or label_key([key])) for key in keys):
        return
    keys = ", ".join(repr(str(key)) for key in keys if isinstance(key, _Key)) or "the key of the labels"
    warnings.warn(
        f"labels_getter of {name} is not used, because gpuaug.sanitize removes entries by their keys. Leave labels_getter out, "
        f"and pass all keys with one entry per box: gpuaug.sanitize(targets, per_box=['boxes', 'masks', {keys}]).",
        GpuAugWarning,
        stacklevel=2,
    )
