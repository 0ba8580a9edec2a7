"""Decision which target dicts can be transformed *packed*, that is, as one tensor per key with the values of all images.

A *target dict* holds the annotations of one image. A loader packs the target dicts of a batch, to copy few tensors.
"""

import torch

from gpuaug.core.packed_targets import TARGET_KEYS, PackedTargets
from gpuaug.core.torchvision_types import TARGET_TYPES, holds_targets, type_name_of

_TARGET_KEYS = frozenset({*TARGET_KEYS, "valid"})
"""Keys of target dicts whose values are transformed together with the images."""


def can_stay_packed(packed: PackedTargets, *, typed: bool) -> bool:
    """Return whether ``TargetDicts`` can transform packed target dicts without unpacking them.

    For this, all tensors that must be transformed have to be packed under keys in ``_TARGET_KEYS``, boxes under only one key,
    and masks as (n, H, W).

    Args:
        packed: Target dicts.
        typed: Whether tensors are transformed because of their class, such as ``tv_tensors.Mask``, not because of their key.
    """
    columns_of = {column.name: (column, flat) for column, flat in zip(packed.layout.packed, packed.flat, strict=True)}
    names = set(columns_of)
    if (
        (set().union(*packed.layout.records) & _TARGET_KEYS) - names
        or {"boxes", "bbox"} <= names
        or holds_targets(packed.others)
    ):
        return False
    for name, (column, flat) in columns_of.items():
        key = TARGET_TYPES.get(type_name_of(column.tensor_type))
        if name not in _TARGET_KEYS:
            if key is not None:
                return False
            continue
        if typed and name != "valid" and key != ("boxes" if name == "bbox" else name):
            return False
        if name == "masks":
            if {len(shape) for shape in column.shapes or [flat.shape]} != {3}:
                return False
        elif column.shapes is not None:
            return False
    if "valid" not in names:
        return True
    valid, flags = columns_of["valid"]
    boxes, _ = columns_of.get("boxes") or columns_of.get("bbox") or (None, None)
    if boxes is None or flags.dtype != torch.bool or flags.ndim != 1:
        return False
    return list(boxes.samples) == list(valid.samples) and boxes.lengths == valid.lengths
