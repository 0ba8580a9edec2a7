"""Copy of a pipeline with the settings that it has when it is fused, from which it is lowered for every type of images.

In a file of its own, because it depends on both libraries' lists of classes. A pipeline is lowered for a type of images at the
first batch of this type, and again when it is unpickled: from the user's modules, later changes would apply to some types only.
"""

import copy
import sys
from typing import Any

from torch import nn

from gpuaug.core.torchvision_types import all_parts, class_of, difference, is_sequence, is_unmodified_sequential, library_class
from gpuaug.fusion.lower.tree import lowered
from gpuaug.fusion.ops.kornia_private import state_of_last_call
from gpuaug.fusion.policies.auto_augment import POLICIES


def snapshot(pipeline: Any) -> Any:
    """Return a copy of a pipeline, with copies of the modules that belong to Kornia or torchvision.

    Modules and functions of the user are not copied, because they are called as they are. Nor are Kornia's policies, whose
    magnitude is read for every batch, and modules that ``copy.deepcopy`` cannot copy.
    """
    parts = list(all_parts(pipeline))
    shared: dict[int, Any] = {}
    """Objects that are not copied, by ``id``: the argument ``memo`` of ``copy.deepcopy``."""
    for part in parts:
        if id(part) not in shared and _is_called_as_it_is(part):
            shared |= {id(child): child for child in all_parts(part)}
        shared |= {id(state): state for state in state_of_last_call(part)}
    try:
        return copy.deepcopy(pipeline, dict(shared))
    except Exception:  # a module may raise any error
        for part in reversed(parts):
            try:
                copy.deepcopy(part, dict(shared))
            except Exception:
                shared[id(part)] = part
        return copy.deepcopy(pipeline, shared)


def _is_called_as_it_is(part: Any) -> bool:
    """Return whether a module is the user's, or calls a function of the user, or is one of Kornia's policies."""
    if is_sequence(part) or type(part) is nn.ModuleList or is_unmodified_sequential(part):
        return False
    class_ = library_class(part)
    if class_ is not None and (class_ in POLICIES or class_.__name__ == "Lambda"):
        return True
    if class_ is not None and difference(part, class_) is None:
        return False
    if "torchvision.transforms" not in sys.modules:
        return True
    from gpuaug.fusion.lower.by_name import recognized_class  # imports torchvision
    from gpuaug.fusion.ops.torchvision import crop  # gpuaug's transforms, which derive from torchvision's base class

    return recognized_class(part) is None and class_of(part, lowered(crop)) is None
