"""Copy of a pipeline with the settings that it has when ``gpuaug.fuse`` is called.

A pipeline is *lowered*, that is, translated to ops, separately for every dtype of images, at the latest at the first batch of
this dtype, and again when it is unpickled. It is always lowered from the copy: if it were lowered from the user's modules, a
setting that the user changes later would take effect for some dtypes only.

The copy is made here, and not in a file that lowers the modules of one library, because it depends on the classes of both.
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

    Modules and functions of the user are not copied: the pipeline calls the user's objects. Kornia's policies (such as
    RandAugment) are not copied either, because their magnitude is read for every batch, nor are modules that ``copy.deepcopy``
    cannot copy.
    """
    parts = list(all_parts(pipeline))
    shared: dict[int, Any] = {}
    """Object by ``id``, for objects that are shared with the copy: the argument ``memo`` of ``copy.deepcopy``."""
    for part in parts:
        if id(part) not in shared and _is_called_as_it_is(part):
            shared |= {id(child): child for child in all_parts(part)}
        shared |= {id(state): state for state in state_of_last_call(part)}  # not copied: may be large
    try:
        return copy.deepcopy(pipeline, dict(shared))
    except Exception:  # a module may raise any error
        for part in reversed(parts):  # members before their container
            try:
                copy.deepcopy(part, dict(shared))
            except Exception:
                shared[id(part)] = part
        return copy.deepcopy(pipeline, shared)


def _is_called_as_it_is(part: Any) -> bool:
    """Return whether a part of a pipeline is shared with the copy: a module or function of the user, or a policy of Kornia.

    A ``Lambda`` is shared, too, because it calls a function of the user. Plain sequences of modules are copied.
    """
    if is_sequence(part) or type(part) is nn.ModuleList or is_unmodified_sequential(part):
        return False
    class_ = library_class(part)
    if class_ is not None and (class_ in POLICIES or class_.__name__ == "Lambda"):
        return True
    if class_ is not None and difference(part, class_) is None:
        return False
    if "torchvision.transforms" not in sys.modules:
        return True
    from gpuaug.fusion.lower.by_name import recognized_class  # imported here, because it imports torchvision
    from gpuaug.fusion.ops.torchvision import crop  # gpuaug's transforms, which derive from torchvision's base class

    # ``lowered(crop)``: class of a module → class of its op, for the ops in the file ``crop``.
    return recognized_class(part) is None and class_of(part, lowered(crop)) is None
