"""Targets in containers: target dicts, torchvision's tensors in any container, and lists of masks.

A *target dict* holds the annotations of one image, such as ``{"boxes": …, "labels": …}``. Target dicts are *packed* if the
values of all images under one key are one tensor. A container is read *by column*: the values at one place of all images, such
as the boxes of all target dicts, become one slot.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.errors import ArgumentError, ArgumentTypeError
from gpuaug.core.targets import (
    BOXES,
    HOLDS_NOTHING,
    KEYPOINTS,
    MASKS,
    TARGET_KEYS,
    TARGET_TYPES,
    VALID,
    FlatColumn,
    Kind,
    PackedColumn,
    PackedTargets,
    TensorColumn,
    columns,
    holds_targets,
    type_name,
    type_name_of,
)
from gpuaug.fusion.forms.call import Call
from gpuaug.fusion.forms.dense import Dense
from gpuaug.fusion.forms.kinds import Slot

_Path = tuple[Any, ...]
"""Place in a container: keys, field names and indices. The index of the image is left out."""

_Results = Callable[[], Any]
"""Function that returns a copy of a part of a container, with the transformed targets."""

_Parts = Callable[[], Sequence[Any]]
"""Function that returns the transformed values of a column."""

(_VALID,) = VALID.keys


class Container:
    """Input whose targets are in a container.

    In a sequence of B elements, element ``i`` belongs to image ``i``. A tensor outside such a sequence holds one entry per
    image, (B, …). Of clips, a list may hold one list with one element per frame for each clip, and keypoints may be
    (B, T, n, 2).

    Args:
        key: Data key: ``targets`` for one dict per image, in which tensors are recognized by their keys, and torchvision's
            tensors under any key; ``tv_tensors`` for containers of torchvision's tensors; ``mask`` for a list of masks.
        value: The container.
        call: The call.

    Raises:
        ArgumentError: If a sequence or a tensor does not hold one entry per image.
    """

    def __init__(self, key: str, value: Any, call: Call) -> None:
        self.key, self._call = key, call
        self._batch = call.size.batch
        self.slots: list[Slot] = []
        """Boxes, keypoints and instance masks."""
        self.maps: list[Dense] = []
        """Adapters of tensors of segmentation maps of all images, (B, …)."""
        results = self._packed(value) if isinstance(value, PackedTargets) else None
        if results is None:
            value = value.unpacked() if isinstance(value, PackedTargets) else value
            read = {"targets": self._target_dicts, "mask": self._mask_list}.get(key)
            results = self._of_batch(value, ()) if read is None else read(value)
        self._results = results or (lambda: value)
        self.targets = [slot.pack() for slot in self.slots]

    @property
    def inner_keys(self) -> list[str]:
        """Data keys of the targets that are recognized by class."""
        is_list = self.key == "tv_tensors" and self.slots
        return [*(adapter.key for adapter in self.maps), *(("targets",) if is_list else ())]

    def output(self) -> Any:
        """Return the container with the transformed targets."""
        return self._results()

    def _slot(self, kind: Kind, path: _Path, column: TensorColumn, *, key: str = "", per_frame: bool) -> Slot:
        """Create a slot. ``key``: key of the targets in target dicts; empty for other containers."""
        slot = Slot(kind, key or kind.name, path, column, self._call, per_frame=per_frame)
        self.slots.append(slot)
        return slot

    def _mask_list(self, value: Sequence[Any]) -> _Results:
        """Read a list of masks, one tensor per image."""
        if not value and not self._batch:
            return lambda: value
        if len(value) != self._batch:
            raise ArgumentError(
                f"mask must hold masks for each of the {self._batch} images, got {len(value)}. Pass one tensor per image."
            )
        slot = self._slot(MASKS, (), TensorColumn(range(len(value)), value), per_frame=False)
        cls: Any = type(value)
        return lambda: cls(slot.parts())

    def _target_dicts(self, value: Any) -> _Results:
        """Read a list of one dict per image or frame, or of one list of dicts per clip."""
        call, frames = self._call, self._call.frames
        is_nested = bool(frames) and isinstance(value, list | tuple) and bool(value)
        is_nested = is_nested and all(isinstance(clip, list | tuple) for clip in value)
        if is_nested and any(len(clip) != frames for clip in value):
            count = next(len(clip) for clip in value if len(clip) != frames)
            raise ArgumentError(
                f"targets must hold one dict for each of the {frames} frames of a clip, got {count}. "
                "Pass one dict per clip, or one dict per frame."
            )
        records = [record for clip in value for record in clip] if is_nested else value
        per_frame = is_nested or (frames > 1 and isinstance(value, list | tuple) and len(value) == self._call.size.images)
        _check_dicts(records, self._call.size.images if per_frame else self._batch)
        parts = self._of_records(records, range(len(records)), (), by_key=True, per_frame=per_frame)
        assert parts is not None

        def results() -> Any:
            made = parts()
            if not per_frame:
                return tuple(made) if isinstance(value, tuple) else made
            clips = call.output_frames(made)
            return type(value)(map(type(value), clips) if is_nested else chain.from_iterable(clips))

        return results

    def _packed(self, packed: PackedTargets) -> _Results | None:
        """Read packed target dicts. Return ``None`` if they have to be unpacked."""
        own = packed.columns()
        by_key = self.key == "targets"
        names = set().union(*packed.layout.records) & {*TARGET_KEYS, _VALID}
        is_list = by_key or self.key == "tv_tensors"
        if self._call.frames or not is_list or not names <= own.keys() or holds_targets(packed.others):
            return None
        slots: dict[Any, Slot] = {}
        for name, column in own.items():
            kind = TARGET_TYPES.get(type_name_of(column.packed.tensor_type))
            kind = TARGET_KEYS.get(name, kind) if by_key else kind
            if kind is not None:
                slots[name] = Slot(kind, name if name in kind.keys else kind.name, (name,), column, self._call)
                if any(len(shape) != 3 for shape in column.shapes) if kind is MASKS else column.packed.shapes is not None:
                    return None
        boxes = [slot for slot in slots.values() if slot.kind is BOXES]
        flags = own.get(_VALID)
        rows = [(list(slot.column.samples), own[slot.path[0]].packed.lengths) for slot in boxes]
        if len(boxes) > 1 or (flags is not None and rows != [(list(flags.samples), flags.packed.lengths)]):
            return None
        self.slots += slots.values()
        _assign_valid([(False, slot) for slot in boxes], flags)
        is_pure = self._call.conversions.is_pure

        def results() -> PackedTargets:
            changes: dict[Any, tuple[PackedColumn, Tensor]] = {}
            for name, slot in slots.items():
                changes[name] = slot.packed()
                if slot.valid is not None:
                    counts = changes[name][0].lengths
                    changes[_VALID] = PackedColumn(_VALID, slot.column.samples, counts, None, Tensor, [{}]), slot.valid
            if is_pure and by_key:
                others = (name for name in own if name not in changes and type_name_of(own[name].packed.tensor_type))
                changes |= {name: (own[name].packed.plain(), own[name].joined) for name in others}
            return packed.with_columns(changes)

        return results

    def _of_batch(self, value: Any, path: _Path) -> _Results | None:
        """Read a value that belongs to all images. Return ``None`` if there are no targets in it.

        Args:
            value: Container, or a part of it.
            path: Place of ``value``.
        """
        if isinstance(value, Tensor):
            return self._tensor_of_batch(value, path)
        call = self._call
        if call.frames and self._is_per_frame(value):
            parts = self._of_column(list(chain.from_iterable(value)), range(call.size.images), path, per_frame=True)
            assert parts is not None
            return lambda: type(value)(map(type(value[0]), call.output_frames(parts())))
        if _is_sequence(value):
            return self._sequence_of_batch(value, path)
        if not batches.is_container(value):
            return None
        members: dict[Any, _Results] = {}
        names = batches.member_names(value)
        # In a mapping, ``valid`` refers to the first boxes.
        boxes = (name for name in names if isinstance(value, Mapping) and type_name(value[name]) == BOXES.class_name)
        first = next(boxes, None)
        for name in names:
            results = self._of_batch(batches.member(value, name), (*path, name))
            if results is None:
                continue
            members[name] = results
            if name is first:
                slot = self.slots[-1]
                members[_VALID] = lambda slot=slot: slot.valid  # type: ignore[misc]
                if _VALID in value:
                    valid = value[_VALID]
                    samples = slot.column.samples
                    is_one_each = isinstance(valid, Tensor) and valid.shape == (self._batch,)
                    slot.flags = TensorColumn(samples, valid.split(1) if is_one_each else [valid] * len(samples))
                    slot.valid_samples = samples
        return (lambda: batches.replace(value, {name: results() for name, results in members.items()})) if members else None

    def _sequence_of_batch(self, value: Sequence[Any], path: _Path) -> _Results | None:
        """Read a sequence with one element per image."""
        if len(value) != self._batch:
            if not holds_targets(value):
                return None
            raise ArgumentError(
                f"A list of masks, boxes or keypoints must hold one element for each of the {self._batch} images, got "
                f"{len(value)}. Put tensors that hold all images into a dict, not into a list."
            )
        self._check_elements(value)
        parts = self._of_column(value, range(self._batch), path, per_frame=False)
        if parts is None:
            return None
        return lambda: batches.replace(value, dict(enumerate(parts())))

    def _tensor_of_batch(self, tensor: Tensor, path: _Path) -> _Results | None:
        """Read a tensor outside of a sequence of one element per image: it holds one entry per image."""
        kind = TARGET_TYPES.get(type_name(tensor))
        if kind is None:
            return None
        call, batch, frames = self._call, self._batch, self._call.frames
        # In a batch of one image, every tensor belongs to that image, unless it has a batch axis.
        if batch == 1 and tensor.ndim < 4:
            parts = self._of_column([tensor], range(1), path, per_frame=False)
            assert parts is not None
            return lambda: parts()[0]
        if kind is MASKS:
            self.maps.append(Dense(MASKS.keys[MASKS.name], tensor, self._call))
            return self.maps[-1].output
        if not batch:
            return None
        per_frame = kind is KEYPOINTS and bool(frames) and tensor.ndim == 4 and tensor.shape[1] == frames
        expected = self._call.size.images // frames if per_frame else batch
        if not tensor.ndim or len(tensor) != expected:
            raise ArgumentError(
                f"{kind.class_name} must hold one entry for each of the {batch} images, got {tuple(tensor.shape)}. "
                "Pass a list of one tensor per image."
            )
        count = call.size.images if per_frame else batch
        flat = tensor.as_subclass(Tensor).flatten(0, -2)
        packed = PackedColumn("", range(count), [len(flat) // count] * count, None, type(tensor), [vars(tensor)])
        slot = self._slot(kind, path, FlatColumn(packed, flat), per_frame=per_frame)

        def results() -> Tensor:
            column, values = slot.packed()
            values = values.view(tensor.shape)
            (result,) = column._replace(lengths=[len(tensor)]).tensors(
                values[:, list(call.frame_indices)] if per_frame else values
            )
            return result

        return results

    def _of_column(
        self, values: Sequence[Any], samples: Sequence[int], path: _Path, *, key: str = "", per_frame: bool
    ) -> _Parts | None:
        """Read the values at one place of each image or frame. Return ``None`` if there are no targets in them.

        Args:
            values: The values. A tensor belongs to the image or frame of its value.
            samples: Index of the image or frame of each value.
            path: Place of the values.
            key: Key of target dicts that the values have; empty if targets are recognized by their classes.
            per_frame: Whether the samples are frames.
        """
        groups: dict[Kind | None, Sequence[int]] = {TARGET_KEYS[key]: range(len(values))} if key else _by_kind(values)
        results: list[tuple[Sequence[int], _Parts]] = []
        for kind, positions in groups.items():
            group, owners = _selected(values, positions), _selected(samples, positions)
            if kind is not None:
                slot = self._slot(kind, path, TensorColumn(owners, group), key=key, per_frame=per_frame)
                results.append((positions, slot.parts))
            elif (parts := self._of_records(group, owners, path, per_frame=per_frame)) is not None:
                results.append((positions, parts))

        if len(results) == 1 and len(results[0][0]) == len(values):
            return results[0][1]

        def put() -> Sequence[Any]:
            made = list(values)
            for positions, parts in results:
                for position, part in zip(positions, parts(), strict=True):
                    made[position] = part
            return made

        return put if results else None

    def _of_records(
        self, values: Sequence[Any], samples: Sequence[int], path: _Path, *, by_key: bool = False, per_frame: bool
    ) -> _Parts | None:
        """Read containers, one per image or frame, by column. Arguments and result as of ``_of_column``.

        ``by_key``: whether the containers are target dicts. They are then copied even if there are no targets.
        """
        are_dicts = set(map(type, values)) == {dict}
        records = (
            values
            if are_dicts
            else [{name: batches.member(value, name) for name in batches.member_names(value)} for value in values]
        )
        own = columns(records)
        results: list[tuple[Any, Sequence[int], _Parts]] = []
        boxes: list[tuple[bool, Slot]] = []
        for name, (positions, column) in own.items():
            key = name if by_key and name in TARGET_KEYS else ""
            if not key and HOLDS_NOTHING.issuperset(map(type, column)):
                continue
            start = len(self.slots)
            parts = self._of_column(column, _selected(samples, positions), (*path, name), key=key, per_frame=per_frame)
            if parts is not None:
                results.append((name, positions, parts))
            new_slots = self.slots[start:]
            boxes += [(bool(key), slot) for slot in new_slots if slot.kind is BOXES and slot.path == (*path, name)]
        if are_dicts or all(isinstance(value, Mapping) for value in values):
            positions, column = own.get(_VALID, ((), ()))
            _assign_valid(boxes, TensorColumn(_selected(samples, positions), column) if column else None)
        position_of = {sample: position for position, sample in enumerate(samples)}
        is_pure = self._call.conversions.is_pure

        def put() -> Sequence[Any]:
            # For a dict: a copy, which is changed. For another container: only the changes.
            changes: list[dict[Any, Any]] = [value.copy() if type(value) is dict else {} for value in values]
            for name, positions, parts in results:
                for position, part in zip(positions, parts(), strict=True):
                    changes[position][name] = part
            for _, slot in boxes:
                for sample, part in zip(slot.column.samples, slot.valid_parts, strict=True):
                    if sample in slot.valid_samples:
                        changes[position_of[sample]][_VALID] = part
            if by_key and is_pure:
                for record, change in zip(records, changes, strict=True):
                    for name, value in {**record, **change}.items():
                        if type(value) not in HOLDS_NOTHING and type_name(value):
                            change[name] = value.as_subclass(Tensor)
            if are_dicts:
                return changes
            return [
                change if type(value) is dict else batches.replace(value, change) if change or by_key else value
                for value, change in zip(values, changes, strict=True)
            ]

        return put if results or by_key else None

    def _check_elements(self, elements: Sequence[Any]) -> None:
        """Raise an error if the elements of a sequence may be annotations of all images, although there is one per image."""
        kinds = sorted(set(map(_kind, elements)) - {""})
        got = " and ".join(kinds)
        if kinds == [MASKS.class_name] and isinstance(elements, tuple) and self._batch > 1 and not self._call.frames:
            shapes = {tuple(element.shape) if isinstance(element, Tensor) else () for element in elements}
            shape = shapes.pop()
            # Masks of all images, (B, H, W), or B masks of each image. Collate functions return lists for one mask per image.
            is_ambiguous = not shapes and len(shape) == 3 and shape[0] == self._batch
            got = f"{self._batch} masks {shape}"
        else:
            is_ambiguous = len(kinds) > 1 and holds_targets(elements)
        if is_ambiguous:
            raise ArgumentError(
                f"A list of {self._batch} elements must hold annotations of one image in each, got {got}, which may hold "
                "annotations of all images. Put tensors that hold all images into a dict, and tensors of one image into a dict "
                "for each image."
            )

    def _is_per_frame(self, value: Any) -> bool:
        """Return whether a value is a list with, for each clip, one list of one element per frame, of one type or ``None``."""
        frames, images = self._call.frames, self._call.size.images
        if type(value) not in (list, tuple) or len(value) * frames != images:
            return False
        if any(type(clip) not in (list, tuple) or len(clip) != frames for clip in value):
            return False
        return len({type(element) for clip in value for element in clip} - {type(None)}) == 1 and holds_targets(value)


def _selected(values: Sequence[Any], positions: Sequence[int]) -> Sequence[Any]:
    """Return the values at ``positions``, which are ascending."""
    return values if len(positions) == len(values) else [values[position] for position in positions]


def _by_kind(values: Sequence[Any]) -> dict[Kind | None, Sequence[int]]:
    """Return kind → positions of the targets of torchvision's classes; ``None`` → positions of containers."""
    kinds = {cls: TARGET_TYPES.get(type_name_of(cls)) for cls in set(map(type, values)) - HOLDS_NOTHING - {dict}}
    groups: dict[Kind | None, list[int]] = {}
    for position, value in enumerate(values):
        kind = kinds.get(type(value))
        if kind is not None or type(value) is dict or (type(value) in kinds and batches.is_container(value)):
            groups.setdefault(kind, []).append(position)
    return groups  # type: ignore[return-value]


