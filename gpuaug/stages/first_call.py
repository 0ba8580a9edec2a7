"""Analysis of the first call of a stage's transform, for the warnings of ``hints.py``.

It finds the *parts* of the transform (modules and functions within it) that move or mix pixels, and the values of the batch
that the transform may change. Other targets or labels then no longer match the images. *Members* are the entries of a batch.
*Targets* are annotations in a batch that belong to pixels of the images: masks, boxes and keypoints. *Target dicts* are targets
in one dict per image. A *data key* is Kornia's name for a type of input of a transform, such as ``"mask"``.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch

from gpuaug.core import batch as batches
from gpuaug.core.ragged import Ragged
from gpuaug.core.targets import TARGET_KEYS, holds_targets, type_name
from gpuaug.core.torchvision_types import (
    all_parts,
    difference,
    library_class,
    torchvision_class,
    unwrapped,
    unwrapped_with_code,
)
from gpuaug.stages.selection import Selection, normalized_key

_GEOMETRIC = re.compile(
    r"kornia\.(augmentation\._[23]d\.geometric|geometry\.transform)\..*"
    r"|torchvision\.transforms\.(v2\.(functional\.)?_geometry|v2\._auto_augment|autoaugment)\..*"
    r"|torchvision\.transforms\.transforms\.(CenterCrop|ElasticTransform|FiveCrop|Pad|Resize|TenCrop)"
    r"|torchvision\.transforms\.transforms\.Random(Affine|Crop|\w+Flip|Perspective|ResizedCrop|Rotation)"
    r"|torchvision\.transforms\.functional\.(affine|\w*crop|elastic_transform|[hv]flip|pad|perspective|resize|rotate)"
    r"|torchvision\.transforms\._presets\.(ImageClassification|SemanticSegmentation|VideoClassification)"
)
"""Pattern of the qualified names of classes and functions of Kornia and torchvision that move pixels."""

_PIXEL_MIXING = re.compile(r"kornia\.augmentation\._[23]d\.mix\..*|torchvision\.transforms\.v2\._augment\._BaseMixUpCutMix")
"""Pattern of the qualified names of classes that mix the pixels of images. They leave targets unchanged."""

_LABEL_MIXING = re.compile(
    r"kornia\.augmentation\._2d\.mix\.(mixup|cutmix)\..*|torchvision\.transforms\.v2\._augment\._BaseMixUpCutMix"
)
"""Pattern of the qualified names of the classes of ``_PIXEL_MIXING`` that also mix the labels of images."""


@dataclass(frozen=True)
class FirstCall:
    """Call of a stage's transform on the first batch."""

    transform: Any
    values: tuple[Any, ...]
    """Arguments of ``transform``."""
    selection: Selection
    """``on`` and ``into`` of the stage."""
    typed_names: tuple[Any, ...] = ()
    """Names of the last members in ``values``: not in ``on``, but passed because they contain torchvision's tensors."""

    @cached_property
    def module(self) -> Any:
        """The module or function of the transform, without ``functools.partial``; the object of a bound method."""
        return unwrapped(self.transform)

    @property
    def code(self) -> str:
        """Python expression for ``module``, such as ``"transform.func"``, for messages."""
        return unwrapped_with_code(self.transform)[1]

    @property
    def is_fused(self) -> bool:
        """Whether the transform is a fused pipeline, a result of ``gpuaug.fuse``."""
        return _is_fused(self.module)

    @cached_property
    def moving_parts(self) -> str:
        """Names of the parts that move pixels, separated by commas; empty if there are none."""
        modules = [module for part in self._parts if _is_fused(part) for module in part.geometric_modules]
        return _listed([*_matches(self._parts, _GEOMETRIC), *modules])

    @cached_property
    def mixing_parts(self) -> str:
        """Names of the parts that mix the pixels of images, separated by commas; empty if there are none."""
        return _listed(_matches(self._parts, _PIXEL_MIXING))

    @cached_property
    def label_mixing_parts(self) -> str:
        """Names of the parts that mix images and their labels, separated by commas; empty if there are none."""
        return _listed(_matches(self._parts, _LABEL_MIXING))

    @cached_property
    def _parts(self) -> list[Any]:
        """The transform, and all modules and functions within it."""
        return [*all_parts(self.module)]

    @property
    def images(self) -> torch.Tensor | Ragged | None:
        """The first argument that may be images; ``None`` if there is none."""
        return next((value for value in self.values if isinstance(value, torch.Tensor | Ragged)), None)

    @cached_property
    def by_type(self) -> list[bool]:
        """Per value of ``values``: whether the transform changes only tensors of torchvision's classes in the value."""
        keys = self.selection.normalized_keys
        if not keys:
            num_selected = len(self.values) - len(self.typed_names)
            selected = [index > 0 and self._is_by_type(value) for index, value in enumerate(self.values[:num_selected])]
        else:
            selected = [key == "tv_tensors" for key in keys]
        return [*selected, *(True for _ in self.typed_names)]

    def _is_by_type(self, value: Any) -> bool:
        """Return the entry of ``by_type`` for ``value``, an argument after the images, in a call without data keys."""
        if self.is_fused:
            return not isinstance(value, torch.Tensor) and holds_targets(value)
        cls = torchvision_class(self.module)
        user_parts = (part for part in self._parts if library_class(part) is None)  # these may change plain tensors
        return cls is not None and difference(self.module, cls) is None and not any(user_parts)

    @cached_property
    def transformed_ids(self) -> set[int]:
        """``id`` of each argument, and each tensor and array within it, that the transform may change.

        Excluded are plain tensors in arguments that are transformed by type (``by_type``), and values of target dicts whose key
        is not the key of a target.
        """
        keys = self.selection.normalized_keys
        result: set[int] = set()
        for value, by_type, key in zip_longest(self.values, self.by_type, keys):
            leaves = batches.leaves(value)
            if by_type or key == "targets":
                result.update(id(leaf) for leaf in leaves if type_name(leaf))
            else:
                result.update(map(id, [value, *leaves]))
            if key == "targets":  # ``id(None)`` of missing targets is harmless: no target is ``None``
                result.update(id(target.get(name)) for target in target_dicts(value) for name in TARGET_KEYS)
        return result

    def with_members(self, on: Mapping[Any, str]) -> str:
        """Return code for the stage with further members to transform, for messages. ``on``: further member → data key."""
        selectors = self.selection.on
        # ``on`` is no mapping where ``names`` is used, and the default ``...`` reads index 0 of a batch with members.
        names = selectors if isinstance(selectors, tuple) else (0 if selectors is ... else selectors,)
        pipeline_keys = next((part.data_keys for part in self._parts if getattr(part, "data_keys", None)), ())
        # If the pipeline declares fewer data keys than there are members, the other members are images.
        keys = [*map(normalized_key, pipeline_keys), *("input" for _ in names)]
        selected = self.data_keys or dict(zip(names, keys, strict=False))
        fused = "transform" if self.is_fused else f"gpuaug.fuse({self.code})"
        return f"gpuaug.TransformStage({fused}, on={ {**selected, **on} })"

    @property
    def data_keys(self) -> dict[Any, str]:
        """``on`` of the stage with normalized data keys; empty if ``on`` is not a mapping."""
        on: Any = self.selection.on
        return dict(zip(on, self.selection.normalized_keys, strict=True)) if isinstance(on, Mapping) else {}


def target_dicts(targets: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the target dicts in a list with an entry per sample: a dict, or a list with one dict per image or frame."""
    for target in targets:
        if isinstance(target, Mapping):
            yield target
        elif isinstance(target, list | tuple):
            yield from target_dicts(target)


def _is_fused(part: Any) -> bool:
    """Return whether a part is a result of ``gpuaug.fuse``: only these have the attribute ``geometric_modules``."""
    return hasattr(part, "geometric_modules")


def _matches(parts: list[Any], names: re.Pattern[str]) -> Iterator[Any]:
    """Yield the parts that match the pattern ``names``: functions by their name, objects by a class or base class."""
    for part in parts:
        objects = (part,) if hasattr(part, "__qualname__") else type(part).__mro__
        if any(names.fullmatch(f"{item.__module__}.{item.__qualname__}") for item in objects):
            yield part


def _listed(parts: list[Any] | Iterator[Any]) -> str:
    """Return the names of parts, separated by commas, sorted and without repetitions. The name of a module is its class."""
    return ", ".join(sorted({getattr(part, "__qualname__", type(part).__name__) for part in parts}))
