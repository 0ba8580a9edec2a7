"""Concatenation of several views of a batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.targets.masks import like
from gpuaug.fusion.targets.typed import joined_views


def joined(views: Sequence[Any], keys: Sequence[str], *, cut: bool) -> Any:
    """What became of each view, behind one another: images, or a list of all that went in; ``cut``: labels along axis 1.

    Raises:
        ArgumentError: If views differ in size, by the modules that were picked for each.
    """
    images = views if len(keys) == 1 else [view[keys.index("input")] for view in views]
    sizes = list(dict.fromkeys("{}x{}".format(*each.shape[-2:]) for each in images))
    if len(sizes) > 1:
        raise ArgumentError(
            f"pipeline must give all views one size, got {' and '.join(sizes)}. Have every module that may be picked give one "
            "size, or resize behind them."
        )
    if len(keys) == 1:
        return like(torch.cat(tuple(views)), views[0])
    made: list[Any] = []
    for key, each in zip(keys, zip(*views, strict=True), strict=True):
        if key == "tv_tensors":
            made.append(joined_views(each, len(images[0])))
        elif isinstance(each[0], Tensor):
            made.append(like(torch.cat(each, 1 if cut and key == "class" else 0), each[0]))
        else:
            made.append(type(each[0])(one for view in each for one in view))
    return made