def _assign_valid(boxes: Sequence[tuple[bool, Slot]], flags: TensorColumn | None) -> None:
    """Decide which boxes of each dict ``valid`` refers to: the boxes of a target dict, otherwise the first boxes.

    Args:
        boxes: (whether the boxes are under a key of target dicts, slot) for each slot of boxes.
        flags: Column of the masks of valid boxes in the input.

    Raises:
        ArgumentError: If a target dict has boxes under two keys.
    """
    taken: frozenset[int] = frozenset()
    for is_of_target_dicts, slot in sorted(boxes, key=lambda pair: not pair[0]):
        samples = frozenset(slot.column.samples)
        if is_of_target_dicts and samples & taken:
            raise ArgumentError(
                f"targets of sample {min(samples & taken)} must hold boxes or bbox, got both. Leave one of them out."
            )
        slot.valid_samples = samples - taken
        slot.flags = flags
        taken |= samples


def _check_dicts(records: Any, batch: int) -> None:
    """Raise an error if ``records`` is not a list of ``batch`` dicts."""
    if isinstance(records, str | Mapping | Tensor) or not isinstance(records, Sequence):
        raise ArgumentTypeError(
            f"targets must be a list of one dict for each image, got {type(records).__name__}. If boxes are padded to one "
            "number per image, pass the padded tensors as inputs with data keys: bbox_xyxy, valid."
        )
    if len(records) != batch:
        raise ArgumentError(
            f"targets must hold one dict for each of the {batch} images, got {len(records)}. Pass one dict per image."
        )
    for sample, record in enumerate(records) if set(map(type, records)) != {dict} else ():
        if not isinstance(record, Mapping):
            raise ArgumentTypeError(
                f"targets of sample {sample} must be a dict, got {type(record).__name__}. "
                "Put all annotations of an image into one dict: {'boxes': …, 'labels': …}."
            )


def _kind(value: Any) -> str:
    """Return a name of the type of annotations, which is equal for all images; ``""`` for an empty value."""
    if isinstance(value, Tensor):
        return type_name(value) or ("other values" if value.numel() else "")
    if _is_sequence(value):
        inner = _kind(value[0]) if value else ""
        return inner and f"list of {inner}"
    if value is None:
        return ""
    return "dict" if type(value) is dict or batches.is_container(value) else "other values"


def _is_sequence(value: Any) -> bool:
    """Return whether a value is a list, a tuple or a similar sequence, and not a namedtuple or string."""
    if type(value) in (list, dict):
        return type(value) is list
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and not batches.is_namedtuple(value)
